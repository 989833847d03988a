"""The seed's server: feeds connections and messages to Admission and performs its actions.

Invariant: the lock orders the events. Actions are performed in that order, without the lock (`SerialQueue`).

Invariant: an event that raises, in the decision or in its actions, ends only the connection it came from. Only events
without a connection (time) may raise: a bug of the seed.

The number of finishing unauthenticated connections is limited.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, assert_never

from nexar.cluster.control_loop import ControlLoop, SerialQueue
from nexar.cluster.decisions.admission import Admission
from nexar.cluster.decisions.admission_events import (
    AdmissionAction,
    AdmissionEvent,
    AdmissionTick,
    AdmitNode,
    CommitMembership,
    ConnectionEnded,
    ConnectionOpened,
    DropConnection,
    FailFormation,
    NotifyConnections,
    PersistVote,
    RefuseConnection,
    SeedEvent,
    SendChallenge,
    ShowBoard,
    StartCluster,
)
from nexar.cluster.decisions.paxos import Vote
from nexar.cluster.decisions.refusals import RefusalLog, brief
from nexar.cluster.delay_meter import DelayMeter
from nexar.cluster.membership import Membership, encode_membership
from nexar.cluster.seed_connection import CertificateIssuer, SeedConnection
from nexar.cluster.seed_status import FormationStatus, SeedLog, StatusBoardService
from nexar.errors import FormationTimeout, InternalError, UsageError
from nexar.transport.base import Carrier
from nexar.transport.registry import log_unhandled
from nexar.types import describe_peer
from nexar.wire.join import MAX_REFUSALS, Committed, FormationFailed, JoinRefusedMessage, Started, Welcome, encode_join

LINGER: Final = 1.0  # seconds for the peer to read the last message and close
_MEASURE_INTERVAL: Final = 1.0  # seconds between measurements of the own delay, while the cluster forms
_TOO_SLOW: Final = "it did not close its side of the connection"


class SeedServer:
    """The `Acceptor` of the seed's transports. Close it while they are still driven."""

    def __init__(
        self,
        admission: Admission,
        issuer: CertificateIssuer,
        status: FormationStatus,
        seed_log: SeedLog,
        board: StatusBoardService,
        *,
        control_loop: ControlLoop,
        keep: Callable[[Membership], None],
        keep_vote: Callable[[Vote], None],
        discard: Callable[[], None] = lambda: None,
        meter: DelayMeter | None = None,
        max_lingering: int = 256,
    ) -> None:
        """`keep` and `keep_vote` store a membership or a vote before it is sent to any node, or raise UsageError.
        `discard` removes the first membership if the cluster did not start.
        """
        self._admission = admission  # guarded by the lock
        self._issuer = issuer
        self._status = status
        self._seed_log = seed_log
        self._board = board
        self._keep = keep
        self._keep_vote = keep_vote
        self._discard = discard
        self._kept = admission.membership  # written by the performing thread
        self._max_lingering = max_lingering
        self._lock = threading.Lock()
        self._queue = SerialQueue(self._do)  # actions with the connection that caused them; filled under the lock
        self._transport_refusals = RefusalLog()  # refused by the transports; guarded by the lock
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._connections: dict[int, SeedConnection] = {}  # this and all below: guarded by `_changed`
        self._lingering: OrderedDict[int, float] = OrderedDict()  # when they are aborted
        self._unauthenticated: OrderedDict[int, None] = OrderedDict()  # those that were never admitted
        self._closed = False
        self._meter = meter
        self._measure_at: float | None = None  # written by the control loop once it runs
        self._timer = control_loop.call_at(None, self._on_timer)
        now = time.monotonic()
        if meter is not None and admission.forms:
            self._measure_at = now + _MEASURE_INTERVAL
            self._timer.wake_by(self._measure_at)
        self._timer.wake_by(admission.due(now))

    # -- Acceptor: called by the driver ------------------------------------------------------------------

    def carrier_accepted(self, carrier: Carrier) -> None:
        address = carrier.peer.address
        if carrier.peer.verified:
            self.candidate_refused(address, "the seed accepts join connections only, which show no certificate")
            carrier.abort("this is a seed: dial it without a certificate")
            return
        connection = SeedConnection(
            next(self._numbers), carrier, self._issuer, board=self._board, report=self._put, ended=self._forget
        )
        with self._changed:
            closed = self._closed
            self._connections[connection.number] = connection
        if closed:
            connection.abort("the seed is closing")
            return
        self._put(ConnectionOpened(connection.number, address))
        connection.open()

    def candidate_refused(self, address: str, reason: str) -> None:
        with self._lock:
            self._transport_refusals.add(describe_peer(None, None, address), reason)
            self._queue.post([(None, SeedEvent("refused", address, reason=brief(reason)))])
        self._perform()

    # -- state -------------------------------------------------------------------------------------------

    def describe_joined(self) -> list[str]:
        with self._changed:
            connections = [connection for connection in self._connections.values() if connection.admitted]
        return [
            describe_peer(None, connection.node, connection.address)
            for connection in connections
            if connection.hello and connection.hello.role != "launcher"
        ]

    def describe_refused(self) -> dict[str, str]:
        """The newest, by admission or before, with reasons."""
        with self._lock:
            return _newest(self._transport_refusals.listed() | self._admission.refused)

    # -- decisions and actions ---------------------------------------------------------------------------

    def _put(self, event: AdmissionEvent) -> None:
        now, cause = time.monotonic(), None if isinstance(event, AdmissionTick) else event.connection
        try:
            with self._lock:
                self._queue.post([(cause, action) for action in self._admission.step(event, now)])
                due = self._admission.due(now)
        except Exception as fault:
            if cause is None or isinstance(event, ConnectionEnded):  # the end of a connection is its last event
                raise
            self._end_connection(cause, fault)
            return
        self._perform()
        self._timer.wake_by(due)

    def _end_connection(self, number: int, fault: Exception) -> None:
        connection = self._find(number)
        who = describe_peer(
            None,
            connection.node if connection and connection.hello else None,
            connection.address if connection else None,
        )
        reason = log_unhandled(who, fault)
        if connection is not None:
            connection.abort("the seed could not handle your message")
            self._put(ConnectionEnded(number, reason))

    def _perform(self) -> None:
        try:
            self._queue.drain()
        except BaseException as fault:
            self._status.failed(InternalError(f"the seed cannot go on: {fault!r}"))
            raise

    def _do(self, item: tuple[int | None, AdmissionAction]) -> None:
        cause, action = item
        try:
            self._act(action)
        except Exception as fault:
            if cause is None:
                raise
            self._end_connection(cause, fault)

    def _act(self, action: AdmissionAction) -> None:
        match action:
            case SeedEvent():
                self._seed_log.add(action)
                self._status.event_added(action)
                self._board.event_added(action)
            case CommitMembership():
                self._commit(action)
            case StartCluster():
                self._start(action)
            case NotifyConnections():
                self._tell(action)
            case PersistVote():
                self._or_give_up(lambda: self._keep_vote(action.vote))
            case FailFormation():
                self._fail(action)
            case SendChallenge() | AdmitNode() | ShowBoard() | RefuseConnection() | DropConnection():
                connection = self._find(action.connection)
                if connection is not None:
                    self._do_at(connection, action)
            case _:
                assert_never(action)

    def _do_at(
        self,
        connection: SeedConnection,
        action: SendChallenge | AdmitNode | ShowBoard | RefuseConnection | DropConnection,
    ) -> None:
        match action:
            case SendChallenge():
                connection.challenge()
            case AdmitNode():
                self._admit(connection, action)
            case ShowBoard():
                connection.show_board()
            case RefuseConnection():
                nobody_left = action.code == "nobody_left"
                connection.send(JoinRefusedMessage(action.reason, action.expelled, nobody_left, action.code))
                self._finish(connection)
            case DropConnection() if connection.admitted:
                self._finish(connection)
            case DropConnection():
                connection.abort(action.reason)

    def _admit(self, connection: SeedConnection, action: AdmitNode) -> None:
        authority = self._issuer.authority
        try:
            certificate = connection.admit()
        except UsageError as error:  # the authority has expired
            connection.send(JoinRefusedMessage(brief(str(error))))
            self._finish(connection)
            self._put(ConnectionEnded(connection.number, str(error)))
            return
        connection.send(
            Welcome(
                cluster=authority.cluster,
                certificate=certificate,
                authority=authority.certificate_pem,
                seen_address=action.seen_address,
                size=action.size,
                first_rank=action.first_rank,
                group_rank=action.group_rank,
                elastic=self._admission.elastic,
            )
        )

    def _commit(self, action: CommitMembership) -> None:
        if action.membership is not self._kept:
            if not self._or_give_up(lambda: self._keep(action.membership)):
                return
            self._kept = action.membership
        self._board.moved(action.membership, action.willing)
        body = encode_join(Committed(encode_membership(action.membership)))
        for connection in self._open_connections(action.connections):
            connection.send_body(body)
        if action.starts:
            self._status.moved(action.membership, action.present)

    def _start(self, action: StartCluster) -> None:
        # Waiting threads are notified before members can leave again.
        self._status.moved(action.membership, action.present)
        body = encode_join(Started())
        for connection in self._open_connections(action.connections):
            connection.send_body(body)

    def _tell(self, action: NotifyConnections) -> None:
        body = encode_join(action.message)
        for connection in self._open_connections(action.connections):
            connection.notify(body)

    def _or_give_up(self, keep: Callable[[], None]) -> bool:
        # No node may learn a decision that cannot be stored.
        try:
            keep()
        except UsageError as error:
            self._status.failed(error)
            self._finish_all(JoinRefusedMessage("the seed cannot store the membership; see the error at the seed"))
            return False
        return True

    def _fail(self, action: FailFormation) -> None:
        with self._lock:
            refused = _newest(self._transport_refusals.listed() | dict(action.refused))
            count = action.refused_count + self._transport_refusals.count
        joined, expected, timeout, reason = action.joined, action.expected, action.timeout, action.reason
        if self._kept is not None:
            self._or_give_up(self._discard)
            self._kept = None
        body = encode_join(FormationFailed(joined, expected, refused, timeout, count, reason))
        for connection in self._open_connections(action.connections):
            connection.send_body(body)
            self._finish(connection)
        self._status.failed(
            FormationTimeout(joined=joined, expected=expected, refused=refused, timeout=timeout, reason=reason)
        )

    # -- connections -------------------------------------------------------------------------------------

    def _find(self, number: int) -> SeedConnection | None:
        with self._changed:
            return self._connections.get(number)

    def _open_connections(self, connections: Iterable[int]) -> list[SeedConnection]:
        with self._changed:
            return [self._connections[number] for number in connections if number in self._connections]

    def _finish(self, connection: SeedConnection) -> None:
        due = time.monotonic() + LINGER
        with self._changed:
            displaced = self._linger(connection, due) if connection.number in self._connections else None
        connection.finish()
        if displaced is not None:
            displaced.abort(_TOO_SLOW)
        self._timer.wake_by(due)

    def _linger(self, connection: SeedConnection, due: float) -> SeedConnection | None:
        """The unauthenticated connection to abort if too many wait."""
        self._lingering[connection.number] = due
        if connection.admitted:
            return None
        self._unauthenticated[connection.number] = None
        if len(self._unauthenticated) <= self._max_lingering:
            return None
        return self._connections.get(self._unauthenticated.popitem(last=False)[0])

    def _forget(self, connection: SeedConnection) -> None:
        with self._changed:
            self._connections.pop(connection.number, None)
            self._lingering.pop(connection.number, None)
            self._unauthenticated.pop(connection.number, None)
            self._changed.notify_all()

    def _on_timer(self, now: float) -> float | None:
        self._measure(now)
        self._put(AdmissionTick())
        with self._changed:
            late = [self._connections[number] for number, due in self._lingering.items() if due <= now]
        for connection in late:
            connection.abort(_TOO_SLOW)
        with self._changed:
            lingering = next(iter(self._lingering.values()), None)
        return min((due for due in (lingering, self._measure_at) if due is not None), default=None)

    def _measure(self, now: float) -> None:
        # Until all members are connected. An early timer measures nothing.
        if self._meter is None or self._measure_at is None or now < self._measure_at:
            return
        self._meter.timer_ran(self._measure_at, now)
        with self._lock:
            self._measure_at = now + _MEASURE_INTERVAL if self._admission.forms else None

    def _finish_all(self, refusal: JoinRefusedMessage | None) -> None:
        with self._changed:
            connections = list(self._connections.values())
        for connection in connections:
            if refusal is not None:
                connection.send(refusal)
            self._finish(connection)

    def close(self, refusal: str | None = None) -> None:
        """Finish every connection, with a refusal if given; after LINGER, abort. Idempotent."""
        with self._changed:
            self._closed = True
        self._finish_all(None if refusal is None else JoinRefusedMessage(refusal))
        with self._changed:
            self._changed.wait_for(lambda: not self._connections, LINGER)
            left = list(self._connections.values())
        for connection in left:
            connection.abort("the seed is closed")
        self._timer.close()


def _newest(refused: dict[str, str]) -> dict[str, str]:
    return dict(list(refused.items())[-MAX_REFUSALS:])
