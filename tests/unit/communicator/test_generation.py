"""One generation of one communicator: who comes next, and what those who are gone left behind.

What becomes of a communicator: open until it is sealed, and everybody is notified after.

Members of a new generation: nobody goes on before all have come, and all know how far all had come.
"""

import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from nexar.cluster.decisions.completion import NEW_MEMBER, NONE_COMPLETED, UNCONSTRAINED, CompletedCalls
from nexar.communicator.communicator import Communicator
from nexar.communicator.events import FailureEvent
from nexar.communicator.generation import (
    SEQUENCE,
    Generation,
    GenerationBuilder,
    GenerationOutcome,
    exchange_completed,
)
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.errors import LinkClosed, MembershipChanged, NexarError, NoQuorum, OperationTimeout, PeerMisbehaved, Revoked
from nexar.group import deadline_after
from nexar.links.messages import collective_tag
from nexar.links.sending import MessageHeader
from nexar.wire.frame import Space
from tests.ranks import EVENT_TIMEOUT, on_every
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
    old.when_closed.append(lambda: go.wait(20) and ended.set())
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
    old.when_closed.append(lambda: here.append(threading.current_thread()))
    old.close_in_background(heir)
    assert here == [threading.current_thread()]


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


@pytest.fixture
def pair() -> Iterator[list[Communicator]]:
    with local_communicators(2, Config()) as made:
        yield made


def builder_of(comm: Communicator) -> GenerationBuilder:
    return comm._runtime.successors._builder


def is_open(comm: Communicator) -> bool:
    """Whether the communicator that the tests make is there on its node."""
    router = comm._group.router
    with router.lock:
        return router.find(77, comm.epoch) is not None


def test_what_it_makes_is_independent_and_closed_alone(pair: list[Communicator]) -> None:
    made = on_every(pair, lambda comm: builder_of(comm).make(comm.membership, 77, deadline_after(EVENT_TIMEOUT))[0])
    assert [is_open(comm) for comm in pair] == [True, True]
    generation = made[0]
    assert (generation.communicator, generation.group.size) == (77, 2)
    assert generation.context.call_log is not pair[0]._context.call_log
    generation.close()
    generation.close()
    assert [is_open(comm) for comm in pair] == [False, True]
    made[1].close()
    assert on_every(pair, lambda comm: comm.all_reduce(1)) == [2, 2]


def test_who_succeeds_another_one_learns_how_far_all_had_come(pair: list[Communicator]) -> None:
    made = on_every(
        pair,
        lambda comm: builder_of(comm).make(
            comm.membership, 77, deadline_after(EVENT_TIMEOUT), completed=CompletedCalls(1, 5 + comm.rank)
        ),
    )
    assert [least for _, least in made] == [5, 5]
    for made_generation, _ in made:
        made_generation.close()


def test_who_closes_the_group_meanwhile_ends_the_making_and_nothing_is_left(pair: list[Communicator]) -> None:
    builder = builder_of(pair[0])
    with pytest.raises(LinkClosed):
        builder.make(
            pair[0].membership,
            77,
            deadline_after(EVENT_TIMEOUT),
            completed=CompletedCalls(1, 1),
            begun=lambda group: group.close(),
        )
    assert not is_open(pair[0])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_everybody_learns_the_least_whoever_has_it(size: int) -> None:
    with local_communicators(size, Config()) as world:
        for lowest in range(size):

            def run(comm: Communicator, lowest: int = lowest) -> int:
                mine = 3 if comm.rank == lowest else 10 + comm.rank
                return exchange_completed(comm._group, CompletedCalls(1, mine), deadline_after(EVENT_TIMEOUT))

            assert on_every(world, run) == [3] * size


@pytest.mark.parametrize(
    ("said", "reported"),
    [
        ([NEW_MEMBER, CompletedCalls(1, 7), NEW_MEMBER], 7),
        ([NEW_MEMBER, CompletedCalls(1, NONE_COMPLETED), NEW_MEMBER], NONE_COMPLETED),
        ([NEW_MEMBER] * 3, UNCONSTRAINED),
        ([CompletedCalls(4, 7), CompletedCalls(4, 9), NEW_MEMBER], 7),
        (
            [CompletedCalls(3, 57), CompletedCalls(4, 0), CompletedCalls(3, 57)],
            NONE_COMPLETED,
        ),  # the second made what the others skipped
    ],
)
def test_who_was_not_there_and_who_comes_from_elsewhere_are_distinguished(
    said: list[CompletedCalls], reported: int
) -> None:
    with local_communicators(3, Config()) as world:
        found = on_every(
            world, lambda comm: exchange_completed(comm._group, said[comm.rank], deadline_after(EVENT_TIMEOUT))
        )
    assert found == [reported] * 3


def test_nobody_returns_before_everybody_has_come() -> None:
    come: set[int] = set()
    others_came = threading.Event()

    def run(comm: Communicator) -> int:
        if comm.rank == 4:
            assert others_came.wait(EVENT_TIMEOUT)
        come.add(comm.rank)
        if len(come) == 4:
            others_came.set()
        exchange_completed(comm._group, CompletedCalls(1, 0), deadline_after(EVENT_TIMEOUT))
        return len(come)

    with local_communicators(5, Config()) as world:
        assert on_every(world, run) == [5] * 5


def test_who_waits_in_vain_learns_for_whom() -> None:
    with local_communicators(2, Config()) as (left, _):
        with pytest.raises(OperationTimeout) as raised:
            exchange_completed(left._group, CompletedCalls(1, 0), time.monotonic() + 0.05)
        assert [peer.rank for peer in raised.value.waiting_for] == [1]


def test_who_says_something_that_is_no_number_is_named() -> None:
    with local_communicators(2, Config()) as (left, right):
        about = MessageHeader(space=Space.COLLECTIVE, sequence=SEQUENCE, step=0)
        assert collective_tag(SEQUENCE, 0) != collective_tag(SEQUENCE, 1)
        right._group.post_send(0, memoryview(b"seven"), deadline_after(EVENT_TIMEOUT), about=about)
        with pytest.raises(PeerMisbehaved, match="an invalid message while the communicator was made") as raised:
            exchange_completed(left._group, CompletedCalls(1, 0), deadline_after(EVENT_TIMEOUT))
        assert raised.value.rank == 1
