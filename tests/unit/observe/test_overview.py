import json

from nexar.observe.overview import OverviewBuilder, cells_of, format_bytes, straggler_text
from nexar.wire.status import LateRank, StatusPage, StatusRow
from tests.unit.observe.boards import board, busy, row


def test_who_waits_for_whom_and_who_is_awaited() -> None:
    overview = OverviewBuilder().see(busy(), 10.0)
    assert [line.waiting_for for line in overview.lines] == [(1,), (), (1,), (1,)]
    assert [line.awaited_by for line in overview.lines] == [0, 3, 0, 0]
    assert overview.lines[0].carriers == {"shm": (2,), "quic+tls": (3,)}
    assert (overview.lines[0].operation, overview.lines[0].seconds) == ("all_reduce #7", 2.5)


def test_who_keeps_the_others_waiting_is_named_and_nobody_where_nobody_does() -> None:
    overview = OverviewBuilder().see(busy(), 10.0)
    assert overview.straggler == 1
    assert overview.lines[1].lateness == 0.02
    assert OverviewBuilder().see(board(row(0, late=(LateRank(0, 0.0001, 0.1, 1, 1.0),))), 0.0).straggler is None
    even = tuple(LateRank(rank, 1.0, 1.0, 1, 0.25) for rank in range(4))
    assert OverviewBuilder().see(board(*(row(rank, late=even) for rank in range(4))), 0.0).straggler is None


def test_a_rate_is_the_difference_of_two_bulletins_however_often_somebody_looks() -> None:
    overseer = OverviewBuilder()
    assert overseer.see(board(row(0, bytes_sent=100, calls=1)), 10.0).lines[0].sent_rate == 0.0
    for now, heard in ((11.0, 0.0), (11.2, 0.2), (11.4, 0.4)):
        line = overseer.see(board(row(0, bytes_sent=300, calls=5, heard=heard)), now).lines[0]
        assert (round(line.sent_rate), round(line.calls_rate)) == (200, 4)
    again = overseer.see(board(row(0, bytes_sent=10, calls=1)), 12.0).lines[0]
    assert again.sent_rate == 0.0, "the counters of a successor begin anew"


def test_who_is_gone_has_no_rate_and_waits_for_nobody() -> None:
    overseer = OverviewBuilder()
    overseer.see(board(row(0, calls=1)), 10.0)
    gone = row(0, "lost", calls=9, operation="barrier #1", waiting_for=(2,), late=(LateRank(0, 1.0, 1.0, 1, 1.0),))
    overview = overseer.see(board(gone), 11.0)
    line = overview.lines[0]
    assert (line.calls_rate, line.operation, line.waiting_for, line.lateness) == (0.0, "", (), 0.0)
    assert overview.straggler is None


def test_a_member_that_has_said_nothing_yet_is_shown_by_what_the_seed_knows() -> None:
    line = OverviewBuilder().see(board(StatusRow(7, 0, "running", "host-id")), 1.0).lines[0]
    assert (line.host, line.pid, line.heard, line.state) == ("host-id", 0, None, "running")


def test_the_title_says_how_far_it_is() -> None:
    assert OverviewBuilder().see(StatusPage("c", 4, 1), 0.0).title == "forming: 1 of 4 members have joined"
    assert OverviewBuilder().see(board(row(0), row(1), joined=1), 0.0).title == "1 of 2 members are present, epoch 1"


def test_programs_get_facts_that_json_can_write() -> None:
    facts = json.loads(json.dumps(OverviewBuilder().see(busy(lost=True), 0.0).facts()))
    assert [each["state"] for each in facts["ranks"]] == ["waiting", "running", "waiting", "lost"]
    assert facts["straggler"] == 1


def test_rates_and_sums_stand_under_their_own_headings() -> None:
    line = OverviewBuilder().see(board(row(0, bytes_sent=1500, calls=3, call_bytes=2_000_000)), 0.0).lines[0]
    assert cells_of(line, rates=False)["sent"] == "1.5 kB"
    assert cells_of(line, rates=False)["collectives"] == "3, 2.0 MB"
    assert cells_of(line, rates=True)["sent/s"] == "0 B"


def test_a_straggler_that_is_gone_meanwhile_is_still_named() -> None:
    assert straggler_text(OverviewBuilder().see(busy(), 0.0)).startswith(
        "rank 1 keeps the others waiting: 20 ms a call"
    )


def test_sizes_have_three_digits_and_a_unit() -> None:
    assert [format_bytes(each) for each in (0, 999, 1000, 1_500_000, 123_456_789, 1e15, 1e19)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.5 MB",
        "123 MB",
        "1.0 PB",
        "10000 PB",
    ]
