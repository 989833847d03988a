"""The seed's door: join lines come in, admission decides, and what it decided is done.

Law: events are put to admission one at a time, under the lock, and its actions are done one at a time, in that order,
after the lock was released, by whichever thread finds nobody doing it. So no thread waits for another one's I/O, and
nobody hears of a decision before the one that was made earlier.

Law: an event that raises, while it is decided on or while what follows from it is done, ends the connection that it
came from, and nothing else. Only what comes from no connection (time passing) may raise: that is a bug of ours alone.

A line that ends politely waits for the other side, for a second at most, so that the last word arrives; there are never
more of these than strangers may wait.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, assert_never

from nexar.cluster.control_threads import SerialQueue, TimerThread
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
from nexar.cluster.membership import Membership
from nexar.cluster.seed_connection import CertificateIssuer, SeedConnection
from nexar.cluster.seed_status import FormationStatus, SeedLog, StatusBoardService
from nexar.errors import FormationTimeout, InternalError, UsageError
from nexar.transport.base import Carrier
from nexar.transport.registry import log_unhandled
from nexar.types import describe_peer
from nexar.wire.join import MAX_REFUSALS, Committed, FormationFailed, JoinRefusedMessage, Started, Welcome, encode_join

LINGER: Final = 1.0
"""Seconds for the other side to take in the last word and close its half."""
_MEASURE_INTERVAL: Final = 1.0
"""Seconds between two measurements of the seed's own delay, while the cluster forms."""
_TOO_SLOW: Final = "it did not close its side of the line"


