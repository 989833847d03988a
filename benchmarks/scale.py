"""Measures what the control code costs per node in clusters of several sizes, in virtual time, without a network.

    python benchmarks/scale.py
    python benchmarks/scale.py --sizes 10,100,1000,4096

Every node runs the product's decision code: Admission at the seed, FailureDetector for heartbeats, NodeMachine and
CompletionExchange for the recovery from one death. Messages are encoded as on the wire; the envelopes of TLS and QUIC,
probes and data are not counted. Nodes share memberships, or a cluster of 4,096 would need 4,096 copies of each; the CPU
time per node is that of a sample which does not share them.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from nexar.cluster.decisions import successor_machine, successor_state
from nexar.cluster.decisions.admission import Admission
from nexar.cluster.decisions.admission_checks import AdmissionLimits
from nexar.cluster.decisions.admission_events import (
    AdmissionAction,
    AdmissionEvent,
    AdmissionTick,
    AdmitNode,
    CommitMembership,
    ConnectionEnded,
    ConnectionOpened,
    HelloReceived,
    JoinerReady,
    JoinRequested,
    MemberAnswered,
    MemberConnected,
    MemberMessageReceived,
    NotifyConnections,
    ProgressRequested,
    SendChallenge,
    StartCluster,
)
from nexar.cluster.decisions.agreement_instances import AgreementInstances, ValueChosen
from nexar.cluster.decisions.completion import CompletedCalls, CompletionExchange, SendNews
from nexar.cluster.decisions.failure_detector import FailureDetector, watched, watchers
from nexar.cluster.decisions.membership_events import (
    Loss,
    LossKind,
    MessageReceived,
    PeerLossFound,
    ProbeFinished,
    SendMessage,
    StartProbe,
    Tick,
)
from nexar.cluster.decisions.node_machine import NodeMachine
from nexar.cluster.decisions.successor_events import (
    BeginRequested,
    BuildFinished,
    Investigate,
    OpenGeneration,
    StartBuild,
)
from nexar.cluster.membership import WORLD, Change, Membership, PinnedNode, encode_membership, next_generation
from nexar.security.proof import NONCE_BYTES, PROOF_BYTES
from nexar.wire.control import Beat, CurrentCall, decode, encode
from nexar.wire.hello import Hello, encode_hello
from nexar.wire.join import (
    Challenge,
    Committed,
    Connected,
    FormationQuery,
    JoinMessage,
    JoinRequest,
    LivenessQuery,
    LivenessReply,
    MemberDied,
    Ready,
    SeedPaxosMessage,
    Started,
    Welcome,
    encode_join,
)

PER_HOST = 8
LATENCY = 0.001  # seconds of a message or probe
SAMPLE = 16  # nodes that share nothing, for the CPU time per node
LATE_JOINERS = 16
NEWS_BYTES = 24  # of one message of the completion exchange: three numbers
SEED = 1_000_000
_PROOF, _NONCE = bytes(PROOF_BYTES), bytes(NONCE_BYTES)
_CERTIFICATE = bytes(900)
_ENDED = Loss(LossKind.ENDED, "its process has ended")


@dataclass
class Traffic:
    """Messages and bytes, by node."""

    sent: Counter[int] = field(default_factory=Counter)
    sent_bytes: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)
    received_bytes: Counter[int] = field(default_factory=Counter)

    def add(self, source: int, destination: int, size: int) -> None:
        self.sent[source] += 1
        self.sent_bytes[source] += size
        self.received[destination] += 1
        self.received_bytes[destination] += size


@dataclass
class Cost:
    """What one phase costs."""

    traffic: Traffic
    nodes: list[int]
    cpu: list[float]  # seconds of sampled nodes
    seed_cpu: float = 0.0

    def rows(self) -> dict[str, str]:
        """For each kind the median and the maximum over the nodes."""
        shown = {}
        for name, counts in (("messages", (self.traffic.sent, self.traffic.received)),
                             ("bytes", (self.traffic.sent_bytes, self.traffic.received_bytes))):  # fmt: skip
            for verb, count in zip(("sent", "received"), counts, strict=True):
                values = [count[node] for node in self.nodes]
                shown[f"{name} {verb}"] = f"{statistics.median(values):,.0f} / {max(values):,}"
        if self.cpu:
            shown["CPU"] = f"{1e3 * statistics.median(self.cpu):.2f} / {1e3 * max(self.cpu):.2f} ms"
        return shown

    def seed_rows(self, joiners: int) -> dict[str, str]:
        """Of the seed, for each of so many nodes."""
        traffic, seed = self.traffic, SEED
        return {
            "seed: messages sent": f"{traffic.sent[seed] / joiners:,.1f}",
            "seed: messages received": f"{traffic.received[seed] / joiners:,.1f}",
            "seed: bytes sent": f"{traffic.sent_bytes[seed] / joiners:,.0f}",
            "seed: bytes received": f"{traffic.received_bytes[seed] / joiners:,.0f}",
            "seed: CPU": f"{1e6 * self.seed_cpu / joiners:,.1f} µs",
        }


# -- formation


class Seed:
    """The seed's machine, and the messages that its shell sends. The node of connection c is c + 1."""

    def __init__(self, size: int) -> None:
        limits = AdmissionLimits(elastic=True)
        self.machine = Admission(
            "cluster", size, started=0.0, formation_timeout=60.0, seed=PinnedNode(SEED, bytes(32)), limits=limits
        )
        self.traffic = Traffic()
        self.cpu = 0.0

    def step(self, event: AdmissionEvent, now: float, received: int = 0) -> list[AdmissionAction]:
        """`received`: bytes of the message that the event is."""
        if received:
            self.traffic.add(event.connection + 1, SEED, received)  # type: ignore[union-attr]
        begin = time.process_time()
        actions = self.machine.step(event, now)
        sent = [(len(encode_join(message)), to) for message, to in map(_message_of, actions) if message is not None]
        self.cpu += time.process_time() - begin
        for size, connections in sent:
            for connection in connections:
                self.traffic.add(SEED, connection + 1, size)
        return actions


