"""Asking for what comes after a communicator.

What members say of communicators that are revoked or closed, and what becomes of it.
"""

import time
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nexar.cluster.decisions.membership_events import ChangeRequested, MembershipInput, RecoverNow
from nexar.cluster.decisions.successor_events import GenerationKey
from nexar.cluster.decisions.successor_state import MAX_EARLY
from nexar.communicator.communicator import Communicator
from nexar.communicator.generation import Generation
from nexar.communicator.successor_requests import SuccessorRequests
from nexar.communicator.successors import Successors
from nexar.errors import MembershipChanged, RecoveryTimeout, Revoked
from nexar.group import deadline_after
from nexar.links.link import Link
from nexar.wire.control import Message, Revoke
from tests.ranks import EVENT_TIMEOUT, on_every
from tests.unit.cluster.memory_mesh import eventually
from tests.unit.communicator.scripted import membership
from tests.unit.communicator.worlds import World, raised, waiting

PART, EPOCH, TIMEOUT = 7, 4, 3.0
RENEWED = ChangeRequested(renewed=(PART,), epoch=EPOCH)


class Cluster:
    """Successors, recovery and failure monitor of node 1: a successor comes after so many looks for it."""

    def __init__(self, *, looks: int = 0, suspects: tuple[int, ...] = (), concerned: bool = False) -> None:
        self.looks = looks
        self._suspects = suspects
        self.concerned = concerned
        self.membership = SimpleNamespace(epoch=EPOCH)
        self.asked: list[MembershipInput] = []
        group = SimpleNamespace(size=3, rank=0)
        self.generation: Any = SimpleNamespace(
            communicator=PART,
            successor=None,
            nodes=frozenset({1, 2, 3}),
            group=group,
            membership=membership([1, 2, 3], 1),
            is_stalled=False,
        )
        self.successor_requests = SuccessorRequests(cast(Any, self), cast(Any, self), cast(Any, self), cast(Any, self))

    # -- successors

    def is_blocked_by_close(self, generation: object) -> bool:
        return False

    def is_concerned(self, generation: object) -> bool:
        return self.concerned

    def wait_for_successor(self, generation: object, deadline: float) -> str | None:
        return "the next" if self.asked or self.concerned else None

    # -- recovery and successors

    def missing(self, generation: object = None) -> tuple[int, ...]:
        return () if generation is not None else (3,)

    def suspects(self) -> dict[int, str]:
        return dict.fromkeys(self._suspects, "silence")

    def put(self, event: MembershipInput) -> None:
        self.asked.append(event)

    # -- failure monitor

    def is_investigating(self, nodes: frozenset[int]) -> bool:
        self.looks -= 1
        return self.looks >= 0

    def succeed(self, timeout: float = TIMEOUT) -> object:
        return self.successor_requests.request_successor(self.generation, deadline_after(timeout), timeout)


@pytest.mark.parametrize(
    ("cluster", "asked"),
    [
        (Cluster(), [RENEWED]),
        (Cluster(suspects=(3,)), [RecoverNow()]),
        (Cluster(suspects=(9,)), [RENEWED]),
        (Cluster(concerned=True), []),
        (Cluster(concerned=True, suspects=(3,)), [RecoverNow()]),
        (Cluster(looks=3, suspects=(3,)), [RecoverNow()]),
    ],
    ids=[
        "nobody is lost",
        "a member is lost",
        "a stranger is lost",
        "the next is being made",
        "the next is being made with who is lost",
        "a member is being looked into",
    ],
)
def test_what_is_asked_for_depends_on_who_is_lost(cluster: Cluster, asked: list[MembershipInput]) -> None:
    assert cluster.succeed() == "the next"
    assert cluster.asked == asked


def test_who_comes_to_nothing_in_time_is_notified_who_is_missing() -> None:
    cluster = Cluster(looks=1_000_000)
    with pytest.raises(RecoveryTimeout) as late:
        cluster.succeed(0.05)
    assert late.value.missing_votes == (2,)
    assert cluster.asked == []


