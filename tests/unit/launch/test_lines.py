from traceback import format_exception

from nexar.errors import MembershipChanged
from nexar.launch.lines import LONGEST_LINE, LineSplitter, Tail, blames_another, came_too_late, last_traceback

SIMPLE = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: on purpose'
CAUSE = 'Traceback (most recent call last):\n  File "b.py", line 2, in <module>\nKeyError: 1'
DURING = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
GROUP = "  + Exception Group Traceback (most recent call last):\n  | ExceptionGroup: two\n  +-+--- 1 ---\n    | E"


def lines(*pieces):
    splitter = LineSplitter()
    return [line for piece in pieces for line in splitter.feed(piece)], splitter.finish()


def test_a_line_is_whole_however_it_was_cut():
    assert lines(b"he", b"llo\nwor", b"ld\n") == ([b"hello\n", b"world\n"], b"")


def test_what_has_no_end_gets_one_at_the_end():
    assert lines(b"a\nb") == ([b"a\n"], b"b\n")


def test_a_progress_bar_ends_its_lines_with_a_carriage_return():
    assert lines(b"10%\r20%\r", b"done\n") == ([b"10%\r", b"20%\r", b"done\n"], b"")


def test_the_end_of_a_line_may_be_cut_in_two():
    assert lines(b"a\r", b"\nb\r\n") == ([b"a\r\n", b"b\r\n"], b"")


def test_an_endless_line_is_shown_in_pieces():
    found, rest = lines(b"x" * (2 * LONGEST_LINE + 1))
    assert [len(line) for line in found] == [LONGEST_LINE + 1] * 2
    assert rest == b"x\n"


def test_the_tail_keeps_the_last_and_is_bounded():
    tail = Tail(kept_bytes=4)
    for piece in (b"abc", b"defgh", b"ijklmnop"):
        tail.feed(piece)
    assert tail.text() == "mnop"


def test_the_last_traceback_is_found_behind_other_output():
    assert last_traceback(f"warning\n{CAUSE}\nrecovered\n{SIMPLE}\n") == SIMPLE


def test_linked_exceptions_belong_to_the_traceback():
    assert last_traceback(f"noise\n{CAUSE}{DURING}{SIMPLE}\n") == f"{CAUSE}{DURING}{SIMPLE}"


def test_an_earlier_traceback_that_is_not_linked_does_not():
    assert last_traceback(f"{SIMPLE}\nwent on\n{CAUSE}{DURING}{SIMPLE}\n") == f"{CAUSE}{DURING}{SIMPLE}"


def test_a_group_of_exceptions_is_a_traceback():
    assert last_traceback(f"noise\n{GROUP}\n") == GROUP


def test_without_a_traceback_the_last_lines_are_shown():
    text = "\n".join(str(number) for number in range(100))
    assert last_traceback(text + "\n").splitlines() == [str(number) for number in range(80, 100)]


def test_nothing_gives_nothing():
    assert last_traceback("") == ""


def test_a_rank_that_fails_for_want_of_another_is_told_from_one_that_fails_by_itself():
    lost = "Traceback (most recent call last):\n  …\nnexar.errors.peers.PeerLost: lost rank 2 (node 00…2a)\n"
    assert blames_another(lost)
    assert not blames_another("Traceback (most recent call last):\n  …\nValueError: no data\n")
    assert not blames_another("")


def test_the_traceback_of_another_rank_inside_a_message_is_not_taken_for_its_own():
    change = MembershipChanged(
        communicator=None, lost={1: f"it raised an exception and left:\n{SIMPLE}\n"}, joined=(), completed_by_all=None
    )
    change.add_note("this rank's last calls are in dumps/a.json")
    written = (
        f'Traceback (most recent call last):\n  File "c.py", line 3\n    barrier()\n{"".join(format_exception(change))}'
    )
    assert "ValueError: on purpose" in written
    assert last_traceback(f"noise\n{CAUSE}\nwent on\n{written}") == written.rstrip()
    assert blames_another(written)


def test_a_joiner_that_nobody_could_let_in_came_too_late():
    refused = (
        "nexar.errors.joining.JoinRefused: the seed at a:1 refused this node: every member has left or died: nobody"
    )
    assert came_too_late(f"Traceback (most recent call last):\n  …\n{refused}\n")
    assert not came_too_late("Traceback …\nnexar.errors.joining.JoinRefused: the seed refused this node: not elastic")
    assert not came_too_late("")
