import pytest
from typer.testing import CliRunner

from nexar.cli.bench.command import parse_size, series
from nexar.cli.main import app
from nexar.errors import ConfigError


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nothing"], "nothing"),
        (["-b", "x"], "-b"),
        (["-f", "1"], "-f"),
        (["--sizes", "8,x"], "--sizes"),
        (["-o", "plus"], "-o"),
        (["-d", "float33"], "-d"),
        (["--ranks", "0"], "--ranks"),
        (["--ranks", "3", "--hosts", "2"], "--ranks"),
        (["--root", "2"], "-r"),
        (["--rounds", "0"], "--rounds"),
        (["p2p-latency", "--ranks", "1"], "--ranks 2"),
        (["--against", "nccl"], "nccl"),
        (["--against", "gloo", "--peers", "nowhere"], "make bench-peers"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(arguments, named):
    ran = bench(*arguments)
    assert ran.exit_code == 2
    assert named in ran.stderr


def test_everything_that_can_be_measured_is_in_the_help():
    assert "p2p-bandwidth" in bench("--help").stdout


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("64K", 65536), ("128M", 128 << 20), ("2g", 2 << 30), ("1MiB", 1 << 20), ("4KB", 4096)]
)
def test_a_size_is_read_as_nccl_tests_read_it(text, size):
    assert parse_size(text, "-b") == size


@pytest.mark.parametrize("text", ["", "K", "1.5M", "-8", "8X"])
def test_what_is_no_size_is_refused_by_the_name_of_its_option(text):
    with pytest.raises(ConfigError, match="-e"):
        parse_size(text, "-e")


def test_a_series_goes_from_its_begin_to_its_end():
    assert list(series(8, 64, 2)) == [8, 16, 32, 64]
    assert list(series(8, 60, 2)) == [8, 16, 32]
    assert list(series(8, 8, 2)) == [8]


def test_a_series_with_a_small_factor_still_grows():
    assert list(series(1, 4, 1.1)) == [1, 2, 3, 4]


@pytest.mark.parametrize(("begin", "end", "factor", "option"), [(8, 64, 1, "-f"), (0, 64, 2, "-b"), (64, 8, 2, "-b")])
def test_a_series_without_an_end_is_refused(begin, end, factor, option):
    with pytest.raises(ConfigError, match=option):
        list(series(begin, end, factor))
