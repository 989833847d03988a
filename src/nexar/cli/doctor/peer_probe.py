"""One connection between two doctors: questions are answered at once, times are taken as bytes come in.

Times are taken by the thread that drives the transports, in the sink: what it takes to wake the asker is no part of the
trip.

A cluster of doctors: each dials every other one over each transport, and rank 0 hears what all have seen.

Nobody leaves before rank 0 has concluded: until then others may still want to reach it. A doctor that cannot get its
report to rank 0, over any connection that either of them made, keeps it and shows it where it runs.

One doctor's visit to a cluster of doctors: join, dial everybody, and let rank 0 conclude.
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
from nexar.cli.doctor.reachability import NOT_OFFERED, PROTOCOLS, cluster_findings
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

QUESTIONS: Final = 16
_UDP_BYTES: Final = 8
_IPV4_BYTES: Final = 20
_IPV6_BYTES: Final = 40

MessageCallback: TypeAlias = Callable[["ProbeConnection", "ReportMessage | ConclusionMessage"], None]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The shortest of several trips, and what it says of the other clock."""

    round_trip: float
    skew: float


@dataclass(frozen=True, slots=True)
class _Received:
    answer: ProbeReply
    moment: float
    clock: float


def _header_bytes(address: str) -> int:
    """Of UDP and IP, in each datagram to this address."""
    host = host_of(address)
    return _UDP_BYTES + (_IPV6_BYTES if host is not None and ":" in host else _IPV4_BYTES)


class ProbeConnection:
    """A `Sink`. What is no question goes to `heard`, on the driving thread. To close: `finish`, then await `ended`."""

    def __init__(self, carrier: Carrier, heard: MessageCallback) -> None:
        self._carrier = carrier
        self._heard = heard
        self._answers: queue.SimpleQueue[_Received | CarrierLost] = queue.SimpleQueue()
        self.ended: Final = threading.Event()
        carrier.attach(self)

    def measure(self, deadline: float) -> Measurement:
        """Ask several times. CarrierLost; TimeoutError at the deadline (time.monotonic)."""
        return min((self._ask(number, deadline) for number in range(QUESTIONS)), key=lambda found: found.round_trip)

    def _ask(self, number: int, deadline: float) -> Measurement:
        clock, begin = time.time(), time.perf_counter()
        self.say(ProbeRequest(number))
        try:
            heard = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError("connected, and no answer came") from None
        if isinstance(heard, CarrierLost):
            raise heard
        # The answer was written somewhere between our two looks at the clock: in the middle, if both ways are alike.
        return Measurement(heard.moment - begin, heard.answer.clock - (clock + heard.clock) / 2)

    def say(self, said: ProbeMessage) -> None:
        """Raises CarrierLost."""
        body = encode_probe(said)
        self._carrier.send_frame(Lane.CONTROL, 0, control_header(len(body)), body)

    def mtu_bytes(self) -> int | None:
        """Of the path, where the transport finds it out: what QUIC may put into a datagram, and the headers."""
        payload = self._carrier.stats().get("mtu")
        return None if payload is None else int(payload) + _header_bytes(self._carrier.peer.address)

    def finish(self) -> None:
        """Say no more: what was said still arrives."""
        try:
            self._carrier.finish()
        except CarrierLost:
            self.ended.set()  # it was over already

    # -- Sink: the driving thread ------------------------------------------------------------------------

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        """See Sink."""
        moment, clock = time.perf_counter(), time.time()
        try:
            said = decode_probe(body)
        except NotAProbeMessage as error:
            self._end(CarrierLost("misbehaved", f"a doctor was expected: {error}"))
            carrier.abort("this is a doctor, which speaks to doctors only")
            return
        if isinstance(said, ProbeRequest):
            self._answer(said, clock)
        elif isinstance(said, ProbeReply):
            self._answers.put(_Received(said, moment, clock))
        else:
            self._heard(self, said)

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """See Sink. None is ever expected here."""

    def carrier_finished(self, carrier: Carrier) -> None:
        """See Sink."""
        self._end(CarrierLost("peer", "the other doctor has left"))
        self.finish()

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        """See Sink."""
        self._end(error)

    def _answer(self, ask: ProbeRequest, clock: float) -> None:
        try:
            self.say(ProbeReply(ask.number, clock))
        except CarrierLost as error:
            self._end(error)

    def _end(self, error: CarrierLost) -> None:
        self._answers.put(error)
        self.ended.set()


