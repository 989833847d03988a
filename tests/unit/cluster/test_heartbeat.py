"""Beats, and what is learned of the others: on links that are made up, in time that a test owns."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from nexar.cluster.control_loop import ControlLoop
from nexar.cluster.decisions.failure_detector import LivenessReport
from nexar.cluster.heartbeat import Heartbeat
from nexar.cluster.membership import Member, Membership
from nexar.config import Config
from nexar.errors import PeerLost, UsageError
from nexar.wire.control import Beat, CurrentCall, Message
from tests.unit.cluster.virtual_loop import VirtualLoop

ME = 1
DOING = (CurrentCall(0, "all_reduce", 7, 2, 0.5),)


class FakeLink:
    """As far as a heartbeat asks."""

    def __init__(self, *schemes: str) -> None:
        self.schemes = schemes or ("quic",)
        self.failure: Exception | None = None
        self.received = 10.0
        self.said: list[Message] = []
        self.full = False
        self.gone = False

    def heard_bytes(self) -> float:
        return 0.0 if self.failure is not None else self.received

    def send_control(self, message: Message) -> bool:
        if self.gone:
            raise PeerLost(rank=1, node=2, address=None, cause="gone")
        if not self.full:
            self.said.append(message)
        return not self.full

    def lose(self) -> None:
        self.failure = PeerLost(rank=1, node=2, address=None, cause="gone")


class Scene:
    """Node 1 of a world, and its links."""

    def __init__(self, size: int = 3, **settings: float) -> None:
        self.clock = VirtualLoop(100.0)
        self.links: dict[int, FakeLink] = {}
        self.found: list[LivenessReport] = []
        self.finished = "barrier #6"
        node = cast(Any, SimpleNamespace(id=ME, config=Config(**settings)))  # type: ignore[arg-type]
        self.heartbeat = Heartbeat(
            node,
            cast(Any, lambda: dict(self.links)),
            lambda: (DOING, self.finished),
            self.found.append,
            control_loop=self.clock,
        )
        self.membership = membership(*range(1, size + 1))

    def begin(self) -> None:
        for member in self.membership.members[1:]:
            self.links[member.node] = FakeLink()
        self.heartbeat.adopt(self.membership)

    def pass_(self, seconds: float, *alive: int, muted: tuple[int, ...] = ()) -> list[tuple[int, str]]:
        """Nodes `alive` send heartbeats, of those `muted` only packets come. What was found, as node and state."""
        for _ in range(round(seconds * 2)):
            for node in (*alive, *muted):
                self.links[node].received += 30
            for node in alive:
                self.heartbeat.arrived(node, Beat(1, DOING))
            self.clock.advance(0.5)
        found = [(finding.node, finding.state) for finding in self.found]
        self.found.clear()
        return found


def membership(*nodes: int, epoch: int = 1) -> Membership:
    return Membership("ours", epoch, tuple(Member(node, "here", bytes(32), {}) for node in nodes))


def test_it_says_at_every_interval_what_this_node_does_to_everybody_who_watches() -> None:
    scene = Scene()
    scene.begin()
    scene.pass_(5.0, 2, 3)
    for link in scene.links.values():
        assert len(link.said) == 6
        assert set(link.said) == {Beat(1, DOING, "barrier #6")}


def test_the_interval_is_that_of_the_settings() -> None:
    scene = Scene(heartbeat_interval=0.25)
    scene.begin()
    scene.pass_(5.0, 2, 3)
    assert len(scene.links[2].said) == 21


def test_before_there_is_a_membership_and_after_the_end_nothing_is_said() -> None:
    scene = Scene()
    scene.links[2] = FakeLink()
    scene.pass_(5.0)
    assert not scene.links[2].said
    scene.begin()
    scene.pass_(1.0, 2, 3)
    scene.heartbeat.close()
    before = len(scene.links[2].said)
    assert scene.pass_(30.0) == []
    assert len(scene.links[2].said) == before


def test_a_node_that_is_alone_has_nobody_to_talk_to() -> None:
    scene = Scene(size=1)
    scene.begin()
    assert scene.pass_(30.0) == []


def test_in_a_large_world_three_are_notified_and_three_are_watched() -> None:
    scene = Scene(size=20)
    scene.begin()
    found = scene.pass_(6.0)
    assert [node for node, link in scene.links.items() if link.said] == [2, 3, 11]
    assert sorted(found) == [(11, "silent"), (19, "silent"), (20, "silent")]


def test_one_that_is_silent_is_found_and_the_others_are_not() -> None:
    scene = Scene()
    scene.begin()
    assert scene.pass_(6.0, 2) == [(3, "silent")]
    assert scene.pass_(6.0, 2) == []
    assert scene.pass_(1.0, 2, 3) == [(3, "alive")]


def test_a_lane_that_is_full_and_a_link_that_breaks_keep_nobody_waiting() -> None:
    scene = Scene(size=4)
    scene.begin()
    scene.links[2].full = True
    scene.links[3].gone = True
    assert scene.pass_(10.0, 2, 4) == [(3, "silent")]
    assert len(scene.links[4].said) == 11


def test_the_loss_of_a_link_is_no_sign_of_life() -> None:
    scene = Scene(size=2)
    scene.begin()
    scene.pass_(3.0, 2)
    scene.links[2].lose()
    assert scene.pass_(5.0) == [(2, "silent")]
    del scene.links[2]
    assert scene.pass_(5.0) == []
    scene.links[2] = FakeLink()
    assert scene.pass_(2.0, 2) == [(2, "alive")]


def test_packets_without_heartbeats_are_reported_as_stuck_with_the_last_call() -> None:
    scene = Scene(size=2)
    scene.begin()
    scene.pass_(2.0, 2)
    for _ in range(12):
        scene.links[2].received += 30
        scene.clock.advance(0.5)
    (stuck,) = scene.found
    assert stuck.state == "stuck"
    assert "stuck in all_reduce #7" in stuck.cause


def test_without_quic_the_cause_says_what_cannot_be_known() -> None:
    scene = Scene(size=2)
    scene.begin()
    scene.links[2].schemes = ("shm", "tls")
    scene.clock.advance(6.0)
    assert "dead, stopped, stuck or cut off" in scene.found[0].cause


def test_who_has_no_link_yet_is_watched_when_there_is_one() -> None:
    scene = Scene(size=2)
    scene.heartbeat.adopt(scene.membership)
    assert scene.pass_(30.0) == []
    assert scene.heartbeat.known(2) is None
    scene.links[2] = FakeLink()
    assert scene.pass_(4.0) == []
    assert scene.pass_(3.0) == [(2, "silent")]


def test_a_link_between_two_timers_is_known_at_once_and_after_the_next_membership() -> None:
    scene = Scene(size=3)
    scene.heartbeat.adopt(scene.membership)
    scene.pass_(1.0)
    scene.links[2] = FakeLink()
    scene.heartbeat.adopt(membership(1, 2, epoch=2))
    known = scene.heartbeat.known(2)
    assert known is not None
    assert (known.state, known.age) == ("alive", 0.0)
    assert scene.pass_(6.0) == [(2, "silent")]


def test_the_next_membership_says_who_is_watched_and_who_stays_is_not_forgotten() -> None:
    scene = Scene(size=4)
    scene.begin()
    scene.pass_(4.0, 3, 4)
    scene.heartbeat.adopt(membership(1, 2, 4, epoch=2))
    assert scene.pass_(2.0, 4) == [(2, "silent")]
    assert scene.pass_(30.0, 4) == []
    assert isinstance(scene.links[4].said[-1], Beat)
    assert scene.links[4].said[-1].epoch == 2


def test_a_membership_without_this_node_is_refused() -> None:
    with pytest.raises(UsageError, match="not in the membership"):
        Scene().heartbeat.adopt(membership(5, 6))


def test_what_is_known_can_be_asked_at_any_time() -> None:
    scene = Scene(size=2)
    scene.begin()
    scene.pass_(2.0, 2)
    scene.clock.advance(1.0)
    known = scene.heartbeat.known(2)
    assert known is not None
    assert known.heartbeat == Beat(1, DOING)
    assert known.heartbeat_age == 1.5
    assert known.state == "alive"


def test_in_a_control_loop_with_a_thread_it_sends_heartbeats_by_itself() -> None:
    node = cast(Any, SimpleNamespace(id=ME, config=Config(heartbeat_interval=0.01)))
    link = FakeLink()
    with ControlLoop() as loop:
        heartbeat = Heartbeat(node, cast(Any, lambda: {2: link}), lambda: ((), ""), lambda _: None, control_loop=loop)
        heartbeat.adopt(membership(1, 2))
        while len(link.said) < 3:
            heartbeat.arrived(2, Beat(1))
        heartbeat.close()
