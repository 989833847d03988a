import asyncio
import signal
import threading
import time

import pytest

from nexar.cluster.decisions.admission_events import Note, NoteKind
from nexar.cluster.membership import Member, Membership
from nexar.cluster.outcome import Outcome
from nexar.errors import UsageError

NODES = (11, 12)
MEMBERSHIP = Membership("c", 1, tuple(Member(node, "h", bytes(32), {}) for node in NODES))
GONE = UsageError("it is over")


def note(kind: NoteKind, rank: int | None = 0) -> Note:
    return Note(kind, "a:1", NODES[rank or 0], rank)


@pytest.fixture
def outcome() -> Outcome:
    return Outcome()


@pytest.fixture
def formed(outcome: Outcome) -> Outcome:
    outcome.moved(MEMBERSHIP, NODES)
    return outcome


def test_nothing_is_known_before_it_is_told(outcome: Outcome) -> None:
    assert outcome.membership is None
    assert outcome.wait_formed(0) is None
    assert not outcome.wait_empty(0)


def test_what_has_formed_is_told_to_those_who_wait(outcome: Outcome) -> None:
    thread = threading.Thread(target=outcome.moved, args=(MEMBERSHIP, NODES))
    thread.start()
    assert outcome.wait_formed(10) is MEMBERSHIP
    thread.join()
    assert outcome.membership is MEMBERSHIP


@pytest.mark.parametrize("wait", ["wait_formed", "wait_empty"])
def test_a_signal_that_another_thread_was_given_ends_the_wait(
    outcome: Outcome, wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is after SIGSTOP and SIGCONT. Only the main thread runs handlers, and nothing wakes it but itself."""

    def handler(*_: object) -> None:
        raise InterruptedError("the signal")

    def given() -> None:
        waiting.wait(10)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)

    waiting = threading.Event()
    resting = outcome._rest
    monkeypatch.setattr(outcome, "_rest", lambda *times: [waiting.set(), resting(*times)][1])
    before = signal.signal(signal.SIGUSR2, handler)
    thread = threading.Thread(target=given)
    thread.start()
    began = time.monotonic()
    try:
        with pytest.raises(InterruptedError, match="the signal"):
            getattr(outcome, wait)(60)
    finally:
        signal.signal(signal.SIGUSR2, before)
        thread.join()
    assert time.monotonic() - began < 30


def test_the_first_failure_is_raised_for_ever(outcome: Outcome) -> None:
    outcome.failed(GONE)
    outcome.failed(UsageError("something else"))
    for _ in range(2):
        with pytest.raises(UsageError, match="over"):
            outcome.wait_formed(None)
    assert outcome.wait_empty(None)


def test_what_has_formed_stays_formed_when_the_seed_closes(formed: Outcome) -> None:
    formed.failed(GONE)
    assert formed.wait_formed(None) is MEMBERSHIP


@pytest.mark.parametrize("kind", ["gone", "left", "refused", "dropped"])
def test_it_is_empty_when_every_member_has_ended(formed: Outcome, kind: NoteKind) -> None:
    formed.noted(note(kind, 0))
    assert not formed.wait_empty(0)
    formed.noted(note("knocked", 1))
    formed.noted(note("gone", None))
    assert not formed.wait_empty(0)
    formed.noted(note(kind, 1))
    assert formed.wait_empty(None)


def test_a_member_that_returned_is_here_again(formed: Outcome) -> None:
    for rank in (0, 1):
        formed.noted(note("gone", rank))
    formed.noted(note("returned", 1))
    assert not formed.wait_empty(0)


def test_a_commit_that_is_told_again_brings_nobody_back(formed: Outcome) -> None:
    for rank in (0, 1):
        formed.noted(note("gone", rank))
    formed.moved(MEMBERSHIP, NODES)
    assert formed.wait_empty(0)


def test_notes_before_the_commit_do_not_count(outcome: Outcome) -> None:
    outcome.noted(note("gone", 0))
    outcome.moved(MEMBERSHIP, NODES)
    outcome.noted(note("gone", 1))
    assert not outcome.wait_empty(0)


def test_members_of_a_resumed_cluster_may_come_back_for_a_while(outcome: Outcome) -> None:
    outcome.resumed(MEMBERSHIP, time.monotonic() + 1000)
    assert outcome.wait_formed(0) is MEMBERSHIP
    outcome.noted(note("returned", 0))
    outcome.noted(note("left", 0))
    assert not outcome.wait_empty(0)  # the other one may still come
    outcome.noted(note("left", 1))
    assert outcome.wait_empty(None)


def test_then_nobody_is_waited_for_any_more(outcome: Outcome) -> None:
    outcome.resumed(MEMBERSHIP, time.monotonic() + 0.02)
    assert outcome.wait_empty(10)


def test_a_task_may_wait_too_and_may_stop_waiting(outcome: Outcome) -> None:
    async def wait() -> Membership | None:
        impatient = asyncio.create_task(outcome.formed_soon())
        await asyncio.sleep(0)
        impatient.cancel()
        patient = asyncio.create_task(outcome.formed_soon())
        await asyncio.sleep(0)
        await asyncio.to_thread(outcome.moved, MEMBERSHIP, NODES)
        assert await outcome.formed_soon() is MEMBERSHIP
        return await patient

    assert asyncio.run(wait()) is MEMBERSHIP


def test_a_loop_that_was_closed_over_a_waiting_task_harms_nobody_else(outcome: Outcome) -> None:
    loop = asyncio.new_event_loop()
    waiting = outcome.formed_soon()
    task = loop.create_task(waiting)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    outcome.moved(MEMBERSHIP, NODES)
    assert outcome.wait_formed(0) is MEMBERSHIP
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # that nobody awaits it any more is the point
    waiting.close()


def test_a_task_hears_of_a_failure(outcome: Outcome) -> None:
    outcome.failed(GONE)
    with pytest.raises(UsageError, match="over"):
        asyncio.run(outcome.formed_soon())


def test_when_the_members_went_on_those_count_who_are_present(formed: Outcome) -> None:
    later = Membership("c", 2, (*MEMBERSHIP.members[1:], Member(13, "h", bytes(32), {})))
    formed.moved(later, (12, 13))
    assert formed.membership is later
    formed.moved(MEMBERSHIP, NODES)  # old news
    assert formed.membership is later
    formed.noted(Note("gone", "a:1", 12, 0))
    assert not formed.wait_empty(0)
    formed.noted(Note("left", "a:1", 13, 1))
    assert formed.wait_empty(0)


def test_members_of_a_resumed_cluster_that_the_others_removed_are_not_waited_for(outcome: Outcome) -> None:
    outcome.resumed(MEMBERSHIP, time.monotonic() + 1000)
    outcome.moved(Membership("c", 2, MEMBERSHIP.members[:1]), (11,))
    outcome.noted(note("left", 0))
    assert outcome.wait_empty(0)


def test_launchers_are_waited_for_until_the_last_has_left(formed: Outcome) -> None:
    assert formed.wait_launchers(0)
    launchers = [Note("reserved", "a:1", 51), Note("returned", "a:1", 52)]
    for launcher in launchers:
        formed.noted(launcher)
    assert not formed.wait_launchers(0)
    formed.noted(Note("left", "a:1", 51))
    assert not formed.wait_launchers(0)
    formed.noted(Note("gone", "a:1", 52))
    assert formed.wait_launchers(0)
    assert not formed.wait_empty(0)
