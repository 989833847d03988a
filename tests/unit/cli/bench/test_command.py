import pytest
from typer.testing import CliRunner

from nexar.cli.main import app


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
