"""One generation of a communicator: its end, its outcome, and what its successor inherits."""

import gc
import threading
import weakref
from typing import Any, cast

import pytest

import nexar
from nexar.communicator.events import FailureEvent
from nexar.communicator.generation import Generation, GenerationOutcome
from nexar.errors import MembershipChanged, NexarError, NoQuorum, Revoked
from tests.unit.communicator.generations import Drive, generation, interruptions

# ---------------------------------------------------------------- its end


def test_an_interruption_ends_every_call_with_what_was_given_or_that_its_members_change() -> None:
    world = generation([1, 2])
    assert not world.interrupted
    world.interrupt()
    assert world.interrupted
    (raised,) = interruptions(world)
    assert isinstance(raised, Revoked)
    error = NexarError("a reason of its own")
    world.interrupt(error)
    assert interruptions(world)[1] is error


def test_a_successor_has_the_functions_and_the_listeners_of_the_one_before() -> None:
    received: list[object] = []
    came = threading.Event()

    def listen(event: object) -> None:
        received.append(event)
        came.set()

    old, new = generation([1, 2]), generation([1], epoch=2)
    subscription = old.failures.subscribe(listen)
    new.inherit(old)
    assert new.registry is old.registry
    event = FailureEvent(0, 1, "a cause", "stuck", 2)
    new.failures.publish(event)
    assert came.wait(20)
    assert received == [event]
    subscription.close()
    new.end()


def test_what_it_stands_on_is_freed_once() -> None:
    freed: list[str] = []
    world = generation([1, 2])
    made = Generation(world.context, lambda: freed.append("freed"))
    threads = [threading.Thread(target=made.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert freed == ["freed"]


def test_where_there_is_no_successor_nothing_more_is_reported_and_what_it_stands_on_is_free() -> None:
    world = generation([1, 2])
    received: list[object] = []
    world.memberships.subscribe(received.append)
    world.end()
    world.memberships.publish("too late")  # type: ignore[arg-type]
    assert received == []
    assert world.group.closed.is_set()  # type: ignore[attr-defined]


# ---------------------------------------------------------------- clearing away


def test_what_takes_its_time_to_end_keeps_nobody_waiting_but_who_closes_the_heir() -> None:
    old, heir = generation([1, 2, 3]), generation([1, 2], epoch=2)
    go, ended = threading.Event(), threading.Event()
    old.call_when_closed(lambda: go.wait(20) and ended.set())
    old.close_in_background(heir)
    assert not ended.is_set(), "it is not waited for here"
    closing = threading.Thread(target=heir.close)
    closing.start()
    go.set()
    closing.join(20)
    assert ended.is_set()


def test_when_the_heir_is_closed_already_it_is_closed_here() -> None:
    old, heir = generation([1, 2, 3]), generation([1, 2], epoch=2)
    heir.close()
    here: list[threading.Thread] = []
    old.call_when_closed(lambda: here.append(threading.current_thread()))
    old.close_in_background(heir)
    assert here == [threading.current_thread()]


def test_a_callback_for_the_end_of_a_closed_one_is_called_at_once() -> None:
    world, called = generation([1, 2]), threading.Event()
    world.close()
    world.call_when_closed(called.set)
    assert called.is_set()


def result() -> tuple[GenerationOutcome, Drive]:
    drive = Drive()
    return GenerationOutcome(cast(Any, drive)), drive


def test_while_it_is_open_nothing_is_raised() -> None:
    open_one, _ = result()
    open_one.check()
    open_one.cancel()  # who waits no longer changes nothing
    assert not open_one.done
    assert open_one.name == "the agreement on the next membership"
    assert open_one.awaited().missing == "its vote"


def test_once_sealed_every_call_raises_its_own_copy() -> None:
    sealed, drive = result()
    error = NoQuorum(alive=[0], needed=2)
    sealed.resolve(error)
    for _ in range(2):
        with pytest.raises(NoQuorum) as raised:
            sealed.check()
        assert raised.value is not error
        assert (raised.value.alive, raised.value.needed) == (error.alive, 2)
    assert drive.kicks  # who waits for it may sleep, and nothing else would wake it


def test_a_later_message_replaces_an_earlier_one() -> None:
    """Who has no quorum may still learn that the others went on."""
    sealed, _ = result()
    sealed.resolve(NoQuorum(alive=[0], needed=2))
    sealed.resolve(MembershipChanged(communicator="the next one", lost={1: "gone"}, joined=(), completed_by_all=None))
    with pytest.raises(MembershipChanged) as raised:
        sealed.check()
    assert raised.value.communicator == "the next one"


def test_who_waits_for_it_is_notified() -> None:
    awaited, _ = result()
    reported = threading.Event()
    with awaited.lock:
        awaited.when_done(reported.set)
    assert not reported.is_set()
    awaited.resolve(NoQuorum(alive=[0], needed=2))
    assert reported.is_set()
    with pytest.raises(NoQuorum):
        awaited.result()


def test_the_first_communicator_leads_to_the_newest_and_holds_none_between() -> None:
    with nexar.local(1) as (first,):
        second = first.shrink()
        third = second.shrink()
        with pytest.raises(nexar.MembershipChanged) as raised:
            first.barrier()
        assert raised.value.communicator is third
        assert first.shrink() is third
        between = weakref.ref(second)
        del second, raised
        gc.collect()
        assert between() is None
        assert third.all_reduce(2.0) == 2.0