def _message_of(action: AdmissionAction) -> tuple[JoinMessage | None, tuple[int, ...]]:
    """What the seed's shell sends for this action, encoded once for all receivers."""
    match action:
        case SendChallenge(connection):
            return Challenge(_NONCE, _PROOF), (connection,)
        case AdmitNode(connection=connection, seen_address=seen, size=size):
            return Welcome("cluster", _CERTIFICATE, _CERTIFICATE, seen, size), (connection,)
        case CommitMembership(membership=membership, connections=connections) if connections:
            return Committed(encode_membership(membership)), connections
        case StartCluster(connections=connections):
            return Started(), connections
        case NotifyConnections(message, connections):
            return message, connections
    return None, ()


def join(seed: Seed, number: int, size: int = 0, *, confirms: bool) -> None:
    """All that one candidate sends. With `size`, it brings a rank of a world of that size."""
    hello = Hello(number + 1, "candidate", frozenset({"quic", "tls"}), _NONCE)
    seed.step(ConnectionOpened(number, f"10.0.0.1:{number}"), 1.0)
    seed.step(HelloReceived(number, hello), 1.0, len(encode_hello(hello)))
    port = 1 + number
    addresses = {"quic": (f"10.0.0.1:{port}", f"[fd00::1]:{port}"), "tls": (f"10.0.0.1:{port}",)}
    asked = JoinRequest(
        _PROOF,
        bytes(400),
        f"host-{number // PER_HOST}",
        addresses,
        number if size else None,
        size=size,
        confirms=confirms,
    )
    key = number.to_bytes(32, "big")
    seed.step(JoinRequested(number, asked, True, key), 1.0, len(encode_join(asked)))
    seed.step(JoinerReady(number), 1.0, len(encode_join(Ready())))


def form(size: int) -> tuple[Seed, Membership, Cost]:
    """A cluster of this size that has started. The last node is late, and all others ask for it once."""
    seed = Seed(size)
    for number in range(size - 1):
        join(seed, number, size, confirms=True)
    for number in range(size - 1):
        seed.step(ProgressRequested(number), 1.0, len(encode_join(FormationQuery())))
    join(seed, size - 1, size, confirms=True)
    for number in range(size):
        seed.step(MemberConnected(number), 2.0, len(encode_join(Connected())))
    membership = seed.machine.membership
    assert membership is not None
    assert not seed.machine.forms
    return seed, membership, Cost(seed.traffic, list(range(1, size + 1)), [], seed.cpu)


