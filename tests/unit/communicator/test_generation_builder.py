"""Builds of generations: the completed calls, the group, and runs that others drive."""

import threading
import time
from collections.abc import Iterator

import pytest

from nexar.cluster.decisions.completion import NEW_MEMBER, NONE_COMPLETED, UNCONSTRAINED, CompletedCalls
from nexar.communicator.communicator import Communicator
from nexar.communicator.generation import Generation
from nexar.communicator.generation_builder import (
    SEQUENCE,
    GenerationBuilder,
    exchange_completed,
    run_blocking,
)
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.errors import LinkClosed, OperationTimeout, PeerMisbehaved
from nexar.group import Group, deadline_after
from nexar.links.messages import collective_tag
from nexar.links.sending import MessageHeader
from nexar.wire.frame import Space
from tests.ranks import EVENT_TIMEOUT, on_every


def completed_by_all(comm: Communicator, mine: CompletedCalls, deadline: float | None = None) -> int:
    until = deadline_after(EVENT_TIMEOUT) if deadline is None else deadline
    found: int = run_blocking(comm._group, exchange_completed(comm._group, mine, until), until)
    return found


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
                return completed_by_all(comm, CompletedCalls(1, mine))

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
        found = on_every(world, lambda comm: completed_by_all(comm, said[comm.rank]))
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
        completed_by_all(comm, CompletedCalls(1, 0))
        return len(come)

    with local_communicators(5, Config()) as world:
        assert on_every(world, run) == [5] * 5


def test_who_waits_in_vain_learns_for_whom() -> None:
    with local_communicators(2, Config()) as (left, _):
        with pytest.raises(OperationTimeout) as raised:
            completed_by_all(left, CompletedCalls(1, 0), time.monotonic() + 0.05)
        assert [peer.rank for peer in raised.value.waiting_for] == [1]


def test_who_says_something_that_is_no_number_is_named() -> None:
    with local_communicators(2, Config()) as (left, right):
        about = MessageHeader(space=Space.COLLECTIVE, sequence=SEQUENCE, step=0)
        assert collective_tag(SEQUENCE, 0) != collective_tag(SEQUENCE, 1)
        right._group.post_send(0, memoryview(b"seven"), deadline_after(EVENT_TIMEOUT), about=about)
        with pytest.raises(PeerMisbehaved, match="an invalid message while the communicator was made") as raised:
            completed_by_all(left, CompletedCalls(1, 0))
        assert raised.value.rank == 1


# -- builds that others drive


class Started:
    """One build, and what came of it."""

    def __init__(self, comm: Communicator, timeout: float = EVENT_TIMEOUT) -> None:
        self.groups: list[Group] = []
        self.made: list[tuple[Generation, int]] = []
        self.errors: list[BaseException] = []
        self.ended = threading.Event()
        builder_of(comm).start(
            comm.membership,
            77,
            CompletedCalls(1, comm.rank),
            timeout=timeout,
            begun=self.groups.append,
            finished=self._finished,
            failed=self._failed,
        )

    def _finished(self, made: Generation, least: int) -> None:
        self.made.append((made, least))
        self.ended.set()

    def _failed(self, error: BaseException) -> None:
        self.errors.append(error)
        self.ended.set()


def test_a_started_build_needs_no_thread_of_its_own(pair: list[Communicator]) -> None:
    builds = [Started(comm) for comm in pair]
    for build in builds:
        assert build.ended.wait(EVENT_TIMEOUT)
        ((made, least),) = build.made
        assert (made.communicator, least, build.errors) == (77, 0, [])
        made.close()
    assert not [thread.name for thread in threading.enumerate() if "successor" in thread.name]


def test_a_started_build_ends_when_its_group_is_closed(pair: list[Communicator]) -> None:
    build = Started(pair[0])
    build.groups[0].close()
    assert build.ended.wait(EVENT_TIMEOUT)
    assert [type(error) for error in build.errors] == [LinkClosed]
    assert not is_open(pair[0])


def test_a_started_build_ends_at_its_timeout_and_names_whom_it_missed(pair: list[Communicator]) -> None:
    build = Started(pair[0], 0.05)
    assert build.ended.wait(EVENT_TIMEOUT)
    (error,) = build.errors
    assert isinstance(error, OperationTimeout)
    assert not isinstance(error.waiting_for, str)
    assert [peer.rank for peer in error.waiting_for] == [1]
    assert "raise the limit (NEXAR_RECOVERY_TIMEOUT_SECS)" in str(error)
    assert not is_open(pair[0])
