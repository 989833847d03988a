"""What a communicator offers for when members come and go."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from nexar.communicator.communicator import Communicator
from nexar.communicator.events import MembershipEvent
from nexar.communicator.local import local_communicators
from nexar.communicator.resilient import Team
from nexar.config import Config
from nexar.errors import (
    Expelled,
    MembershipChanged,
    NoQuorum,
    OperationTimeout,
    PeerLost,
    PeerMisbehaved,
    Revoked,
    UsageError,
)
from nexar.wire.control import Chosen
from tests.ranks import EVENT_TIMEOUT, on_every
from tests.unit.cluster.memory_mesh import eventually
from tests.unit.communicator.worlds import World, raised

# ---------------------------------------------------------------- what is known


def test_health_names_everybody_and_says_of_itself_what_it_does(world: World) -> None:
    ranks = world(2)
    request = ranks[0].start.barrier()
    found = ranks[0].health()
    assert list(found) == [0, 1]
    assert found[0].state == "self"
    assert found[0].doing.startswith("barrier #0")
    assert found[1].state != "lost"
    ranks[1].barrier()
    request.wait(EVENT_TIMEOUT)


def test_health_says_who_is_lost_and_why(world: World) -> None:
    ranks = world(3, recovery_policy="manual")
    ranks[2].close()
    raised(lambda: ranks[0].recv(source=2, timeout=EVENT_TIMEOUT))
    eventually(lambda: ranks[0].health()[2].state == "lost", "it is known to be lost")
    assert ranks[0].health()[2].cause == "it left"


def test_membership_events_go_on_with_the_successors(world: World) -> None:
    ranks = world(3)
    steps: list[MembershipEvent] = []
    with ranks[0].membership_events(steps.append):
        ranks[2].close()
        first = raised(lambda: ranks[0].recv(source=2, timeout=EVENT_TIMEOUT))
        assert isinstance(first, MembershipChanged)
        ranks[1].close()
        second = raised(lambda: first.communicator.recv(source=1, timeout=EVENT_TIMEOUT))
        assert isinstance(second, MembershipChanged)
        eventually(lambda: len(steps) == 2, "two events")
    assert [(step.epoch, step.old_size, step.size) for step in steps] == [(2, 3, 2), (3, 2, 1)]
    assert [dict(step.left) for step in steps] == [{2: "it left"}, {1: "it left"}]


# ---------------------------------------------------------------- shrinking


def test_under_the_manual_policy_survivors_shrink_and_go_on(world: World) -> None:
    ranks = world(4, recovery_policy="manual")
    ranks[1].close()
    survivors = [ranks[0], *ranks[2:]]

    def go_on(comm: Communicator) -> Communicator:
        assert isinstance(raised(lambda: comm.recv(source=1, timeout=EVENT_TIMEOUT)), PeerLost)
        return comm.shrink(timeout=EVENT_TIMEOUT)

    following = on_every(survivors, go_on)
    assert [(comm.rank, comm.size) for comm in following] == [(0, 3), (1, 3), (2, 3)]
    assert on_every(following, lambda comm: comm.all_reduce(comm.rank)) == [3, 3, 3]
    assert ranks[0].shrink() is following[0]  # asked again, it is the same
    assert "comm.shrink()" in str(raised(ranks[0].barrier))


def test_after_a_revoke_the_same_members_go_on(world: World) -> None:
    ranks = world(3)
    ranks[2].revoke("the data is wrong")
    for comm in ranks:
        assert isinstance(raised(lambda comm=comm: comm.recv(source=0, tag=9, timeout=EVENT_TIMEOUT)), Revoked)
    following = on_every(ranks, lambda comm: comm.shrink(timeout=EVENT_TIMEOUT))
    assert on_every(following, lambda comm: comm.all_reduce(1)) == [3] * 3


def test_a_part_shrinks_without_the_world(world: World) -> None:
    ranks = world(3, recovery_policy="manual")
    parts = on_every(ranks, lambda comm: comm.split(comm.rank % 2))
    even = [parts[0], parts[2]]
    following = on_every(even, lambda comm: comm.shrink(timeout=EVENT_TIMEOUT))  # type: ignore[union-attr]
    assert [(comm.rank, comm.size, comm.id) for comm in following] == [(0, 2, even[0].id), (1, 2, even[0].id)]  # type: ignore[union-attr]
    assert on_every(following, lambda comm: comm.all_reduce(1)) == [2, 2]


# ---------------------------------------------------------------- agreeing


def test_everybody_gets_the_same_of_the_values_that_were_brought(world: World) -> None:
    ranks = world(3)
    for _ in range(3):
        agreed = on_every(ranks, lambda comm: comm.agree({"rank": comm.rank, "weights": np.arange(3)}))
        assert len({value["rank"] for value in agreed}) == 1
        assert all(value["weights"].tolist() == [0, 1, 2] for value in agreed)


def test_who_comes_late_gets_the_same_answer(world: World) -> None:
    ranks = world(3)
    early = on_every(ranks[:2], lambda comm: comm.agree(comm.rank, timeout=EVENT_TIMEOUT))
    assert early in ([0, 0], [1, 1])
    assert ranks[2].agree("too late", timeout=EVENT_TIMEOUT) == early[0]


def test_a_majority_agrees_although_one_has_left(world: World) -> None:
    ranks = world(3)
    ranks[2].close()
    agreed = on_every(ranks[:2], lambda comm: comm.agree(comm.rank, timeout=EVENT_TIMEOUT))
    assert agreed in ([0, 0], [1, 1])


def test_without_a_majority_it_is_said_who_is_alive(world: World) -> None:
    ranks = world(3, recovery_policy="manual")
    for comm in ranks[1:]:
        comm.close()
    eventually(lambda: len(ranks[0]._runtime.membership_service.suspects()) == 2, "both are missed")
    error = raised(lambda: ranks[0].agree(1, timeout=0.2))
    assert isinstance(error, NoQuorum)
    assert (list(error.alive), error.needed) == ([0], 2)


def test_a_value_that_is_too_large_is_refused_before_anybody_learns_of_it(world: World) -> None:
    ranks = world(2)
    with pytest.raises(UsageError, match="bytes; a value may have up to"):
        ranks[0].agree(bytes(2 << 20))
    assert on_every(ranks, lambda comm: comm.agree("small")) == ["small", "small"]


@pytest.mark.parametrize(
    "junk", [b"", b"junk", b"\x80", b"\x90", b"\x91\xc4\x01\x07", b"\x91\xc4\x02\x01\xc1", b"\x91\xc4\x01\x02"]
)
def test_it_is_said_if_a_member_had_chosen_what_is_no_value(world: World, junk: bytes) -> None:
    ranks = world(2)
    ranks[0]._runtime.agreements.receive(ranks[0].membership.members[1].node, Chosen((0, 1, 1), junk))
    error = raised(lambda: ranks[0].agree("value", timeout=EVENT_TIMEOUT))
    assert isinstance(error, PeerMisbehaved)
    assert "the value chosen in agree #1 is invalid" in str(error)
    assert on_every(ranks, lambda comm: comm.all_reduce(1)) == [2, 2]


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "5"])
def test_what_is_no_timeout_is_refused_before_anybody_learns_of_the_call(world: World, timeout: Any) -> None:
    ranks = world(2)
    for call in (lambda: ranks[0].agree("early", timeout=timeout), lambda: ranks[0].shrink(timeout=timeout)):
        with pytest.raises(UsageError, match="give a number of seconds above 0"):
            call()
    assert on_every(ranks, lambda comm: comm.agree("value")) == ["value", "value"]
    assert [comm.epoch for comm in ranks] == [1, 1]
    assert on_every(ranks, lambda comm: comm.all_reduce(1)) == [2, 2]


def test_on_a_closed_node_nothing_is_agreed_on_revoked_or_followed() -> None:
    with local_communicators(1, Config()) as (comm,):
        assert comm.agree("open") == "open"
    for call in (lambda: comm.agree(1), comm.revoke, comm.shrink):
        with pytest.raises(UsageError, match="this communicator is closed"):
            call()


def test_agreements_of_a_part_are_its_own(world: World) -> None:
    ranks = world(4)
    parts = on_every(ranks, lambda comm: comm.split(comm.rank // 2))
    agreed = on_every(parts, lambda comm: comm.agree(comm.membership.members[0].node))  # type: ignore[union-attr]
    assert agreed[0] == agreed[1] != agreed[2]
    assert agreed[2] == agreed[3]


def test_whose_vote_is_missing_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = world(3)
    for comm in ranks[1:]:
        monkeypatch.setattr(comm._runtime.agreements, "receive", lambda *_: None)  # they live, and do not vote
    error = raised(lambda: ranks[0].agree(1, timeout=0.1))
    assert isinstance(error, OperationTimeout)
    assert sorted(peer.rank or 0 for peer in error.waiting_for) == [1, 2]
    assert error.operation == "agree #1"


# ---------------------------------------------------------------- teams


def test_a_team_tries_again_on_the_survivors(world: World) -> None:
    ranks = world(3)
    teams = on_every(ranks, lambda comm: comm.resilient())
    assert all(isinstance(team, Team) for team in teams)
    closed = threading.Event()

    def run(rank: int) -> float | None:
        if rank == 2:
            ranks[2].close()
            closed.set()
            return None
        assert closed.wait(EVENT_TIMEOUT)
        array = np.ones(4)
        teams[rank].all_reduce(array)
        return float(array.sum())

    assert on_every(range(3), run) == [8.0, 8.0, None]


def test_a_closed_communicator_makes_no_team(world: World) -> None:
    (comm,) = world(1)
    comm.close()
    with pytest.raises(UsageError, match="closed"):
        comm.resilient()


def test_who_is_expelled_while_it_agrees_is_notified_at_once_and_on_every_later_call(world: World) -> None:
    ranks = world(3)
    late = threading.Timer(0.05, ranks[2]._runtime.expelled, (5, "it was silent"))
    ranks[2]._runtime.agreements._send = lambda *_: None  # nobody receives it
    late.start()
    for _ in range(2):
        error = raised(lambda: ranks[2].agree(1, timeout=EVENT_TIMEOUT))
        assert isinstance(error, Expelled)
        assert (error.epoch, error.rank) == (5, 2)
    late.join()


def die(comm: Communicator) -> None:
    comm.__exit__(ValueError, ValueError("no data"), None)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("go", [die, Communicator.close], ids=["die", "leave"])
def test_once_a_membership_without_half_of_the_members_is_chosen_nobody_agrees_in_vain(
    world: World, waits: bool, go: Callable[[Communicator], None]
) -> None:
    ranks = world(4)
    for comm in ranks[:2] if waits else ():
        comm._runtime.agreements._send = lambda *_: None  # nobody receives its ballots

    def agree(comm: Communicator) -> Communicator:
        return follow(raised(lambda: comm.agree(comm.rank, timeout=EVENT_TIMEOUT)))

    def follow(error: BaseException) -> Communicator:
        """Until both are removed: a successor may have been made between the two, and has a majority."""
        assert isinstance(error, MembershipChanged)
        successor: Communicator = error.communicator
        return successor if successor.size == 2 else follow(raised(successor.barrier))

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(agree, comm) for comm in ranks[:2]] if waits else []
        for comm in ranks[2:]:
            go(comm)
        if not waits:  # the two may be removed one after the other: call when both are
            eventually(
                lambda: all(comm._runtime.membership_service.membership.size == 2 for comm in ranks[:2]), "both removed"
            )
        successors = [each.result(EVENT_TIMEOUT) for each in waiting] or on_every(ranks[:2], agree)
    assert on_every(successors, lambda comm: comm.all_reduce(1)) == [2, 2]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("go", [die, Communicator.close], ids=["die", "leave"])
def test_under_the_manual_policy_whoever_has_lost_half_of_the_members_raises_at_once(
    world: World, waits: bool, go: Callable[[Communicator], None]
) -> None:
    ranks = world(4, recovery_policy="manual")
    for comm in ranks[:2]:
        comm._runtime.agreements._send = lambda *_: None  # nobody receives its ballots

    def agree(comm: Communicator) -> BaseException:
        begin = time.monotonic()
        error = raised(lambda: comm.agree(comm.rank, timeout=EVENT_TIMEOUT))
        assert time.monotonic() - begin < EVENT_TIMEOUT / 2
        return error

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(agree, comm) for comm in ranks[:2]] if waits else []
        for comm in ranks[2:]:
            go(comm)
        errors = [each.result(EVENT_TIMEOUT) for each in waiting] or on_every(ranks[:2], agree)
    for error in errors:
        assert isinstance(error, PeerLost)
        assert error.rank in (2, 3)
        assert error.remedy == "comm.shrink() gives the next communicator, without it"
    successors = on_every(ranks[:2], Communicator.shrink)
    assert on_every(successors, lambda comm: comm.all_reduce(1)) == [2, 2]


def test_a_majority_agrees_although_one_has_died(world: World) -> None:
    ranks = world(3)
    die(ranks[2])
    agreed = on_every(ranks[:2], lambda comm: comm.agree(comm.rank, timeout=EVENT_TIMEOUT))
    assert agreed in ([0, 0], [1, 1])
