from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nexar.cluster.membership import Member, Membership
from nexar.collectives.call_log import CallLog
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.collectives.shared_region import SharedRegion
from nexar.communicator import shared_memory_setup
from nexar.communicator.communicator import Communicator
from nexar.communicator.generation_builder import run_blocking
from nexar.communicator.local import local_communicators
from nexar.communicator.shared_memory_setup import MAX_SHARING, RegionMembers, SharedMemorySetup, may_share
from nexar.config import Config
from nexar.errors import Cancelled, CollectiveMismatch, OperationTimeout, PeerLost
from nexar.group import Group, deadline_after
from tests.conformance.worlds import ranks_over
from tests.ranks import EVENT_TIMEOUT, on_every

REDUCE = Fingerprint(OperationCode.ALL_REDUCE, 11, 8, 0, 1)
BARRIER = Fingerprint(OperationCode.BARRIER)


class Scene:
    """Ranks 1 and 3 of four are on this host, of which 3 is this one."""

    def __init__(self) -> None:
        members = tuple(Member(10 + rank, f"host-{rank % 2}", bytes(32), {}) for rank in range(4))
        self.woken: list[int] = []
        self.reported: list[Any] = []
        self.failed: list[Any] = []
        self.lost: Any = None
        link = SimpleNamespace(wake_peer=lambda: self.woken.append(1))
        router = SimpleNamespace(on_peer_lost=self._watch)
        facts = {"membership": Membership("test", 1, members), "links": lambda: {1: link}, "router": router}
        call_log = SimpleNamespace(report_mismatch=lambda *each: self.reported.append(each))
        self.neighbors = RegionMembers(cast(Group, SimpleNamespace(**facts)), cast(CallLog, call_log), (1, 3))

    def _watch(self, lost: Any) -> Any:
        self.lost = lost
        return lambda: setattr(self, "lost", None)


def test_members_of_the_shared_region_are_ranks_of_the_communicator() -> None:
    scene = Scene()
    assert (scene.neighbors.awaited(0).rank, scene.neighbors.awaited(0).node) == (1, 11)
    error = scene.neighbors.aborted(0, "all_reduce")
    assert isinstance(error, Cancelled)
    assert error.rank == 1


def test_a_difference_is_reported_to_all_ranks_and_names_who_differs() -> None:
    scene = Scene()
    error = scene.neighbors.differs(0, BARRIER, (7, REDUCE))
    assert isinstance(error, CollectiveMismatch)
    assert (error.sequence, error.expected, error.found) == (7, REDUCE.describe(), BARRIER.describe())
    assert scene.reported == [(7, REDUCE, 1, BARRIER)]


def test_others_are_woken_through_their_links_and_oneself_is_awake() -> None:
    scene = Scene()
    first, myself = scene.neighbors.wake_calls()
    first()
    myself()
    assert scene.woken == [1]


def test_the_loss_of_a_neighbor_fails_the_shared_region_and_that_of_others_does_not() -> None:
    scene = Scene()
    arena = SimpleNamespace(fail=scene.failed.append)
    unwatch = scene.neighbors.watch(cast(SharedRegion, arena))
    gone = PeerLost(rank=1, cause="gone")
    scene.lost(10, gone)
    assert scene.failed == []
    scene.lost(11, gone)
    assert scene.failed == [gone]
    unwatch()
    assert scene.lost is None


def members(hosts: Sequence[int], capabilities: tuple[str, ...] = ("shm",)) -> Membership:
    made = []
    for host, count in enumerate(hosts):
        made += [
            Member(1 + 100 * host + each, f"h{host}", bytes(32), {}, frozenset(capabilities)) for each in range(count)
        ]
    return Membership("test", 1, tuple(made))


@pytest.mark.parametrize(
    ("hosts", "worth"),
    [([1], False), ([1, 1], False), ([2], True), ([2, 1], True), ([MAX_SHARING], True), ([9], False)],
)
def test_memory_is_shared_where_a_host_has_several_ranks_and_they_are_not_too_many(
    hosts: list[int], worth: bool
) -> None:
    assert may_share(members(hosts)) == worth
    assert not may_share(members(hosts, ("quic",)))


def test_on_a_sparse_topology_all_ranks_of_each_host_must_be_neighbours() -> None:
    assert not may_share(members([4]), "k_regular:2")
    assert may_share(members([3]), "k_regular:2")
    assert may_share(members([2, 2, 2]), "k_regular:2")  # hosts are runs of ranks
    assert not may_share(members([3, 3]), "k_regular:2")
    assert may_share(members([2, 2]), "hypercube")


def test_ranks_that_are_linked_otherwise_agree_that_they_share_none() -> None:
    def agree(comm: Communicator) -> tuple[bool, object]:
        deadline = deadline_after(EVENT_TIMEOUT)
        asked = SharedMemorySetup(comm._group, deadline)
        return asked.shared, run_blocking(comm._group, asked.agree(comm._context.call_log), deadline)

    with local_communicators(3, Config()) as world:
        assert on_every(world, agree) == [(False, None)] * 3


def test_who_does_not_take_part_in_time_ends_it_and_leaves_nothing_behind() -> None:
    with local_communicators(2, Config()) as world:
        group, late = world[0]._group, deadline_after(0.05)
        with pytest.raises(OperationTimeout, match="making the first communicator did not") as caught:
            run_blocking(group, SharedMemorySetup(group, late).agree(world[0]._context.call_log), late)
        assert not isinstance(caught.value.waiting_for, str)
        assert [peer.rank for peer in caught.value.waiting_for] == [1]
        assert "has not made the same init, split or group" in str(caught.value)
        assert "NEXAR_FORMATION_TIMEOUT_SECS" in str(caught.value)


def test_ranks_of_one_host_share_memory_and_all_say_so() -> None:
    with ranks_over("shm", 3) as world:
        assert {comm._context.region is not None for comm in world} == {True}
        assert on_every(world, lambda comm: comm.all_reduce(1, algorithm="shared_memory")) == [3] * 3


def _refused(*_: Any) -> Any:
    raise OSError(28, "no space left")


@pytest.mark.parametrize("fault", ["create_memory", "open_memory"])
def test_where_one_of_them_cannot_none_does_and_the_links_serve(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory_setup, fault, _refused)
    with ranks_over("shm", 3) as world:
        assert {comm._context.region for comm in world} == {None}
        assert on_every(world, lambda comm: comm.all_reduce(1)) == [3] * 3
