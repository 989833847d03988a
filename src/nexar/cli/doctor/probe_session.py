"""A cluster of doctors: each dials all others over each transport; rank 0 collects the reports and concludes.

No doctor leaves before the conclusion, because others may dial it. A doctor that cannot send its report to rank 0 shows
it itself. The driving thread takes the times, so a round trip does not include waking the asking thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeAlias

from nexar.cli.doctor.observations import (
    ConclusionMessage,
    DoctorFinding,
    DoctorReport,
    Machine,
    NotAProbeMessage,
    ProbeMessage,
    ProbeReply,
    ProbeRequest,
    Reach,
    ReportMessage,
    decode_probe,
    encode_probe,
)
from nexar.cli.doctor.reachability import PROTOCOLS, cluster_findings
from nexar.cluster.acceptor import pin_mismatch
from nexar.cluster.decisions.peering import PeerDirectory
from nexar.cluster.join_client import JoinClient, RankRequest
from nexar.cluster.membership import Membership
from nexar.cluster.node import Node
from nexar.cluster.wait_notice import tell_on_stderr
from nexar.config import Config
from nexar.security.invitation import Invitation
from nexar.transport.address import host_of
from nexar.transport.base import Carrier, CarrierLost, ConnectRefused, Expected
from nexar.types import Rank
from nexar.wire.frame import Frame, Lane, control_header

PROBES: Final = 16
_UDP_BYTES: Final = 8
_IPV4_BYTES: Final = 20
_IPV6_BYTES: Final = 40

MessageCallback: TypeAlias = Callable[["ProbeConnection", "ReportMessage | ConclusionMessage"], None]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measured in the shortest round trip."""

    round_trip: float
    skew: float


@dataclass(frozen=True, slots=True)
class _Received:
    answer: ProbeReply
    moment: float
    clock: float


def _header_bytes(address: str) -> int:
    host = host_of(address)
    return _UDP_BYTES + (_IPV6_BYTES if host is not None and ":" in host else _IPV4_BYTES)


class ProbeConnection:
    """A `Sink` between two doctors. `on_message` gets other messages, on the driving thread. Wait for `ended` after
    `finish`.
    """

    def __init__(self, carrier: Carrier, on_message: MessageCallback) -> None:
        self._carrier = carrier
        self._on_message = on_message
        self._answers: queue.SimpleQueue[_Received | CarrierLost] = queue.SimpleQueue()
        self.ended: Final = threading.Event()
        carrier.attach(self)

    def measure(self, deadline: float) -> Measurement:
        """Blocks. Raises CarrierLost; TimeoutError at the deadline (time.monotonic)."""
        return min((self._ask(number, deadline) for number in range(PROBES)), key=lambda found: found.round_trip)

    def _ask(self, number: int, deadline: float) -> Measurement:
        clock, begin = time.time(), time.perf_counter()
        self.send(ProbeRequest(number))
        try:
            received = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError("connected, and no answer came") from None
        if isinstance(received, CarrierLost):
            raise received
        # The peer read its clock between our two readings: in the middle, if both directions take equally long.
        return Measurement(received.moment - begin, received.answer.clock - (clock + received.clock) / 2)

    def send(self, message: ProbeMessage) -> None:
        """Raises CarrierLost."""
        body = encode_probe(message)
        self._carrier.send_frame(Lane.CONTROL, 0, control_header(len(body)), body)

    def mtu_bytes(self) -> int | None:
        payload = self._carrier.stats().get("mtu")
        return None if payload is None else int(payload) + _header_bytes(self._carrier.peer.address)

    def finish(self) -> None:
        try:
            self._carrier.finish()
        except CarrierLost:
            self.ended.set()  # it has ended already

    # -- Sink: driving thread --------------------------------------------------------------------------------

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        moment, clock = time.perf_counter(), time.time()
        try:
            message = decode_probe(body)
        except NotAProbeMessage as error:
            self._end(CarrierLost("misbehaved", f"a doctor was expected: {error}"))
            carrier.abort("this node is a doctor and accepts doctors only")
            return
        if isinstance(message, ProbeRequest):
            self._answer(message, clock)
        elif isinstance(message, ProbeReply):
            self._answers.put(_Received(message, moment, clock))
        else:
            self._on_message(self, message)

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None: ...

    def carrier_finished(self, carrier: Carrier) -> None:
        self._end(CarrierLost("peer", "the other doctor has left"))
        self.finish()

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        self._end(error)

    def _answer(self, ask: ProbeRequest, clock: float) -> None:
        try:
            self.send(ProbeReply(ask.number, clock))
        except CarrierLost as error:
            self._end(error)

    def _end(self, error: CarrierLost) -> None:
        self._answers.put(error)
        self.ended.set()


