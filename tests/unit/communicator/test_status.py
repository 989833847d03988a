"""A rank that is missing in a collective because it is in another call of nexar's is said to be in that call."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nexar.cluster.decisions.failure_detector import PeerLiveness
from nexar.cluster.membership import Member, Membership
from nexar.communicator.communicator import Communicator
from nexar.communicator.status import Health, health
from nexar.errors import CollectiveTimeout
from nexar.wire.control import Beat, CurrentCall
from tests.ranks import EVENT_TIMEOUT, on_every
from tests.unit.cluster.memory_mesh import eventually
from tests.unit.communicator.worlds import World, raised

ADDRESSES = {"shm": ("/dev/shm/7",), "quic": ("10.0.0.7:4000",), "tls": ("10.0.0.7:4001",)}
MEMBERS = [Member(10 + rank, f"host-{rank // 2}", bytes(32), ADDRESSES) for rank in range(3)]
WORLD = Membership("ward", 4, tuple(MEMBERS))
CALL = CurrentCall(0, "all_reduce", 1234, 3, 12.0)
OPEN = SimpleNamespace(schemes=("shm", "quic"), failure=None)
BROKEN = SimpleNamespace(schemes=("quic",), failure=ConnectionError("gone"))


def known(state: Any = "alive", heartbeat: Beat | None = None) -> PeerLiveness:
    return PeerLiveness(age=0.25, heartbeat=heartbeat, heartbeat_age=0.5, state=state)


def seen(of_one: PeerLiveness | None, line: Any = OPEN, suspected: str | None = None) -> Health:
    """Node 11, by node 10."""
    suspects = {} if suspected is None else {11: suspected}
    links = {} if line is None else {11: line}
    return health(WORLD, 10, ((), ""), known={11: of_one}.get, links=links, suspects=suspects)[1]


def test_every_rank_is_reported_with_its_place() -> None:
    reported = health(WORLD, 11, ((CALL,), "barrier #9"), known=lambda _: None, links={}, suspects={})
    assert list(reported) == [0, 1, 2]
    assert [each.host for each in reported.values()] == ["host-0", "host-0", "host-1"]
    assert [each.address for each in reported.values()] == ["10.0.0.7:4000"] * 3
    assert [each.state for each in reported.values()] == ["unwatched", "self", "unwatched"]
    assert reported[1].doing == "all_reduce #1234 for 12 s"
    assert reported[1].last_finished == "barrier #9"


@pytest.mark.parametrize(
    ("found", "state"), [("alive", "alive"), ("stuck", "stuck"), ("silent", "silent"), ("hung", "stuck")]
)
def test_what_the_heartbeat_finds_is_the_state(found: Any, state: str) -> None:
    assert seen(known(found)).state == state


def test_who_is_suspected_is_lost_with_the_cause_whatever_the_heartbeat_says() -> None:
    reported = seen(known(), suspected="its process has ended")
    assert (reported.state, reported.cause) == ("lost", "its process has ended")
    assert seen(None, suspected="gone").state == "lost"


def test_a_heartbeat_says_what_it_does_and_has_grown_older_since() -> None:
    others = (CurrentCall(2, "barrier", 7, 0, 1.0), CALL)
    reported = seen(known("stuck", Beat(4, others, "broadcast #1233")))
    assert (reported.doing, reported.last_finished, reported.last_heard) == (
        "all_reduce #1234 for 12.5 s",
        "broadcast #1233",
        0.25,
    )
    assert str(reported) == (
        "rank 1 (node 000000000000000b at 10.0.0.7:4000): stuck, in all_reduce #1234 for 12.5 s, "
        "last finished broadcast #1233, last heard 250 ms ago"
    )


def test_carriers_are_those_of_a_link_that_works() -> None:
    assert seen(known()).carriers == ("shm", "quic")
    assert seen(known(), BROKEN).carriers == ()
    assert seen(known(), None).carriers == ()


def test_nothing_is_made_up_of_what_is_not_known() -> None:
    reported = seen(None)
    assert (reported.doing, reported.last_finished, reported.last_heard, reported.cause) == ("", "", None, "")
    assert str(reported) == "rank 1 (node 000000000000000b at 10.0.0.7:4000): unwatched"
    at_home = Membership("ward", 1, (Member(1, "h", bytes(32), {"shm": ("/dev/shm/1",)}),))
    assert health(at_home, 1, ((), ""), known=lambda _: None, links={}, suspects={})[0].address is None


def test_what_a_peer_says_of_itself_is_cut_to_one_line() -> None:
    reported = seen(known("alive", Beat(4, (CurrentCall(0, "x" * 5000 + "\n", 1),), "y\n\x1b[31m" * 1000)))
    assert len(str(reported)) < 500
    assert str(reported).isprintable()


def said_of(waiting: Communicator, missing: Communicator, call: Callable[[], Any], end: Callable[[], Any]) -> str:
    """What a rank that waits in a barrier in vain learns about another one, which is in `call` until `end`."""
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(call)
        eventually(lambda: bool(missing._runtime.node.progress.waits()), "it waits")
        error = raised(lambda: waiting.barrier(timeout=0.1))
        end()
        late.result(EVENT_TIMEOUT)
    assert isinstance(error, CollectiveTimeout)
    return str(error)


@pytest.mark.parametrize("started", [False, True])
def test_a_rank_that_waits_for_a_message_is_not_in_user_code(world: World, started: bool) -> None:
    ranks = world(2)
    said = said_of(
        ranks[0],
        ranks[1],
        (lambda: ranks[1].start.recv(source=0, tag=5).wait(EVENT_TIMEOUT))
        if started
        else (lambda: ranks[1].recv(source=0, tag=5, timeout=EVENT_TIMEOUT)),
        lambda: ranks[0].send(np.ones(1), dest=1, tag=5),
    )
    assert "it is in the receive with tag 5 for" in said
    assert "user code" not in said


@pytest.mark.parametrize("in_part", [True, False])
def test_a_rank_in_a_call_of_another_communicator_is_not_in_user_code(world: World, in_part: bool) -> None:
    ranks = world(2)
    parts = on_every(ranks, lambda comm: comm.split(0))
    here, there = (ranks, parts) if in_part else (parts, ranks)
    said = said_of(
        here[0],
        there[1],
        lambda: there[1].barrier(timeout=EVENT_TIMEOUT),
        lambda: there[0].barrier(timeout=EVENT_TIMEOUT),
    )
    assert re.search(rf"it is in barrier #\d+ of communicator {there[1]._generation.communicator} for ", said)
    assert "user code" not in said


def test_a_rank_that_computes_is_in_user_code(world: World) -> None:
    ranks = world(2)
    error = raised(lambda: ranks[0].barrier(timeout=0.1))
    assert "it is in user code" in str(error)
