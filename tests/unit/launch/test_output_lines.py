from traceback import format_exception

import pytest

from nexar.errors import MembershipChanged
from nexar.launch.output_lines import KEPT_BYTES, LineSplitter, Tail, TracebackHold, exception_name, last_traceback

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


def test_a_long_line_is_not_cut():
    line = b"x" * (1 << 20) + b"\n"
    assert lines(*(line[begin : begin + 65_536] for begin in range(0, len(line), 65_536))) == ([line], b"")


def test_an_endless_line_is_shown_in_pieces():
    splitter = LineSplitter(longest=10)
    assert list(splitter.feed(b"x" * 21)) == [b"x" * 10 + b"\n"] * 2
    assert splitter.finish() == b"x\n"


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
    assert exception_name(written) == "MembershipChanged"


# -- tracebacks that are kept back -----------------------------------------------------------------------------------


def test_a_traceback_and_what_follows_is_kept_back_until_it_is_released():
    hold = TracebackHold(2.0)
    assert hold.feed(b"before\n", 10.0) == [b"before\n"]
    assert hold.due is None
    traceback = [b"Traceback (most recent call last):\n", b'  File "x"\n', b"ValueError: 1\n", b"after\n"]
    assert [hold.feed(line, 10.0 + number) for number, line in enumerate(traceback)] == [[]] * 4
    assert hold.due == 12.0
    assert hold.release() == traceback
    assert hold.due is None
    assert hold.feed(b"later\n", 20.0) == [b"later\n"]


def test_a_traceback_is_kept_back_longer_if_the_process_ends_with_it():
    hold = TracebackHold(2.0)
    hold.extend(5.0)
    assert hold.due is None
    hold.feed(b"Traceback (most recent call last):\n", 10.0)
    hold.extend(5.0)
    assert hold.due == 17.0


def test_a_group_of_exceptions_begins_a_traceback_too():
    hold = TracebackHold()
    assert hold.feed(b"  + Exception Group Traceback (most recent call last):\n", 0.0) == []


def test_what_is_kept_back_is_bounded():
    hold = TracebackHold()
    hold.feed(b"Traceback (most recent call last):\n", 0.0)
    shown = hold.feed(b"x" * KEPT_BYTES, 0.0)
    assert len(shown) == 2


@pytest.mark.parametrize("raised", ["nexar.errors.MembershipChanged: x", "ValueError: x", "KeyboardInterrupt"])
def test_the_class_that_was_raised_is_named_without_its_module(raised):
    traceback = f'Traceback (most recent call last):\n  File "x", line 1\n{raised}'
    assert exception_name(traceback) == raised.partition(":")[0].rpartition(".")[2]


def test_an_empty_line_before_the_exception_does_not_hide_it():
    """Python 3.11 writes one where it has no marks for the last source line."""
    begin = 'Traceback (most recent call last):\n  File "x", line 1\n    @property\n    \n\n'
    assert exception_name(f"{begin}KeyboardInterrupt") == "KeyboardInterrupt"
    assert exception_name(f"{begin}nexar.errors.MembershipChanged: rank 1 is lost") == "MembershipChanged"
