from nexar.cluster.decisions.admission_events import Note, NoteKind
from nexar.cluster.membership import Member, Membership
from nexar.cluster.notice_board import NoticeBoard, gather
from nexar.testing.virtual_clock import VirtualClock
from nexar.wire.bulletin import ROWS, Board, Bulletin

MEMBERS = Membership("c", 1, tuple(Member(node, "h", bytes([node]) * 32, {}) for node in (1, 2, 3)))


def made() -> NoticeBoard:
    board = NoticeBoard("c", 3, lambda: 2, clock=VirtualClock())
    board.moved(MEMBERS)
    return board


def states(board: NoticeBoard) -> list[str]:
    return [row.state for row in board.page().rows]


def test_it_knows_how_many_have_come_before_it_knows_the_members() -> None:
    assert NoticeBoard("c", 3, lambda: 2).page().joined == 2


def test_what_happens_at_the_door_is_shown() -> None:
    board = made()
    kinds: list[NoteKind] = ["gone", "left", "child died"]
    for node, kind in enumerate(kinds, 1):
        board.noted(Note(kind, "10.0.0.1:1", node, node - 1, "why"))
    assert states(board) == ["lost", "left", "lost"]
    board.noted(Note("returned", "10.0.0.1:1", 1, 0))
    assert states(board) == ["running", "left", "lost"]


def test_a_stranger_who_says_the_name_of_a_member_does_it_no_harm() -> None:
    board = made()
    board.noted(Note("refused", "6.6.6.6:1", 1, None, "wrong secret"))
    board.noted(Note("left", "6.6.6.6:1", 2, None))
    board.noted(Note("gone", "6.6.6.6:1"))
    assert states(board) == ["running"] * 3


def test_bulletins_are_shown_with_the_member_that_wrote_them() -> None:
    board = made()
    board.pin(2, Bulletin(1, 1, pid=77))
    assert [row.bulletin and row.bulletin.pid for row in board.whole().rows] == [None, 77, None]


def test_pages_make_one_board_and_a_row_that_moves_meanwhile_is_shown_once() -> None:
    members = tuple(Member(node, "h", node.to_bytes(32, "big"), {}) for node in range(1, 2 * ROWS + 2))
    board = NoticeBoard("c", len(members), lambda: 0)
    board.moved(Membership("c", 1, members))
    assert [row.rank for row in board.whole().rows] == list(range(len(members)))

    def shrinking(first: int) -> Board:
        page = board.page(first)
        board.moved(Membership("c", 2, members[1:]))
        return page

    found = gather(shrinking)
    assert len({row.node for row in found.rows}) == len(found.rows) == found.total