# ---------------------------------------------------------------- revoking


def test_a_communicator_that_is_revoked_is_over_for_all_with_the_reason_and_the_rank(world: World) -> None:
    ranks = world(3)
    ends = [waiting(comm) for comm in ranks[1:]]
    ranks[0].revoke("the data is wrong")
    for error in (end() for end in ends):
        assert isinstance(error, Revoked)
        assert error.rank == 0
        assert error.reason in {
            "the data is wrong",
            *(f"the data is wrong (as rank {rank} passed on)" for rank in (1, 2)),
        }
    for comm in ranks:
        assert isinstance(raised(comm.barrier), Revoked)


def test_it_is_passed_on_once_however_often_it_is_received(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Revoke] = []
    send = Link.send_control

    def counting(link: Link, message: Message) -> bool:
        if isinstance(message, Revoke):
            said.append(message)
        return send(link, message)

    monkeypatch.setattr(Link, "send_control", counting)
    ranks = world(3)
    ranks[0].revoke("once")
    eventually(lambda: all(comm._generation.outcome.done for comm in ranks), "all have heard")
    eventually(lambda: len(said) == 6, "all have passed it on")  # each to two others
    ranks[0].revoke("twice")
    ranks[1].revoke("three times")
    assert len(said) == 6
    assert set(said) == {Revoke(0, 1, 0, "once")}


def test_a_part_may_be_revoked_and_the_world_goes_on(world: World) -> None:
    ranks = world(2)
    parts = on_every(ranks, lambda comm: comm.split(0))
    assert parts[0] is not None
    assert parts[1] is not None
    parts[1].revoke("enough")
    error = raised(lambda: parts[0].recv(source=1, timeout=EVENT_TIMEOUT))  # type: ignore[union-attr]
    assert isinstance(error, Revoked)
    assert error.rank == 1
    assert on_every(ranks, lambda comm: comm.all_reduce(1)) == [2, 2]


def test_what_unauthenticated_peers_or_nobody_revoked_goes_on(world: World) -> None:
    ranks = world(3)
    part = on_every(ranks, lambda comm: comm.split(0 if comm.rank < 2 else None))[0]
    assert part is not None
    runtime = ranks[0]._runtime
    links = {rank: runtime.mesh.links()[ranks[rank]._runtime.node.id] for rank in (1, 2)}
    runtime.revocations.received(links[2], Revoke(part.id, part.epoch, 0, "I am no member of it"))
    runtime.revocations.received(links[1], Revoke(part.id, part.epoch, 7, "a rank that is not there"))
    runtime.revocations.received(links[1], Revoke(part.id, part.epoch + 1, 1, "another generation"))
    part._generation.outcome.check()
    runtime.revocations.received(links[1], Revoke(part.id, part.epoch, 1, "two\nlines"))
    error = raised(part.barrier)
    assert isinstance(error, Revoked)
    assert error.reason == "two lines"


def test_nobody_is_notified_of_what_it_did_itself_and_a_forwarder_is_named(world: World) -> None:
    ranks = world(3)
    runtime = ranks[0]._runtime
    link = runtime.mesh.links()[ranks[1]._runtime.node.id]
    runtime.revocations.received(link, Revoke(0, 1, 0, "you did it"))
    ranks[0]._generation.outcome.check()
    runtime.revocations.received(link, Revoke(0, 1, 2, "the data is wrong"))
    error = raised(ranks[0].barrier)
    assert isinstance(error, Revoked)
    assert (error.rank, error.reason) == (2, "the data is wrong (as rank 1 passed on)")


def test_what_is_revoked_before_this_node_has_made_it_is_over_when_it_is_made(world: World) -> None:
    ranks = world(2)
    runtime = ranks[0]._runtime
    link = runtime.mesh.links()[ranks[1]._runtime.node.id]
    successors = on_every(ranks, lambda comm: comm.shrink())
    epoch = successors[0].epoch + 1
    runtime.revocations.received(link, Revoke(0, epoch, 1, "made and revoked"))
    for communicator in range(100, 100 + MAX_EARLY - 1):  # what is never made gives way
        runtime.revocations.received(link, Revoke(communicator, 1, 1, "never made"))
    third = on_every(successors, lambda comm: comm.shrink())[0]
    assert third.epoch == epoch
    error = raised(third.barrier)
    assert isinstance(error, Revoked)
    assert (error.rank, error.reason) == (1, "made and revoked")


