"""What comes of guests while a cluster forms; the stories at the door are in test_admission."""

import pytest

from nexar.cluster.decisions.admission_events import Admit, Applied, ChildDied, Note, NoteKind
from nexar.cluster.decisions.compatibility import Compatibility
from nexar.cluster.decisions.door_rules import DoorRules
from nexar.cluster.decisions.formation import Formation
from nexar.cluster.decisions.forming import Forming
from nexar.cluster.decisions.guest import Guest
from nexar.cluster.decisions.refusals import Refusal, Refusals
from nexar.wire.joining import Reserve
from tests.unit.cluster.decisions.door import PROOF, SEED, application, hello, key


def note(kind: NoteKind, guest: Guest, reason: str = "") -> Note:
    return Note(kind, guest.address, guest.node, None, reason)


class Scene:
    """A cluster in the making, and who has come."""

    def __init__(self, size: int, *, elastic: bool = False) -> None:
        self.members: dict[int, Guest] = {}
        self.launchers: dict[int, Guest] = {}
        self.refusals = Refusals()
        self.forming = Forming(
            Formation("cluster", size, SEED),
            size,
            DoorRules(elastic=elastic),
            members=self.members,
            launchers=self.launchers,
            refusals=self.refusals,
            compatibility=Compatibility(),
            note=note,
        )

    def guest(self, node: int) -> Guest:
        return Guest(node, f"10.0.0.9:{node}", hello=hello(node), fingerprint=key(node))

    def apply(self, node: int, *, ready: bool = True, epoch: int = 0) -> Guest:
        guest = self.guest(node)
        self.forming.applied(guest, hello(node), Applied(node, application(epoch=epoch), True, key(node)))
        if ready:
            self.forming.ready(guest)
        return guest

    def reserve(self, node: int, count: int) -> Guest:
        guest = self.guest(node)
        (admit, _) = self.forming.reserved(guest, hello(node, "launcher"), Reserve(PROOF, b"request", "a", count))
        assert isinstance(admit, Admit)
        return guest


def test_it_is_complete_when_everybody_is_there_and_can_be_dialed() -> None:
    scene = Scene(2)
    scene.apply(1)
    late = scene.apply(2, ready=False)
    assert not scene.forming.complete
    scene.forming.ready(late)
    assert scene.forming.complete
    assert not scene.forming.failure


def test_who_goes_leaves_its_place_to_the_first_who_waits() -> None:
    scene = Scene(2, elastic=True)
    first, second = scene.apply(1), scene.apply(2, ready=False)
    scene.apply(3)
    assert set(scene.members) == {1, 2}
    scene.forming.withdrawn(second)
    assert set(scene.members) == {1, 3}
    assert scene.forming.complete  # the one who waited was ready
    assert first is scene.members[1]


def test_it_fails_when_a_child_has_died_whose_rank_nobody_else_may_have() -> None:
    scene = Scene(2)
    launcher = scene.reserve(51, 2)
    scene.forming.child_died(launcher, ChildDied(51, 1, "Traceback\nKeyError: 3"))
    assert scene.forming.failure == "rank 1 died before the cluster had formed"
    assert scene.refusals.listed()["rank 1"].endswith("KeyError: 3")


def test_it_fails_when_its_time_is_over() -> None:
    scene = Scene(2)
    scene.forming.expire(60.0)
    assert scene.forming.failure == "the cluster did not form within 60 s"


def test_a_node_comes_in_once() -> None:
    scene = Scene(2)
    scene.apply(1)
    with pytest.raises(Refusal, match="has joined already"):
        scene.apply(1)


def test_a_member_of_another_cluster_is_refused() -> None:
    with pytest.raises(Refusal, match="started without its state"):
        Scene(2).apply(1, epoch=3)


def test_who_has_not_joined_cannot_be_ready() -> None:
    scene = Scene(2)
    with pytest.raises(Refusal, match="has not joined"):
        scene.forming.ready(scene.guest(1))
