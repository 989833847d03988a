"""A member that relays, or says so: whom it can speak for, whom it can part, and what it can make others keep."""

from collections.abc import Iterator
from typing import Any, cast

import pytest

from nexar.cluster.control_channel import MeshEvent, NeighbourDoubted
from nexar.links.link import Link
from nexar.links.relay.forwarding import HELD_BYTES, NOTICE_BYTES, RefusedSource
from nexar.testing.faults import LinkStall, RefuseDial
from nexar.wire.frame import Frame, FrameKind, Lane, Space, encode
from nexar.wire.relay import RelayHeader, RelayKind, encode_relay
from tests.unit.cluster.memory_mesh import Meshes, eventually, soon
from tests.unit.links.relay.small_world import SmallWorld

TALK = 7
VICTIM, HOSTILE, OTHER = 0, 1, 2
"""Ranks."""
MANY = 15_000
SHORTEST = 48  # bytes of a message


class Forgery(Meshes):
    """Everybody can talk, and one of them in the name of others."""

    def __init__(self, size: int = 3, topology: str = "full_mesh") -> None:
        super().__init__(size, topology=topology)
        self.ids = [node.id for node in self.nodes]
        self.talks = [mesh.router.open(TALK) for mesh in self.meshes]
        self.doubts: list[int] = []
        self.meshes[VICTIM].control.connect_events(self.happen)

    def happen(self, event: MeshEvent) -> None:
        if isinstance(event, NeighbourDoubted):
            self.doubt(event.node)

    def doubt(self, node: int) -> None:
        self.doubts.append(node)

    def forge(self, number: int, text: bytes = b"I am the other one") -> None:
        """The first messages of a relayed link of the other's, over the hostile one."""
        source, over, to = (self.ids[rank] for rank in (OTHER, HOSTILE, VICTIM))
        terms = Frame(kind=int(FrameKind.TERMS), length=1 << 20, source=source, destination=to)
        message = Frame(
            kind=int(FrameKind.EAGER), lane=int(Lane.DATA), space=int(Space.UNTAGGED), communicator=TALK, source=source,
            destination=to, length=len(text), body=len(text),
        )  # fmt: skip
        for sequence, data in enumerate((encode(terms), encode(message) + text)):
            header = RelayHeader(RelayKind.FRAME, 2, number, 1, sequence, 0, (source, over, to))
            self.link(HOSTILE, VICTIM).send_relayed(encode_relay(header), data)

    def forgery_has_arrived(self) -> None:
        eventually(lambda: self.meshes[VICTIM].relay_routes.relay._held, "the forgery at its victim")

    def say(self, rank: int, to: int, text: bytes) -> None:
        self.nodes[rank].progress.wait([self.link(rank, to).post_send(TALK, memoryview(text))], soon())

    def receive(self, rank: int, source: int) -> bytes:
        posted = self.talks[rank].post(None, source=self.ids[source], space=Space.UNTAGGED, tag=0)
        self.nodes[rank].progress.wait([posted], soon())
        return bytes(posted.into or b"")

    def schemes(self, rank: int, other: int) -> tuple[str, ...]:
        """What connects them; nothing while a link is about to take the place of another."""
        link = self.meshes[rank].links().get(self.ids[other])
        return () if link is None else link.schemes

    def number(self, rank: int, other: int) -> int:
        pair = self.meshes[rank]._peers.get(self.ids[other])
        assert pair is not None
        return pair.number


@pytest.fixture
def three() -> Iterator[Forgery]:
    made = Forgery()
    yield made
    made.close()


# -- speaking for others, and parting them ---------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2])
def test_nobody_can_speak_for_who_has_a_connection_of_its_own_nor_end_that(three: Forgery, number: int) -> None:
    link = three.link(VICTIM, OTHER)
    three.forge(number)
    three.forgery_has_arrived()
    three.say(OTHER, VICTIM, b"truth")
    assert three.receive(VICTIM, OTHER) == b"truth"
    assert three.linked_to(VICTIM, OTHER) is link
    assert (link.failure, link.schemes) == (None, ("memory",))
    assert three.doubts == [three.ids[OTHER]]


@pytest.mark.parametrize("number", [0, 1000, 2**31, 2**32 - 1])
def test_a_number_that_no_link_of_the_two_can_have_by_now_does_not_stick(three: Forgery, number: int) -> None:
    link = three.link(VICTIM, OTHER)
    three.forge(number)
    three.say(HOSTILE, VICTIM, b"that was it")
    assert three.receive(VICTIM, HOSTILE) == b"that was it"
    link.lose("it is time for the next one")
    three.forge(number)
    assert three.meshes[VICTIM].relink(three.ids[OTHER], soon()).schemes == ("memory",)
    assert three.number(VICTIM, OTHER) == 2


def test_who_is_not_connected_yet_is_dialed_and_not_believed_to_come_over_others(three: Forgery) -> None:
    three.forge(1)
    eventually(lambda: three.linked(VICTIM, OTHER), "a connection of the victim's to the other")
    three.say(OTHER, VICTIM, b"truth")
    assert three.receive(VICTIM, OTHER) == b"truth"
    assert three.linked_to(VICTIM, OTHER).schemes == ("memory",)


