from nexar.cluster.decisions.status_board import KEPT, PATIENT, SILENT, StatusBoard
from nexar.cluster.membership import Member, Membership
from nexar.wire.status import ROWS_PER_PAGE, StatusReport


def membership(epoch: int, *nodes: int) -> Membership:
    return Membership("c", epoch, tuple(Member(node, "h", bytes([node % 256]) * 32, {}) for node in nodes))


def states(notices: StatusBoard, now: float) -> dict[int, str]:
    return {row.node: row.state for row in notices.page(now).rows}


def formed(*nodes: int) -> StatusBoard:
    notices = StatusBoard("c", len(nodes))
    notices.moved(membership(1, *nodes), 0.0)
    return notices


def test_before_the_cluster_has_formed_it_shows_how_many_have_come() -> None:
    board = StatusBoard("c", 4).page(0.0, joined=3)
    assert (board.epoch, board.size, board.joined, board.rows) == (0, 4, 3, ())


def test_a_member_runs_as_long_as_its_bulletins_come() -> None:
    notices = formed(1, 2)
    notices.report_received(1, StatusReport(0, 1, operation="barrier #1"), 3.0)
    assert states(notices, 3.5) == {1: "running", 2: "running"}
    assert states(notices, SILENT + 0.1) == {1: "running", 2: "stuck"}
    assert notices.page(4.0).rows[0].heard == 1.0


def test_a_call_that_does_not_go_on_is_waiting() -> None:
    notices = formed(1)
    notices.report_received(1, StatusReport(0, 1, operation="barrier #1", began=9.0, moved=PATIENT + 0.5), 1.0)
    assert states(notices, 1.0) == {1: "waiting"}
    notices.report_received(1, StatusReport(0, 1, operation="barrier #1", began=9.0, moved=0.5), 2.0)
    assert states(notices, 2.0) == {1: "running"}


def test_who_is_lost_stays_so_whatever_it_says_until_it_is_back() -> None:
    notices = formed(1, 2)
    notices.went(2, "its line broke", 1.0)
    notices.report_received(2, StatusReport(1, 1), 1.5)
    row = notices.page(3.0).rows[1]
    assert (row.state, row.cause, row.gone, row.bulletin) == ("lost", "its line broke", 2.0, None)
    assert notices.page(3.0).joined == 1
    notices.returned(2, 4.0)
    assert states(notices, 4.0)[2] == "running"


def test_the_reason_of_the_node_that_started_it_is_the_cause() -> None:
    notices = formed(1)
    notices.went(1, "connection reset", 1.0)
    notices.went(1, "was killed by SIGKILL", 1.1, told=True)
    notices.went(1, "something later", 1.2)
    assert notices.page(2.0).rows[0].cause == "was killed by SIGKILL"


def test_of_a_traceback_the_line_that_names_the_error_is_the_cause() -> None:
    notices = formed(1)
    notices.went(1, "exited with 1\nTraceback\n  File x\nValueError: no\na note below", 1.0, told=True)
    assert notices.page(2.0).rows[0].cause == "ValueError: no"


def test_who_left_of_its_own_will_is_not_lost() -> None:
    notices = formed(1, 2, 3)
    notices.went(1, "done", 1.0, left=True)
    notices.moved(membership(2, 3), 2.0, willing={2})
    assert states(notices, 2.0) == {1: "left", 2: "left", 3: "running"}


def test_who_is_no_member_any_more_is_shown_last_with_its_old_rank() -> None:
    notices = formed(1, 2, 3)
    notices.moved(membership(2, 1, 3), 1.0)
    notices.moved(membership(1, 1, 2, 3), 2.0)  # old news
    rows = notices.page(3.0).rows
    assert [(row.node, row.rank, row.state) for row in rows] == [(1, 0, "running"), (3, 1, "running"), (2, 1, "lost")]
    assert "epoch 2" in rows[2].cause
    assert [row.former for row in rows] == [False, False, True]


def test_those_that_are_gone_are_bounded() -> None:
    notices = StatusBoard("c", 1)
    for epoch in range(1, KEPT + 50):
        notices.moved(membership(epoch, epoch), float(epoch))
    assert notices.page(1e6).total == KEPT + 1


def test_a_large_world_is_shown_by_pages() -> None:
    notices = formed(*range(1, ROWS_PER_PAGE + 3))
    assert len(notices.page(0.0).rows) == ROWS_PER_PAGE
    last = notices.page(0.0, first=ROWS_PER_PAGE)
    assert (len(last.rows), last.first, last.total) == (2, ROWS_PER_PAGE, ROWS_PER_PAGE + 2)


def test_unknown_senders_and_late_messages_change_nothing() -> None:
    notices = formed(1)
    notices.went(99, "who?", 1.0)
    notices.returned(99, 1.0)
    notices.report_received(99, StatusReport(0, 1), 1.0)
    assert states(notices, 1.0) == {1: "running"}