def test_one_that_has_a_successor_is_not_revoked_any_more(world: World) -> None:
    ranks = world(2)
    on_every(ranks, lambda comm: comm.shrink())
    ranks[0].revoke("too late")
    assert isinstance(raised(ranks[0].barrier), MembershipChanged)


# ---------------------------------------------------------------- closing


def parts_of(ranks: list[Communicator]) -> list[Communicator]:
    return [part for part in on_every(ranks, lambda comm: comm.split(0)) if part is not None]


def test_what_a_rank_has_closed_has_no_successor_and_the_others_learn_who_it_was_at_once(world: World) -> None:
    ranks = world(4, recovery_timeout=EVENT_TIMEOUT)
    parts = parts_of(ranks)
    parts[2].close()
    began = time.monotonic()
    ranks[3].close()
    for part in parts[:2]:
        error = raised(part.barrier)
        assert isinstance(error, Revoked)
        assert (error.rank, error.closed) == (2, True)
        assert "rank 2 has closed it" in str(error)
        assert "split()" in str(error)
        assert raised(part.shrink).args == error.args
    assert time.monotonic() - began < EVENT_TIMEOUT / 2


def test_when_who_has_closed_it_is_gone_too_the_others_go_on(world: World) -> None:
    ranks = world(5)
    parts = parts_of(ranks)
    parts[2].close()
    ranks[3].close()
    for part in (*parts[:2], parts[4]):
        assert isinstance(raised(part.barrier), Revoked)
    ranks[2].close()
    for rank in (0, 1, 4):
        all_successors, generation = ranks[rank]._runtime.successors, parts[rank]._generation
        eventually(partial(_is_free, all_successors, generation), "it is gone")
    following = on_every([parts[0], parts[1], parts[4]], lambda part: part.shrink(timeout=EVENT_TIMEOUT))
    assert [part.size for part in following] == [3, 3, 3]
    assert on_every(following, lambda part: part.all_reduce(1)) == [3, 3, 3]


def _is_free(all_successors: Successors, generation: Generation) -> bool:
    return not all_successors.is_blocked_by_close(generation)


def test_who_closes_it_while_the_others_wait_for_a_successor_notifies_them(world: World) -> None:
    ranks = world(3, recovery_timeout=EVENT_TIMEOUT)
    parts = parts_of(ranks)
    runtime = ranks[0]._runtime
    link = runtime.mesh.links()[ranks[1]._runtime.node.id]
    runtime.revocations.received(link, Revoke(parts[0].id, parts[0].epoch, 1, "it has closed it", closed=True))
    ranks[2].close()
    assert isinstance(raised(parts[0].barrier), Revoked)  # so that rank 1 waits for it
    parts[0].close()
    error = raised(parts[1].barrier)
    assert isinstance(error, Revoked)
    assert error.rank == 0


def test_nobody_closes_for_another(world: World) -> None:
    ranks = world(3)
    part = parts_of(ranks)[0]
    runtime = ranks[0]._runtime
    link = runtime.mesh.links()[ranks[1]._runtime.node.id]
    machine, key = runtime.successors._machine, GenerationKey(part.id, part.epoch)
    runtime.revocations.received(link, Revoke(part.id, part.epoch, 2, "it has closed it", closed=True))
    assert not machine.is_closed_by_member(key)
    runtime.revocations.received(link, Revoke(part.id, part.epoch, 1, "it has closed it", closed=True))
    assert machine.is_closed_by_member(key)
    assert on_every(ranks[:1], lambda comm: comm.rank) == [0]
    part._generation.outcome.check()  # nobody was lost: it goes on among the others