def join_later(seed: Seed, size: int) -> Cost:
    """Further nodes come to an elastic cluster and wait for a checkpoint."""
    seed.traffic, seed.cpu = Traffic(), 0.0
    for number in range(size, size + LATE_JOINERS):
        join(seed, number, confirms=False)
    cost = Cost(seed.traffic, list(range(1, size + 1)), [], seed.cpu)
    seed.traffic, seed.cpu = Traffic(), 0.0
    return cost


# -- heartbeats


def heartbeat_once(membership: Membership) -> Cost:
    """Every node sends one heartbeat to each of its watchers, and checks the nodes that it watches."""
    heartbeat = Beat(1, (CurrentCall(0, "all_reduce", 1, 0, 0.1),), "all_reduce")
    size, body, traffic, cpu = membership.size, len(encode(heartbeat)), Traffic(), []
    for rank, member in enumerate(membership.members):
        for other in watchers(size, rank):
            traffic.add(member.node, membership.members[other].node, body)
    for rank in range(0, size, max(1, size // SAMPLE)):
        detector, nodes = (
            FailureDetector(1.0, 5.0, 30.0),
            [membership.members[each].node for each in watched(size, rank)],
        )
        detector.watch(nodes, 0.0)
        begin = time.process_time()
        for node in nodes:
            detector.record_traffic(node, 1, 1.0)
            detector.record_heartbeat(node, decode(encode(heartbeat)), 1.0)  # type: ignore[arg-type]
        detector.tick(1.0)
        cpu.append(time.process_time() - begin)
    return Cost(traffic, [member.node for member in membership.members], cpu)


# -- recovery


class SharedResults:
    """Results of pure functions that all nodes compute alike, except those of the sample."""

    def __init__(self) -> None:
        self.node = 0  # that runs now
        self.sample: frozenset[int] = frozenset()
        self._known: dict[Any, tuple[Any, Any]] = {}  # with an object that keeps the identity of the key in use

    def share(self, function: Callable[..., Any], key: Callable[..., tuple[Any, object]]) -> Callable[..., Any]:
        def shared(*arguments: Any) -> Any:
            if self.node in self.sample:
                return function(*arguments)
            about, kept = key(*arguments)
            if (function, about) not in self._known:
                self._known[function, about] = (kept, function(*arguments))
            return self._known[function, about][1]

        return shared


class Recovery:
    """All members of a cluster, of which one dies."""

    def __init__(self, membership: Membership, seed: Seed) -> None:
        self.now = 10.0
        self.traffic = seed.traffic
        self.cpu: defaultdict[int, float] = defaultdict(float)
        self._seed = seed
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # heap
        self._scheduled = 0
        self._timers: dict[int, float] = {}
        self._shared = SharedResults()
        self._exchanges: dict[int, tuple[StartBuild, CompletionExchange]] = {}
        self._early: dict[int, list[tuple[int, Any]]] = {}
        self.opened: set[int] = set()
        nodes = [member.node for member in membership.members]
        self.dead = nodes[len(nodes) // 2]
        living = [node for node in nodes if node != self.dead]
        self._shared.sample = frozenset(living[:: max(1, len(living) // SAMPLE)])
        self._apply = self._shared.share(Change.apply, lambda change, before: ((id(before), change.encode()), before))
        self.machines = {node: self._machine(node, membership) for node in living}

    def _machine(self, node: int, membership: Membership) -> NodeMachine:
        self._shared.node = node
        machine = NodeMachine(node, membership, recovery_timeout=30.0, random=Random(node), apply=self._apply)
        machine.step(BeginRequested(1, WORLD, membership), self.now)
        machine.step(BuildFinished(1), self.now)
        return machine

    def run(self) -> Cost:
        """Until every survivor has the next generation of the world."""
        following = next_generation
        shared = self._shared.share(
            following, lambda c, before, world, changes: ((c, id(before), id(world), len(changes)), (before, world))
        )
        nodes_of = self._shared.share(successor_state.nodes_of, lambda membership: (id(membership), membership))
        with (
            patch.object(successor_state, "next_generation", shared),
            patch.object(successor_machine, "nodes_of", nodes_of),
        ):
            self._die()
            while self._due and len(self.opened) < len(self.machines):
                self.now, _, action = heapq.heappop(self._due)
                action()
        assert len(self.opened) == len(self.machines), f"{len(self.opened)} of {len(self.machines)} recovered"
        cpu = [self.cpu[node] for node in self._shared.sample]
        return Cost(self.traffic, list(self.machines), cpu, self._seed.cpu)

    def _die(self) -> None:
        """The kernel tells the watchers, and the seed all members."""
        members = next(iter(self.machines.values())).membership_machine.membership
        rank = members.rank_of(self.dead)
        assert rank is not None
        for watcher in watchers(members.size, rank):
            node = members.members[watcher].node
            self._after(LATENCY, lambda node=node: self.step(node, PeerLossFound(self.dead, _ENDED)))  # type: ignore[misc]
        self._after(LATENCY, lambda: self._step_seed(ConnectionEnded(self.dead - 1, "reset")))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._scheduled += 1
        heapq.heappush(self._due, (self.now + seconds, self._scheduled, action))

    def step(self, node: int, event: Any) -> None:
        machine = self.machines.get(node)
        if machine is None:
            return
        self._shared.node = node
        begin = time.process_time()
        actions, due = machine.step(event, self.now), machine.due(self.now)
        self.cpu[node] += time.process_time() - begin
        for action in actions:
            self._perform(node, action)
        if due is not None and due < self._timers.get(node, float("inf")):
            self._timers[node] = due
            self._after(max(0.0, due - self.now), lambda: self._tick(node, due))

    def _tick(self, node: int, due: float) -> None:
        if self._timers.get(node) == due:
            del self._timers[node]
            self.step(node, Tick())

    def _perform(self, node: int, action: Any) -> None:
        match action:
            case SendMessage(receiver, message):
                self._send(node, receiver, message)
            case StartProbe(probed):
                loss = _ENDED if probed == self.dead else None
                self._after(LATENCY, lambda: self.step(node, ProbeFinished(probed, loss)))
            case Investigate(missing) if missing == self.dead:
                self._after(LATENCY, lambda: self.step(node, PeerLossFound(self.dead, _ENDED)))
            case StartBuild():
                self._build(node, action)
            case OpenGeneration():
                self.opened.add(node)

    def _send(self, node: int, receiver: int, message: Any) -> None:
        body = len(encode(message))
        if receiver == SEED:
            event = MemberMessageReceived(node - 1, message)
            self._after(LATENCY, lambda: self._step_seed(event, body))
        else:
            self.traffic.add(node, receiver, body)
            self._after(LATENCY, lambda: self.step(receiver, MessageReceived(node, message)))

    # -- the seed

    def _step_seed(self, event: AdmissionEvent, received: int = 0) -> None:
        for action in self._seed.step(event, self.now, received):
            if isinstance(action, NotifyConnections):
                for connection in action.connections:
                    self._from_seed(connection, action.message)
        due = self._seed.machine.due(self.now)
        if due is not None:
            self._after(max(LATENCY, due - self.now), lambda: self._tick_seed(due))

    def _tick_seed(self, due: float) -> None:
        if self._seed.machine.due(self.now) == max(due, self.now):
            self._step_seed(AdmissionTick())

    def _from_seed(self, connection: int, message: JoinMessage) -> None:
        node = connection + 1
        match message:
            case SeedPaxosMessage(body):
                self._after(LATENCY, lambda: self.step(node, MessageReceived(SEED, decode(body))))  # type: ignore[arg-type]
            case MemberDied():  # a hint: the member probes
                self._after(2 * LATENCY, lambda: self.step(node, PeerLossFound(self.dead, _ENDED)))
            case LivenessQuery(number):
                size = len(encode_join(LivenessReply(number)))
                self._after(2 * LATENCY, lambda: self._step_seed(MemberAnswered(connection, number), size))

    # -- builds

    def _build(self, node: int, start: StartBuild) -> None:
        rank = start.membership.rank_of(node)
        assert rank is not None
        exchange = CompletionExchange(rank, start.membership.size, CompletedCalls(1, 5))
        self._exchanges[node] = (start, exchange)
        self._exchange(node, exchange.start())
        for step, news in self._early.pop(node, []):
            self._news(node, step, news)

    def _exchange(self, node: int, sends: list[SendNews]) -> None:
        start, exchange = self._exchanges[node]
        for send in sends:
            receiver = start.membership.members[send.rank].node
            self.traffic.add(node, receiver, NEWS_BYTES)
            self._after(LATENCY, lambda send=send, receiver=receiver: self._news(receiver, send.step, send.news))  # type: ignore[misc]
        if exchange.result is not None:
            self.step(node, BuildFinished(start.build, exchange.result))

    def _news(self, node: int, step: int, news: Any) -> None:
        if node in self._exchanges:
            self._exchange(node, self._exchanges[node][1].received(step, news))
        else:
            self._early.setdefault(node, []).append((step, news))


# -- agree()


def agree(size: int) -> Cost:
    """All nodes propose at the same time."""
    instance, traffic, cpu, now = (7, 1, 1), Traffic(), defaultdict[int, float](float), 0.0
    nodes = {node: AgreementInstances(node, lambda each: Random(str(each))) for node in range(1, size + 1)}
    voters = frozenset(nodes)
    due: list[tuple[float, int, int, int, Any]] = []  # heap: when, order, node, sender, message
    chosen: set[int] = set()
    order = 0

    def perform(node: int, actions: list[Any]) -> None:
        nonlocal order
        for action in actions:
            if isinstance(action, ValueChosen):
                chosen.add(node)
                continue
            order += 1
            traffic.add(node, action.node, len(encode(action.message)))
            heapq.heappush(due, (now + LATENCY, order, action.node, node, action.message))
        wakes = nodes[node].due(now)
        if wakes is not None:
            order += 1
            heapq.heappush(due, (wakes, order, node, 0, None))

    for each in nodes.values():
        each.add_generation(7, 1, voters)
    for node, each in nodes.items():
        perform(node, each.propose(instance, b"value", now))
    while len(chosen) < size:
        now, _, node, sender, message = heapq.heappop(due)
        begin = time.process_time()
        instances = nodes[node]
        actions = instances.tick(now) if message is None else instances.receive(sender, message, now)
        cpu[node] += time.process_time() - begin
        perform(node, actions)
    return Cost(traffic, list(nodes), [cpu[node] for node in nodes])


# -- the table


def measure(size: int) -> dict[str, str]:
    """All figures of one size."""
    began = time.process_time()
    seed, membership, formed = form(size)
    later = join_later(seed, size)
    heartbeats = heartbeat_once(membership)
    recovery = Recovery(membership, seed)
    recovered = recovery.run()
    agreed = agree(size)
    figures = {f"form: {name}": value for name, value in {**formed.rows(), **formed.seed_rows(size)}.items()}
    figures |= {f"join later: {name}": value for name, value in later.seed_rows(LATE_JOINERS).items()}
    figures |= {f"heartbeat: {name}": value for name, value in heartbeats.rows().items()}
    figures |= {f"recover: {name}": value for name, value in {**recovered.rows(), **recovered.seed_rows(size)}.items()}
    figures["recover: time"] = f"{1e3 * (recovery.now - 10.0):.0f} ms"
    figures |= {f"agree: {name}": value for name, value in agreed.rows().items()}
    figures["this benchmark"] = f"{time.process_time() - began:.1f} CPU s"
    return figures


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [int(part) for part in text.split(",")], default=[10, 100, 1000])
    sizes = parser.parse_args().sizes
    columns = [measure(size) for size in sizes]
    table = Table(title="per node: median / maximum; seed: for each node; messages take 1 ms", pad_edge=False)
    table.add_column("")
    for size in sizes:
        table.add_column(f"{size:,}", justify="right")
    for name in columns[0]:
        table.add_row(name, *(column.get(name, "") for column in columns))
    Console(width=30 + 26 * len(sizes)).print(table)


if __name__ == "__main__":
    main()
