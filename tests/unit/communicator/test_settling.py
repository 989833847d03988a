"""Members of a new generation: nobody goes on before all have come, and all know how far all had come."""

import threading
import time

import pytest

from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.communicator.settling import ANYTHING, NEWCOMER, NOTHING, SEQUENCE, Completed, settle
from nexar.config import Config
from nexar.errors import OperationTimeout, PeerMisbehaved
from nexar.group import deadline_after
from nexar.links.message import collective_tag
from nexar.links.sending import About
from nexar.wire.frame import Space
from tests.ranks import PATIENCE, on_every


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_everybody_learns_the_least_whoever_has_it(size: int) -> None:
    with local_communicators(size, Config()) as world:
        for lowest in range(size):

            def run(comm: Communicator, lowest: int = lowest) -> int:
                mine = 3 if comm.rank == lowest else 10 + comm.rank
                return settle(comm._group, Completed(1, mine), deadline_after(PATIENCE))

            assert on_every(world, run) == [3] * size


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ([NEWCOMER, Completed(1, 7), NEWCOMER], 7),
        ([NEWCOMER, Completed(1, NOTHING), NEWCOMER], NOTHING),
        ([NEWCOMER] * 3, ANYTHING),
        ([Completed(4, 7), Completed(4, 9), NEWCOMER], 7),
        ([Completed(3, 57), Completed(4, 0), Completed(3, 57)], NOTHING),  # the second made what the others skipped
    ],
)
def test_who_was_not_there_and_who_comes_from_elsewhere_are_told_apart(said: list[Completed], told: int) -> None:
    with local_communicators(3, Config()) as world:
        found = on_every(world, lambda comm: settle(comm._group, said[comm.rank], deadline_after(PATIENCE)))
    assert found == [told] * 3


def test_nobody_returns_before_everybody_has_come() -> None:
    come: set[int] = set()
    others_came = threading.Event()

    def run(comm: Communicator) -> int:
        if comm.rank == 4:
            assert others_came.wait(PATIENCE)
        come.add(comm.rank)
        if len(come) == 4:
            others_came.set()
        settle(comm._group, Completed(1, 0), deadline_after(PATIENCE))
        return len(come)

    with local_communicators(5, Config()) as world:
        assert on_every(world, run) == [5] * 5


def test_who_waits_in_vain_is_told_for_whom() -> None:
    with local_communicators(2, Config()) as (left, _):
        with pytest.raises(OperationTimeout) as raised:
            settle(left._group, Completed(1, 0), time.monotonic() + 0.05)
        assert [peer.rank for peer in raised.value.waiting_for] == [1]


def test_who_says_something_that_is_no_number_is_named() -> None:
    with local_communicators(2, Config()) as (left, right):
        about = About(space=Space.COLLECTIVE, sequence=SEQUENCE, step=0)
        assert collective_tag(SEQUENCE, 0) != collective_tag(SEQUENCE, 1)
        right._group.post_send(0, memoryview(b"seven"), deadline_after(PATIENCE), about=about)
        with pytest.raises(PeerMisbehaved, match="no number") as raised:
            settle(left._group, Completed(1, 0), deadline_after(PATIENCE))
        assert raised.value.rank == 1