DIAL_TIMEOUT: Final = 5.0
"""Seconds for one dial: a firewall that drops packets shows only by a timeout."""
_AT_ONCE: Final = 8
_CLOSE_TIMEOUT: Final = 2.0
_ROOT: Final[Rank] = 0


def session_timeout(size: int) -> float:
    """Return the seconds in which `size` doctors can dial each other, even in vain."""
    rounds = -(-len(PROTOCOLS) * (size - 1) // _AT_ONCE)
    return 10.0 + 2 * DIAL_TIMEOUT * rounds


class ProbeSession:
    """The `Acceptor` of one doctor's node. Close it before the node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._changed = threading.Condition()  # guards all attributes below
        self._membership: Membership | None = None
        self._pending: list[Carrier] = []
        self._connections: list[tuple[Rank, ProbeConnection]] = []
        self._reports: dict[Rank, DoctorReport] = {}
        self._conclusion: tuple[DoctorFinding, ...] | None = None

    def adopt(self, membership: Membership) -> Rank:
        """Returns this node's rank."""
        with self._changed:
            self._membership = membership
            pending, self._pending = self._pending, []
        for carrier in pending:
            self._receive(carrier, membership)
        rank = membership.rank_of(self._node.id)
        assert rank is not None  # the join succeeded because this node is in the membership
        return rank

    # -- dialing: calling thread -----------------------------------------------------------------------------

    def dial_all(self, rank: Rank) -> tuple[Reach, ...]:
        """Blocks."""
        membership = self._known()
        wanted = [(dest, scheme) for dest in range(membership.size) if dest != rank for scheme in PROTOCOLS]
        with ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="nexar-doctor") as pool:
            return tuple(pool.map(lambda pair: self.dial(rank, *pair), wanted))

    def dial(self, source: Rank, dest: Rank, scheme: str) -> Reach:
        """Blocks. Returns a failure, never raises it."""
        member = self._known().member(dest)
        addresses = self._node.dial_addresses(member).get(scheme, ())
        if not addresses or scheme not in self._node.mesh_schemes:
            return Reach(source, dest, scheme, problem="not offered", offered=False)
        expected = Expected(member.node, member.fingerprint)
        try:
            carrier = self._node.dialer.dial({scheme: addresses}, expected, time.monotonic() + DIAL_TIMEOUT)
            connection = self._begin(carrier, dest)
            found = connection.measure(time.monotonic() + DIAL_TIMEOUT)
        except (ConnectRefused, CarrierLost, TimeoutError) as error:
            problem = getattr(error, "reason", None) or str(error) or "no answer"
            return Reach(source, dest, scheme, problem=problem.removeprefix(f"{scheme}: "))
        mtu = connection.mtu_bytes()
        return Reach(source, dest, scheme, round_trip=found.round_trip, mtu_bytes=mtu, skew=found.skew)

    # -- reports ---------------------------------------------------------------------------------------------

    def collect(self, own: DoctorReport, timeout: float) -> dict[Rank, DoctorReport]:
        """Rank 0 only. Blocks until all reports have arrived, or `timeout`."""
        size = self._known().size
        with self._changed:
            self._reports[own.rank] = own
            self._changed.wait_for(lambda: len(self._reports) == size, timeout)
            return dict(self._reports)

    def conclude(self, findings: tuple[DoctorFinding, ...]) -> None:
        with self._changed:
            connections = [connection for _, connection in self._connections]
        for connection in connections:
            _try_to_send(connection, ConclusionMessage(findings))

    def submit(self, report: DoctorReport, timeout: float) -> tuple[DoctorFinding, ...] | None:
        """Other ranks. Blocks until rank 0 concludes; returns None after `timeout`."""
        deadline = time.monotonic() + timeout
        sent: list[ProbeConnection] = []
        while self._conclusion is None and time.monotonic() < deadline:
            with self._changed:
                fresh = [one for rank, one in self._connections if rank == _ROOT and one not in sent]
                if not fresh and self._conclusion is None:
                    self._changed.wait(max(0.0, deadline - time.monotonic()))
            for connection in fresh:
                _try_to_send(connection, ReportMessage(report))
            sent += fresh
        return self._conclusion

    # -- Acceptor and messages: driving thread ---------------------------------------------------------------

    def carrier_accepted(self, carrier: Carrier) -> None:
        with self._changed:
            membership = self._membership
            if membership is None:
                self._pending.append(carrier)
                return
        self._receive(carrier, membership)

    def candidate_refused(self, address: str, reason: str) -> None:
        """The rejected peer reports it itself."""

    def _receive(self, carrier: Carrier, membership: Membership) -> None:
        refusal, rank = (
            pin_mismatch(carrier, PeerDirectory(self._node.id, membership)),
            membership.rank_of(carrier.peer.node),
        )
        if refusal is not None or rank is None:
            carrier.abort(refusal or "it holds no rank")
        else:
            self._begin(carrier, rank)

    def _begin(self, carrier: Carrier, peer: Rank) -> ProbeConnection:
        connection = ProbeConnection(carrier, self._message_arrived)
        with self._changed:
            self._connections.append((peer, connection))
            self._changed.notify_all()
        return connection

    def _message_arrived(self, connection: ProbeConnection, message: ReportMessage | ConclusionMessage) -> None:
        with self._changed:
            if isinstance(message, ConclusionMessage):
                self._conclusion = message.findings
            else:
                self._reports[message.report.rank] = message.report
            self._changed.notify_all()

    def _known(self) -> Membership:
        assert self._membership is not None  # `adopt` comes first
        return self._membership

    def close(self) -> None:
        """Waits at most two seconds for the last messages to arrive."""
        with self._changed:
            connections = [connection for _, connection in self._connections]
            pending, self._pending = self._pending, []
        for carrier in pending:
            carrier.abort("this doctor has left")
        for connection in connections:
            connection.finish()
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        for connection in connections:
            connection.ended.wait(max(0.0, deadline - time.monotonic()))


