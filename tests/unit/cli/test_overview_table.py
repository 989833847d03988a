import io

from rich.console import Console

from nexar.cli.overview_table import coloured, plain
from nexar.observe.overview import Overseer, Overview
from tests.unit.observe.boards import HOSTILE, board, busy, row


def seen(*, lost: bool = False) -> Overview:
    return Overseer().see(busy(lost=lost), 10.0)


def test_a_table_says_who_does_what_and_for_whom_it_waits() -> None:
    lines = plain(seen(lost=True)).splitlines()
    assert lines[0] == "4 of 4 members are here, epoch 1"
    assert lines[1].split()[:4] == ["rank", "state", "host", "pid"]
    assert "all_reduce #7 for 2.5 s" in lines[2]
    assert "quic+tls: 3, shm: 2" in lines[2]
    assert "its own code; last all_reduce #6" in lines[3]
    assert "was killed by SIGKILL (1.5 s ago)" in lines[5]
    assert lines[6] == "rank 1 keeps the others waiting: 20 ms a call, 90% of all lateness"


def test_a_rank_that_says_nothing_is_described_by_what_it_said_last() -> None:
    text = plain(Overseer().see(board(row(0, "stuck", heard=9.0, operation="barrier #3")), 1.0))
    assert "silent for 9 s; last in barrier #3" in text


def test_what_members_say_is_no_markup() -> None:
    console = Console(file=io.StringIO(), width=240, force_terminal=True, color_system="truecolor")
    console.print(coloured(seen(lost=True), rates=True))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert HOSTILE.partition("[")[0] in text
    assert "[red]" in text
    assert "\x1b[1;31mlost" in text
    assert "keeps the others waiting" in text


def test_an_empty_table_is_only_its_title() -> None:
    assert plain(Overseer().see(board(epoch=0, size=3), 0.0)) == "forming: 0 of 3 members have come"
