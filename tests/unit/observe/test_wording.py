from nexar.observe.overview import Overseer
from nexar.observe.wording import cells_of, size_of, straggling
from tests.unit.observe.boards import board, busy, row


def test_rates_and_sums_stand_under_their_own_headings() -> None:
    line = Overseer().see(board(row(0, bytes_sent=1500, calls=3, call_bytes=2_000_000)), 0.0).lines[0]
    assert cells_of(line, rates=False)["sent"] == "1.5 kB"
    assert cells_of(line, rates=False)["collectives"] == "3, 2.0 MB"
    assert cells_of(line, rates=True)["sent/s"] == "0 B"


def test_a_straggler_that_is_gone_meanwhile_is_still_named() -> None:
    assert straggling(Overseer().see(busy(), 0.0)).startswith("rank 1 keeps the others waiting: 20 ms a call")


def test_sizes_have_three_digits_and_a_unit() -> None:
    assert [size_of(each) for each in (0, 999, 1000, 1_500_000, 123_456_789, 1e15, 1e19)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.5 MB",
        "123 MB",
        "1.0 PB",
        "10000 PB",
    ]