class SeedServer:
    """An `Acceptor` for every transport of the seed. Close it while they are still driven."""

    def __init__(
        self,
        admission: Admission,
        issuer: CertificateIssuer,
        status: FormationStatus,
        seed_log: SeedLog,
        board: StatusBoardService,
        *,
        keep: Callable[[Membership], None],
        keep_vote: Callable[[Vote], None],
        discard: Callable[[], None] = lambda: None,
        meter: DelayMeter | None = None,
        max_lingering: int = 256,
    ) -> None:
        """`keep` brings a membership to the disk, `keep_vote` a vote, before anybody hears of it; UsageError if it
        cannot. `discard` removes the first membership from the disk: the cluster did not start. `meter` is told how
        late the alarm rings while the cluster forms; admission asks it for the delay.
        """
        self._admission = admission  # under the lock
        self._issuer = issuer
        self._status = status
        self._seed_log = seed_log
        self._board = board
        self._keep = keep
        self._keep_vote = keep_vote
        self._discard = discard
        self._kept = admission.membership  # by whoever performs
        self._max_lingering = max_lingering
        self._lock = threading.Lock()
        self._queue = SerialQueue(self._do)  # actions with the connection that caused them; filled under the lock
        self._strangers = RefusalLog()  # turned away by the transports; under the lock
        self._numbers = itertools.count(1)
        self._few = threading.Condition()
        self._lines: dict[int, SeedConnection] = {}  # this and all below under `_few`
        self._lingering: OrderedDict[int, float] = OrderedDict()  # when their second is over
        self._strays: OrderedDict[int, None] = OrderedDict()  # those of them that were never admitted
        self._closed = False
        self._meter = meter
        self._measure_at: float | None = None  # the thread of the alarm writes, once that runs
        self._timer = TimerThread(self._on_timer)
        now = time.monotonic()
        if meter is not None and admission.forms:
            self._measure_at = now + _MEASURE_INTERVAL
            self._timer.wake_by(self._measure_at)
        self._timer.wake_by(admission.due(now))

    # -- Acceptor: the driving thread --------------------------------------------------------------------

    def carrier_accepted(self, carrier: Carrier) -> None:
        """See Acceptor."""
        address = carrier.peer.address
        if carrier.peer.verified:
            self.candidate_refused(address, "the seed takes join lines only, which show no certificate")
            carrier.abort("this is a seed: dial it without a certificate")
            return
        line = SeedConnection(
            next(self._numbers), carrier, self._issuer, board=self._board, report=self._put, ended=self._forget
        )
        with self._few:
            closed = self._closed
            self._lines[line.connection] = line
        if closed:
            line.abort("the seed is closing")
            return
        self._put(ConnectionOpened(line.connection, address))
        line.open()

    def candidate_refused(self, address: str, reason: str) -> None:
        """See Acceptor."""
        with self._lock:
            self._strangers.add(describe_peer(None, None, address), reason)
            self._queue.add([(None, SeedEvent("refused", address, reason=brief(reason)))])
        self._perform()

    # -- what is known -----------------------------------------------------------------------------------

    def describe_joined(self) -> list[str]:
        """The candidates that are in."""
        with self._few:
            lines = [line for line in self._lines.values() if line.admitted]
        return [
            describe_peer(None, line.node, line.address)
            for line in lines
            if line.hello and line.hello.role != "launcher"
        ]

    def describe_refused(self) -> dict[str, str]:
        """Who was turned away, by admission and before, and why: the newest."""
        with self._lock:
            return _newest(self._strangers.listed() | self._admission.refused)

    # -- deciding, and doing -----------------------------------------------------------------------------

    def _put(self, event: AdmissionEvent) -> None:
        """Put an event to admission, and see that what follows from it is done."""
        now, cause = time.monotonic(), None if isinstance(event, AdmissionTick) else event.connection
        try:
            with self._lock:
                self._queue.add([(cause, action) for action in self._admission.step(event, now)])
                due = self._admission.due(now)
        except Exception as fault:
            if cause is None or isinstance(
                event, ConnectionEnded
            ):  # the end of a connection is the last that is heard of it
                raise
            self._blame(cause, fault)
            return
        self._perform()
        self._timer.wake_by(due)

    def _blame(self, connection: int, fault: Exception) -> None:
        """End the connection whose event raised."""
        line = self._line(connection)
        who = describe_peer(None, line.node if line and line.hello else None, line.address if line else None)
        reason = log_unhandled(who, fault)
        if line is not None:
            line.abort("the seed could not handle your message")
            self._put(ConnectionEnded(connection, reason))

    def _perform(self) -> None:
        try:
            self._queue.run()
        except BaseException as fault:
            self._status.failed(InternalError(f"the seed cannot go on: {fault!r}"))
            raise

    def _do(self, errand: tuple[int | None, AdmissionAction]) -> None:
        cause, action = errand
        try:
            self._act(action)
        except Exception as fault:
            if cause is None:
                raise
            self._blame(cause, fault)

    def _act(self, action: AdmissionAction) -> None:
        match action:
            case SeedEvent():
                self._seed_log.add(action)
                self._status.noted(action)
                self._board.noted(action)
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
                line = self._line(action.connection)
                if line is not None:
                    self._do_at(line, action)
            case _:
                assert_never(action)

    def _do_at(
        self, line: SeedConnection, action: SendChallenge | AdmitNode | ShowBoard | RefuseConnection | DropConnection
    ) -> None:
        match action:
            case SendChallenge():
                line.challenge()
            case AdmitNode():
                self._admit(line, action)
            case ShowBoard():
                line.show()
            case RefuseConnection():
                line.send(JoinRefusedMessage(action.reason, action.expelled, action.nobody_left))
                self._part(line)
            case DropConnection() if line.admitted:
                self._part(line)
            case DropConnection():
                line.abort(action.reason)

    def _admit(self, line: SeedConnection, action: AdmitNode) -> None:
        authority = self._issuer.authority
        try:
            certificate = line.admit()
        except UsageError as error:  # the authority has expired
            line.send(JoinRefusedMessage(brief(str(error))))
            self._part(line)
            self._put(ConnectionEnded(line.connection, str(error)))
            return
        line.send(
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
        body = encode_join(Committed(action.membership.encode()))
        for line in self._open_lines(action.connections):
            line.send_body(body)
        if action.starts:
            self._status.moved(action.membership, action.present)

    def _start(self, action: StartCluster) -> None:
        """Whoever waits for the formation hears of it before the members can leave again."""
        self._status.moved(action.membership, action.present)
        body = encode_join(Started())
        for line in self._open_lines(action.connections):
            line.send_body(body)

    def _tell(self, action: NotifyConnections) -> None:
        body = encode_join(action.message)
        for line in self._open_lines(action.connections):
            line.tell(body)

    def _or_give_up(self, keep: Callable[[], None]) -> bool:
        """What was decided and cannot be kept, nobody may hear of: everybody is sent away, and what was still to be
        said is not.
        """
        try:
            keep()
        except UsageError as error:
            self._status.failed(error)
            self._part_from_all(JoinRefusedMessage("the seed cannot keep the membership; look at the seed"))
            return False
        return True

    def _fail(self, action: FailFormation) -> None:
        with self._lock:
            refused = _newest(self._strangers.listed() | dict(action.refused))
            count = action.refused_count + self._strangers.count
        joined, expected, timeout, reason = action.joined, action.expected, action.timeout, action.reason
        if self._kept is not None:
            self._or_give_up(self._discard)
            self._kept = None
        body = encode_join(FormationFailed(joined, expected, refused, timeout, count, reason))
        for line in self._open_lines(action.connections):
            line.send_body(body)
            self._part(line)
        self._status.failed(
            FormationTimeout(joined=joined, expected=expected, refused=refused, timeout=timeout, reason=reason)
        )

    # -- lines -------------------------------------------------------------------------------------------

    def _line(self, connection: int) -> SeedConnection | None:
        with self._few:
            return self._lines.get(connection)

    def _open_lines(self, connections: Iterable[int]) -> list[SeedConnection]:
        with self._few:
            return [self._lines[number] for number in connections if number in self._lines]

    def _part(self, line: SeedConnection) -> None:
        due = time.monotonic() + LINGER
        with self._few:
            displaced = self._linger(line, due) if line.connection in self._lines else None
        line.part()
        if displaced is not None:
            displaced.abort(_TOO_SLOW)
        self._timer.wake_by(due)

    def _linger(self, line: SeedConnection, due: float) -> SeedConnection | None:
        """Let it wait for its other side; the stranger that must wait no longer, if there are too many."""
        self._lingering[line.connection] = due
        if line.admitted:
            return None
        self._strays[line.connection] = None
        if len(self._strays) <= self._max_lingering:
            return None
        return self._lines.get(self._strays.popitem(last=False)[0])

    def _forget(self, line: SeedConnection) -> None:
        with self._few:
            self._lines.pop(line.connection, None)
            self._lingering.pop(line.connection, None)
            self._strays.pop(line.connection, None)
            self._few.notify_all()

    def _on_timer(self, now: float) -> float | None:
        """The alarm: whoever takes too long goes."""
        self._measure(now)
        self._put(AdmissionTick())
        with self._few:
            late = [self._lines[number] for number, due in self._lingering.items() if due <= now]
        for line in late:
            line.abort(_TOO_SLOW)
        with self._few:
            lingering = next(iter(self._lingering.values()), None)
        return min((due for due in (lingering, self._measure_at) if due is not None), default=None)

    def _measure(self, now: float) -> None:
        """How late the alarm rings, until every member is connected. An earlier ring measures nothing."""
        if self._meter is None or self._measure_at is None or now < self._measure_at:
            return
        self._meter.timer_ran(self._measure_at, now)
        with self._lock:
            self._measure_at = now + _MEASURE_INTERVAL if self._admission.forms else None

    def _part_from_all(self, farewell: JoinRefusedMessage | None) -> None:
        with self._few:
            lines = list(self._lines.values())
        for line in lines:
            if farewell is not None:
                line.send(farewell)
            self._part(line)

    def close(self, farewell: str | None = None) -> None:
        """End every line, with a word or without one, politely for as long as LINGER; then now. Whoever comes
        meanwhile is sent away. Idempotent."""
        with self._few:
            self._closed = True
        self._part_from_all(None if farewell is None else JoinRefusedMessage(farewell))
        with self._few:
            self._few.wait_for(lambda: not self._lines, LINGER)
            left = list(self._lines.values())
        for line in left:
            line.abort("the seed is closed")
        self._timer.close()


def _newest(refused: dict[str, str]) -> dict[str, str]:
    return dict(list(refused.items())[-MAX_REFUSALS:])