DIAL_TIMEOUT: Final = 5.0
"""Seconds for one dial: where packets are thrown away, nothing but time says so."""
_AT_ONCE: Final = 8
_CLOSE_TIMEOUT: Final = 2.0
_FIRST: Final[Rank] = 0


def session_timeout(size: int) -> float:
    """Seconds in which every doctor of so many has dialed all others, even if nothing answers."""
    rounds = -(-len(PROTOCOLS) * (size - 1) // _AT_ONCE)
    return 10.0 + 2 * DIAL_TIMEOUT * rounds


class ProbeSession:
    """The `Acceptor` of one doctor's node. Close it before the node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._changed = threading.Condition()  # over everything below
        self._membership: Membership | None = None
        self._early: list[Carrier] = []
        self._connections: list[tuple[Rank, ProbeConnection]] = []
        self._reports: dict[Rank, DoctorReport] = {}
        self._conclusion: tuple[DoctorFinding, ...] | None = None

    def adopt(self, membership: Membership) -> Rank:
        """From now on these are the doctors. Our own rank among them."""
        with self._changed:
            self._membership = membership
            early, self._early = self._early, []
        for carrier in early:
            self._receive(carrier, membership)
        rank = membership.rank_of(self._node.id)
        assert rank is not None  # the worker has got this membership because we are in it
        return rank

    # -- dialing: the thread that asks -------------------------------------------------------------------

    def dial_all(self, rank: Rank) -> tuple[Reach, ...]:
        """Dial everybody, over each transport, as `rank`."""
        membership = self._known()
        wanted = [(dest, scheme) for dest in range(membership.size) if dest != rank for scheme in PROTOCOLS]
        with ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="nexar-doctor") as pool:
            return tuple(pool.map(lambda pair: self._reach(rank, *pair), wanted))

    def _reach(self, source: Rank, dest: Rank, scheme: str) -> Reach:
        member = self._known().member(dest)
        ways = self._node.ways_to(member).get(scheme, ())
        if not ways or scheme not in self._node.network_schemes:
            return Reach(source, dest, scheme, problem=NOT_OFFERED)
        expected = Expected(member.node, member.fingerprint)
        try:
            carrier = self._node.dialer.dial({scheme: ways}, expected, time.monotonic() + DIAL_TIMEOUT)
            connection = self._begin(carrier, dest)
            found = connection.measure(time.monotonic() + DIAL_TIMEOUT)
        except (ConnectRefused, CarrierLost, TimeoutError) as error:
            problem = getattr(error, "reason", None) or str(error) or "no answer"
            return Reach(source, dest, scheme, problem=problem.removeprefix(f"{scheme}: "))
        mtu = connection.mtu_bytes()
        return Reach(source, dest, scheme, round_trip=found.round_trip, mtu_bytes=mtu, skew=found.skew)

    # -- what all have seen ------------------------------------------------------------------------------

    def collect(self, own: DoctorReport, timeout: float) -> dict[Rank, DoctorReport]:
        """Rank 0: the reports of all, or of those that came in time."""
        size = self._known().size
        with self._changed:
            self._reports[own.rank] = own
            self._changed.wait_for(lambda: len(self._reports) == size, timeout)
            return dict(self._reports)

    def conclude(self, findings: tuple[DoctorFinding, ...]) -> None:
        """Rank 0: tell everybody, on every connection that there is."""
        with self._changed:
            connections = [connection for _, connection in self._connections]
        for connection in connections:
            _try_to_send(connection, ConclusionMessage(findings))

    def hand_over(self, report: DoctorReport, timeout: float) -> tuple[DoctorFinding, ...] | None:
        """The others: give the report to rank 0, and wait for its conclusion. None if it cannot be had in time."""
        deadline = time.monotonic() + timeout
        told: list[ProbeConnection] = []
        while self._conclusion is None and time.monotonic() < deadline:
            with self._changed:
                fresh = [one for rank, one in self._connections if rank == _FIRST and one not in told]
                if not fresh and self._conclusion is None:
                    self._changed.wait(max(0.0, deadline - time.monotonic()))
            for connection in fresh:
                _try_to_send(connection, ReportMessage(report))
            told += fresh
        return self._conclusion

    # -- Acceptor, and what is heard: the driving thread -----------------------------------------------------

    def carrier_accepted(self, carrier: Carrier) -> None:
        """See Acceptor."""
        with self._changed:
            membership = self._membership
            if membership is None:
                self._early.append(carrier)
                return
        self._receive(carrier, membership)

    def candidate_refused(self, address: str, reason: str) -> None:
        """See Acceptor. The one that knocked says so in its own report."""

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
        connection = ProbeConnection(carrier, self._hear)
        with self._changed:
            self._connections.append((peer, connection))
            self._changed.notify_all()
        return connection

    def _hear(self, connection: ProbeConnection, said: ReportMessage | ConclusionMessage) -> None:
        with self._changed:
            if isinstance(said, ConclusionMessage):
                self._conclusion = said.findings
            else:
                self._reports[said.report.rank] = said.report
            self._changed.notify_all()

    def _known(self) -> Membership:
        assert self._membership is not None  # `adopt` comes first
        return self._membership

    def close(self) -> None:
        """Politely, within two seconds: what was said last still arrives."""
        with self._changed:
            connections = [connection for _, connection in self._connections]
            early, self._early = self._early, []
        for carrier in early:
            carrier.abort("this doctor has left")
        for connection in connections:
            connection.finish()
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        for connection in connections:
            connection.ended.wait(max(0.0, deadline - time.monotonic()))


def _try_to_send(connection: ProbeConnection, said: ReportMessage | ConclusionMessage) -> None:
    try:
        connection.say(said)
    except CarrierLost:
        return  # there may be another connection to the same peer; who hears nothing says so itself


_GRACE: Final = 5.0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What came of it. `reports` are those this doctor has: of all at rank 0, of itself elsewhere."""

    rank: Rank
    size: int
    reports: Mapping[Rank, DoctorReport]
    findings: tuple[DoctorFinding, ...]
    concluded: bool
    """By rank 0. If not, it could not be told, and the findings are this doctor's alone."""


def probe_cluster(config: Config, invitation: Invitation, place: RankRequest, machine: Machine) -> ProbeResult:
    """JoinRefused, SeedUnreachable, FormationTimeout if there is no cluster to visit."""
    with Node(config) as node:
        session = ProbeSession(node)
        node.listen(session)
        joined = JoinClient(node, invitation, timeout=config.formation_timeout, tell=tell_on_stderr).join(place)
        try:
            rank, size = session.adopt(joined.membership), joined.membership.size
            address = next(iter(node.addresses().values()))[0]
            fixed = bool(config.port or config.port_range)
            report = DoctorReport(rank, machine, address, fixed, session.dial_all(rank))
            return _conclude(session, report, size) if rank == _FIRST else _hand_over(session, report, size)
        finally:
            session.close()
            joined.line.leave("the doctor is done")


def _conclude(session: ProbeSession, report: DoctorReport, size: int) -> ProbeResult:
    reports = session.collect(report, session_timeout(size))
    findings = tuple(cluster_findings(reports, size))
    session.conclude(findings)
    return ProbeResult(report.rank, size, reports, findings, concluded=True)


def _hand_over(session: ProbeSession, report: DoctorReport, size: int) -> ProbeResult:
    reports = {report.rank: report}
    findings = session.hand_over(report, session_timeout(size) + _GRACE)
    if findings is not None:
        return ProbeResult(report.rank, size, reports, findings, concluded=True)
    lonely = DoctorFinding(
        "rank 0 could not be told: neither it nor this doctor reaches the other, see the table above"
    )
    return ProbeResult(report.rank, size, reports, (lonely, *cluster_findings(reports, 0)), concluded=False)
