"""Relays on a graph, connected by hand: nothing moves before a test says so, and links die when it says so."""

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, cast

from nexar.errors import NexarError, PeerLost
from nexar.links.operation import DeferredIO
from nexar.links.relay.carrier import RelayedCarrier
from nexar.links.relay.forwarding import RefusedSource
from nexar.links.relay.relay import Relay
from nexar.topology import detour_limit, route
from nexar.transport.base import Buffer, Carrier, CarrierLost
from nexar.wire.frame import Frame, FrameKind, Lane, encode
from nexar.wire.relay import RelayHeader

_LOST = "the link between us was lost"


class FakeLink:
    """One end of a connection between neighbours."""

    def __init__(self, world: "SmallWorld", node: int, peer: int) -> None:
        self.peer = peer
        self.node = node
        self.failure: NexarError | None = None
        self._world = world

    def send_relayed(self, *body: Buffer) -> None:
        data = b"".join(body)
        self._put(Frame(kind=int(FrameKind.RELAY), lane=int(Lane.RELAY), body=len(data)), data)

    def return_relay_credit(self, hops: int, amount: int) -> None:
        self._put(Frame(kind=int(FrameKind.RELAY_CREDIT), step=hops, length=amount), b"")

    def _put(self, frame: Frame, body: bytes) -> None:
        if self.failure is not None:
            raise CarrierLost("peer", "gone")
        self._world.wires[self.node, self.peer].append((frame, body))


class Ear:
    """A sink that writes down what it receives."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.payloads: list[int] = []
        self.finished = 0
        self.lost: list[CarrierLost] = []

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        self.frames.append(bytes(body))

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        self.payloads.append(transfer)

    def carrier_finished(self, carrier: Carrier) -> None:
        self.finished += 1

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        self.lost.append(error)


class Node:
    """A relay and what is around it: see Surroundings."""

    def __init__(self, world: "SmallWorld", number: int) -> None:
        self.world = world
        self.number = number
        self.tasks: deque[Callable[[], None]] = deque()
        self.ears: dict[int, Ear] = {}
        self.carriers: dict[int, RelayedCarrier] = {}
        self.links: dict[int, FakeLink] = {}
        self.refusal: str | None = None
        self.unwelcome: RefusedSource | None = None
        self.looked_into: list[int] = []
        self.relay = Relay(number, cast(Any, self), DeferredIO(), cast(Any, self))

    def run_soon(self, task: Callable[[], None]) -> None:
        self.tasks.append(task)

    def epoch(self) -> int:
        return 1

    def hop_limit(self) -> int:
        return detour_limit(self.world.topology, self.world.size)

    def route(self, destination: int, avoid: frozenset[int]) -> tuple[int, ...] | None:
        straight = self.links.get(destination)
        if destination not in avoid and straight is not None and straight.failure is None:
            return self.number, destination
        dead = avoid | {peer for peer, link in self.links.items() if link.failure is not None}
        return route(self.world.topology, self.world.size, self.number, destination, frozenset(dead))

    def link(self, node: int) -> FakeLink | None:
        return self.links.get(node)

    def open(self, node: int) -> bool:
        return False

    def connect(self, node: int, why: str) -> bool:
        self.world.dials.append((self.number, node))
        return self.world.may_dial

    def wake_by(self, due: float) -> None:
        """A test says itself when it is time."""

    def accept_link(self, header: RelayHeader) -> RelayedCarrier | str | RefusedSource:
        lost = self.carriers.get(header.source)
        return (
            self.unwelcome or self.refusal or (_LOST if lost is not None else self.make(header.source, header.number))
        )

    def investigate(self, header: RelayHeader) -> bool:
        self.looked_into.append(header.source)
        return False

    def make(self, peer: int, number: int = 1) -> RelayedCarrier:
        """This node's end of a carrier."""
        way = self.route(peer, frozenset())
        assert way is not None
        carrier = self.carriers[peer] = self.relay.make(peer, number, way)
        self.ears[peer] = Ear()
        carrier.attach(self.ears[peer])
        return carrier


class SmallWorld:
    """`size` nodes, numbered as their ranks."""

    def __init__(self, size: int, topology: str = "k_regular:2", seed: int = 0) -> None:
        self.size = size
        self.topology = topology
        self.chance = Random(seed)
        self.may_dial = False
        """Whether nodes may connect to whom they have no way to: when a test says `dial`."""
        self.dials: list[tuple[int, int]] = []
        """Who wanted to connect to whom."""
        self.nodes = [Node(self, number) for number in range(size)]
        edges = [
            (one, other)
            for one in range(size)
            for other in range(size)
            if one != other and len(route(topology, size, one, other) or ()) == 2
        ]
        self.wires: dict[tuple[int, int], deque[tuple[Frame, bytes]]] = {edge: deque() for edge in edges}
        for one, other in edges:
            self.nodes[one].links[other] = FakeLink(self, one, other)

    def dial(self, one: int, other: int) -> None:
        """The two are connected, if they have not been before; both learn of it."""
        for here, there in ((one, other), (other, one)):
            known = self.nodes[here].links.get(there)
            if known is None or known.failure is not None:
                self.wires[here, there] = deque()
                self.nodes[here].links[there] = FakeLink(self, here, there)
        for here, there in ((one, other), (other, one)):
            self.nodes[here].relay.opened(there)

    def dial_all(self) -> None:
        """Everybody who wants to be connected to somebody is."""
        while self.dials:
            self.dial(*self.dials.pop(0))

    def leave(self, number: int) -> None:
        """A node closes: what it has sent arrives before its connections end."""
        for here in [here for here, there in self.wires if there == number]:
            self.cut(here, number, gently=True)

    def kill(self, number: int) -> None:
        """A node dies, with all that is on its connections."""
        for here in [here for here, there in self.wires if there == number]:
            self.cut(here, number)

    def cut(self, one: int, other: int, *, gently: bool = False) -> None:
        """The connection of the two is gone, with what is on it unless `gently`; both learn of it."""
        while gently and self.wires[one, other]:
            self.step()
        for here, there in ((one, other), (other, one)):
            self.wires[here, there].clear()
            self.nodes[here].links[there].failure = PeerLost(node=there, cause="cut")
        for here, there in ((one, other), (other, one)):
            self.nodes[here].relay.lost(cast(Any, self.nodes[here].links[there]))

    def step(self) -> bool:
        """Something that is on its way arrives somewhere, or something is done that was put off. False: nothing is."""
        for node in self.nodes:
            if node.tasks:
                node.tasks.popleft()()
                return True
        full = [edge for edge, wire in self.wires.items() if wire]
        if not full:
            return False
        here, there = self.chance.choice(full)
        frame, body = self.wires[here, there].popleft()
        node = self.nodes[there]
        assert node.relay.take(cast(Any, node.links[here]), frame, memoryview(body))
        return True

    def run(self) -> None:
        """Until nothing moves."""
        while self.step():
            continue

    def settle(self, *carriers: RelayedCarrier) -> None:
        """Until everything is acknowledged, by asking."""
        for round_ in range(200):
            self.run()
            if not any(carrier.outgoing.unacked for carrier in carriers if carrier.error is None):
                return
            for node in self.nodes:
                node.relay.tick(1e9 * (round_ + 1))
        raise AssertionError("it never came to rest")


def say(carrier: RelayedCarrier, text: bytes, lane: Lane = Lane.DATA) -> None:
    """One frame."""
    header = encode(Frame(kind=int(FrameKind.EAGER), lane=int(lane), length=len(text), body=len(text)))
    carrier.send_frame(lane, 0, header, text)