def _try_to_send(connection: ProbeConnection, message: ReportMessage | ConclusionMessage) -> None:
    try:
        connection.send(message)
    except CarrierLost:
        return  # another connection to the same peer may work; a doctor without a conclusion reports that itself


_GRACE: Final = 5.0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """`reports` has all ranks at rank 0, elsewhere only this doctor's."""

    rank: Rank
    size: int
    reports: Mapping[Rank, DoctorReport]
    findings: tuple[DoctorFinding, ...]
    concluded: bool
    """By rank 0. If not, rank 0 was not reached, and the findings are this doctor's alone."""


def probe_cluster(config: Config, invitation: Invitation, rank_request: RankRequest, machine: Machine) -> ProbeResult:
    """Raises JoinRefused, SeedUnreachable, FormationTimeout."""
    with Node(config) as node:
        session = ProbeSession(node)
        node.listen(session)
        joined = JoinClient(node, invitation, timeout=config.formation_timeout, tell=tell_on_stderr).join(rank_request)
        try:
            rank, size = session.adopt(joined.membership), joined.membership.size
            address = next(iter(node.addresses().values()))[0]
            fixed = bool(config.port or config.port_range)
            report = DoctorReport(rank, machine, address, fixed, session.dial_all(rank))
            return _conclude(session, report, size) if rank == _ROOT else _submit(session, report, size)
        finally:
            session.close()
            joined.connection.leave("the doctor is done")


def _conclude(session: ProbeSession, report: DoctorReport, size: int) -> ProbeResult:
    reports = session.collect(report, session_timeout(size))
    findings = tuple(cluster_findings(reports, size))
    session.conclude(findings)
    return ProbeResult(report.rank, size, reports, findings, concluded=True)


def _submit(session: ProbeSession, report: DoctorReport, size: int) -> ProbeResult:
    reports = {report.rank: report}
    findings = session.submit(report, session_timeout(size) + _GRACE)
    if findings is not None:
        return ProbeResult(report.rank, size, reports, findings, concluded=True)
    unreachable = DoctorFinding(
        "rank 0 did not get this report: the two doctors cannot reach each other, see the table above"
    )
    return ProbeResult(report.rank, size, reports, (unreachable, *cluster_findings(reports, 0)), concluded=False)
