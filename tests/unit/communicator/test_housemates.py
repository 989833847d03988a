from types import SimpleNamespace
from typing import Any, cast

from nexar.cluster.membership import Member, Membership
from nexar.collectives.arena import Arena
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.journal import Journal
from nexar.collectives.operations import OperationCode
from nexar.communicator.housemates import Housemates
from nexar.errors import Cancelled, CollectiveMismatch, PeerLost
from nexar.group import Group

REDUCE = Fingerprint(OperationCode.ALL_REDUCE, 11, 8, 0, 1)
BARRIER = Fingerprint(OperationCode.BARRIER)


class Scene:
    """Ranks 1 and 3 of four are on this host, of which 3 is this one."""

    def __init__(self) -> None:
        members = tuple(Member(10 + rank, f"host-{rank % 2}", bytes(32), {}) for rank in range(4))
        self.nudged: list[int] = []
        self.told: list[Any] = []
        self.failed: list[Any] = []
        self.lost: Any = None
        link = SimpleNamespace(nudge=lambda: self.nudged.append(1))
        router = SimpleNamespace(tell_of_losses=self._watch)
        facts = {"membership": Membership("test", 1, members), "links": lambda: {1: link}, "router": router}
        journal = SimpleNamespace(disagree=lambda *each: self.told.append(each))
        self.neighbors = Housemates(cast(Group, SimpleNamespace(**facts)), cast(Journal, journal), (1, 3))

    def _watch(self, lost: Any) -> Any:
        self.lost = lost
        return lambda: setattr(self, "lost", None)


def test_members_of_the_arena_are_ranks_of_the_communicator() -> None:
    scene = Scene()
    assert (scene.neighbors.awaited(0).rank, scene.neighbors.awaited(0).node) == (1, 11)
    error = scene.neighbors.given_up(0, "all_reduce")
    assert isinstance(error, Cancelled)
    assert error.rank == 1


def test_a_difference_is_told_to_all_ranks_and_names_who_differs() -> None:
    scene = Scene()
    error = scene.neighbors.differs(0, BARRIER, (7, REDUCE))
    assert isinstance(error, CollectiveMismatch)
    assert (error.sequence, error.expected, error.found) == (7, REDUCE.describe(), BARRIER.describe())
    assert scene.told == [(7, REDUCE, 1, BARRIER)]


def test_others_are_nudged_through_their_links_and_oneself_is_awake() -> None:
    scene = Scene()
    first, myself = scene.neighbors.nudges()
    first()
    myself()
    assert scene.nudged == [1]


def test_the_loss_of_a_neighbor_fails_the_arena_and_that_of_others_does_not() -> None:
    scene = Scene()
    arena = SimpleNamespace(fail=scene.failed.append)
    unwatch = scene.neighbors.watch(cast(Arena, arena))
    gone = PeerLost(rank=1, cause="gone")
    scene.lost(10, gone)
    assert scene.failed == []
    scene.lost(11, gone)
    assert scene.failed == [gone]
    unwatch()
    assert scene.lost is None