def test_many_forgeries_are_looked_into_once(three: Forgery) -> None:
    three.link(VICTIM, OTHER)
    for _ in range(50):
        three.forge(2)
    three.say(HOSTILE, VICTIM, b"that was it")
    assert three.receive(VICTIM, HOSTILE) == b"that was it"
    assert len(three.doubts) < 10


def test_who_really_lost_its_connection_is_relayed_over_others_as_soon_as_that_is_found_out(three: Forgery) -> None:
    """The other one has lost its link and cannot dial; the victim does not know, and looks only if notified."""
    for one, another in ((VICTIM, OTHER), (VICTIM, HOSTILE), (HOSTILE, OTHER)):
        three.link(one, another)
    own = three.linked_to(VICTIM, OTHER)
    dialer = three.nodes[VICTIM].dialer
    three.doubt = lambda _: dialer.run_in_thread(lambda: own.lose("no answer"))  # type: ignore[method-assign]
    for one, another in ((OTHER, VICTIM), (VICTIM, OTHER)):
        three.faults.add(three.on_way(LinkStall, one, another), three.on_way(RefuseDial, one, another))
    three.linked_to(OTHER, VICTIM).lose("no answer")
    link = three.meshes[OTHER].relay_routes.detour(three.ids[VICTIM])
    assert isinstance(link, Link)
    eventually(lambda: three.schemes(VICTIM, OTHER) == ("relay",), "the link at the other end")
    fresh = three.meshes[VICTIM].router.open(TALK + 1)
    three.meshes[OTHER].router.open(TALK + 1)
    link.post_send(TALK + 1, memoryview(b"over the third"))
    posted = fresh.post(None, source=three.ids[OTHER], space=Space.UNTAGGED, tag=0)
    three.nodes[VICTIM].progress.wait([posted], soon())
    assert bytes(posted.into or b"") == b"over the third"
    three.faults.clear()


def test_a_member_far_away_cannot_make_neighbours_blame_each_other() -> None:
    ring = Forgery(6, "k_regular:2")
    for rank in range(6):
        ring.link(rank, (rank + 1) % 6)
    route = (ring.ids[0], ring.ids[1], ring.ids[2])
    for kind, body in ((RelayKind.BROKEN, b"123"), (77, b"what is that?")):
        ring.linked_to(0, 1).send_relayed(encode_relay(RelayHeader(kind, 1, 0, 1, 0, 0, route)), body)
    eventually(lambda: ring.meshes[2].relay_routes.stats()["dropped"] == 2, "both at rank 2")
    assert ring.linked(1, 2)
    assert ring.linked(0, 1)
    ring.close()


# -- what it can make others keep ------------------------------------------------------------------------------------


def arrive(world: SmallWorld, at: int, before: int, header: RelayHeader, carried: bytes = b"") -> None:
    body = encode_relay(header) + carried
    link = cast(Any, world.nodes[at].links[before])
    world.nodes[at].relay.take(link, Frame(kind=int(FrameKind.RELAY), body=len(body)), memoryview(body))


@pytest.mark.parametrize(
    ("at", "before", "header"),
    [
        pytest.param(1, 0, RelayHeader(RelayKind.FRAME, 1, 1, 1, 0, 0, (0, 1, 99)), id="breaks"),
        pytest.param(2, 1, RelayHeader(RelayKind.PROBE, 2, 1, 1, 1, 0, (0, 1, 2)), id="acknowledgements"),
    ],
)
def test_who_asks_and_gives_no_room_gets_so_many_answers_and_no_more(at: int, before: int, header: RelayHeader) -> None:
    world = SmallWorld(4)
    for _ in range(MANY):
        arrive(world, at, before, header)
    hop = world.nodes[at].relay._neighbours.get(before)
    assert hop is not None
    assert 0 < hop.waits <= NOTICE_BYTES // SHORTEST + 1 < MANY


def test_room_given_back_for_what_nobody_sent_is_not_remembered() -> None:
    world = SmallWorld(4)
    arrive(world, 1, 0, RelayHeader(RelayKind.FRAME, 1, 1, 1, 0, 0, (0, 1, 99)))
    for step in range(10_000):
        room = Frame(kind=int(FrameKind.RELAY_CREDIT), step=step, length=1)
        world.nodes[1].relay.take(cast(Any, world.nodes[1].links[0]), room, memoryview(b""))
    hop = world.nodes[1].relay._neighbours.get(0)
    assert hop is not None
    assert len(hop._sent) <= 1


def test_frames_of_epochs_that_never_come_are_held_within_a_bound() -> None:
    world = SmallWorld(4)
    world.nodes[2].unwelcome = RefusedSource.NOT_YET
    for number in range(300):
        invented = RelayHeader(RelayKind.FRAME, 2, 1, 1 << 60, number, 0, (1000 + number, 1, 2))
        arrive(world, 2, 1, invented, bytes(HELD_BYTES // 2))
    honest = RelayHeader(RelayKind.FRAME, 2, 1, 2, 0, 0, (0, 3, 2))
    arrive(world, 2, 3, honest)
    held = world.nodes[2].relay._held.take()
    assert sum(len(each.carried) for each in held) <= HELD_BYTES
    assert held[-1].header == honest
