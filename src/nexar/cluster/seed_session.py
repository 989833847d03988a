"""Sessions with the seed: of a member, a launcher or an observer.

A lost seed is dialed again with growing pauses, sooner if there is a message for it. A seed that returns with its state
knows this node by its key.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import platform
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from typing import Any, Final, NamedTuple, Self

from nexar.cluster.control_loop import DialCancelled, Timer
from nexar.cluster.decisions.membership_events import Loss, LossKind
from nexar.cluster.join_client import (
    JoinClient,
    JoinConnection,
    RefusedBySeed,
    SeedConnectionLost,
    join_refused,
    take_certificate,
)
from nexar.cluster.membership import Member, MembershipError, decode_member
from nexar.cluster.node import Node
from nexar.cluster.peer_probe import nobody_listens
from nexar.cluster.seed_status import gather_pages
from nexar.cluster.wait_notice import Tell
from nexar.config import Config
from nexar.errors import JoinRefused, NexarError, SeedUnreachable
from nexar.security.authority import read_validity, renew_at
from nexar.security.certificates import make_request
from nexar.security.invitation import Invitation
from nexar.transport.registry import capabilities_of, log_unhandled
from nexar.types import NodeId, Rank
from nexar.wire import control
from nexar.wire.join import (
    MAX_JOIN_BYTES,
    MAX_PAXOS_BYTES,
    REPORTED_BY_LAUNCHER,
    ChildDied,
    Committed,
    FormationFailed,
    JoinMessage,
    LivenessQuery,
    LivenessReply,
    MemberDied,
    Renew,
    Renewed,
    ReserveRanks,
    RunFailed,
    SeedPaxosMessage,
    Started,
    StatusPageReply,
    StatusPageRequest,
    StatusUpdate,
    WaitingJoiners,
    Welcome,
)
from nexar.wire.status import StatusPage, StatusReport, encode_status_report
from nexar.wire.text import foreign_line

_log = logging.getLogger(__name__)

LONGEST_PAUSE: Final = 30.0  # seconds between attempts to reach a lost seed
_SOON_PAUSE: Final = 0.5  # seconds at most, if there is a message for it
_ANSWER_TIMEOUT: Final = 10.0
_LONGEST_WAIT: Final = 3600.0
STATUS_INTERVAL: Final = 1.0  # seconds between status reports
_CLEAR_BYTES: Final = 64 << 10  # no status report while more is queued


def _ignore(*_: Any) -> None:
    """Does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedCallbacks:
    """Called by the session thread; they must not block."""

    on_control: Callable[[control.Message], None] = _ignore  # a Paxos message of the seed
    on_died: Callable[[NodeId, int, Loss], None] = _ignore  # hint that a node died; with the epoch
    on_waiting: Callable[[tuple[Member, ...]], None] = _ignore  # all waiting joiners that can be dialed
    on_committed: Callable[[], None] = _ignore  # the cluster has formed; for launchers
    on_started: Callable[[], None] = _ignore  # all members of the first membership are connected
    on_failed: Callable[[FormationFailed], None] = _ignore  # the first membership did not start
    on_run_failed: Callable[[RunFailed], None] = _ignore
    """A rank failed and the run stops; for launchers. A later failure replaces it."""
    on_lost: Callable[[str], None] = _ignore  # connection lost, with the reason
    on_back: Callable[[int], None] = _ignore  # reconnected, with the epoch that the seed knows, which may be old
    on_refused: Callable[[JoinRefused], None] = _ignore  # final


class SeedLink(NamedTuple):
    """A member's access to its seed. Neither function blocks."""

    send: Callable[[control.Message], bool]  # False: not connected
    ping: Callable[[float, Callable[[bool], None]], None]  # calls the function: whether it answered in so many seconds


class _Ping(NamedTuple):
    timer: Timer
    done: Callable[[bool], None]


class SeedSession:
    """Keeps the connection and renews the certificate, in one thread. Close it before the node."""

    def __init__(
        self,
        node: Node,
        connection: JoinConnection,
        welcome: Welcome,
        connect: Callable[[], JoinConnection],
        *,
        random: Random | None = None,
    ) -> None:
        """`connect` attempts one connection."""
        self._node = node
        self._connection = connection  # written by the session thread, used by any
        self._connect = connect
        self._listeners = SeedCallbacks()  # written by `start` before the thread runs
        self._random = random or Random()
        self._spread = self._random.random()
        # This and the next: written by `start` before the thread runs, then by the thread.
        self._status_of_node: Callable[[], StatusReport | None] | None = None
        self._status_at = math.inf  # time of the next status report
        self._answer_by = 0.0  # deadline of a renewal; written by the thread
        self._cluster, self._authority = welcome.cluster, welcome.authority
        self._renew_at = self._next_renewal(*read_validity(welcome.certificate))
        self._asked = False  # a renewal is pending; written by the thread
        self._numbers = itertools.count(1)
        self._pings: dict[int, _Ping] = {}  # those that wait for a LivenessReply; dict methods are atomic
        self._stop = threading.Event()
        self._has_message = threading.Event()  # set when a message finds no connection, and by `close`
        self._thread = threading.Thread(target=self._run, name="nexar-seed-session", daemon=True)

    def start(self, listeners: SeedCallbacks, status_report: Callable[[], StatusReport | None] | None = None) -> None:
        """`status_report` returns a status report, if any; it must not block."""
        self._listeners = listeners
        if status_report is not None:
            self._status_of_node, self._status_at = status_report, time.monotonic()
        self._thread.start()

    @property
    def link(self) -> SeedLink:
        return SeedLink(self.send_control, self.ping)

    def close(self, reason: str = "") -> None:
        """Notify the seed; end the thread and the node's dials. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._has_message.set()
        self._node.cancel_token.cancel()
        self._connection.interrupt()
        self._end_pings()
        if self._thread.ident is not None:
            self._thread.join()
        self._connection.leave(reason)

    def send_control(self, message: control.Message) -> bool:
        """False if it is too long, there is no connection, or the seed does not read. Never blocks; any thread. Raises
        MessageError.
        """
        body = control.encode(message)
        return len(body) <= MAX_PAXOS_BYTES and self.send(SeedPaxosMessage(body))

    def send(self, message: JoinMessage) -> bool:
        """`send_control` for a join message."""
        connection = self._connection
        try:
            if self._stop.is_set() or connection.unread_bytes > MAX_JOIN_BYTES:
                return False
            connection.send(message)
        except SeedConnectionLost:
            self._has_message.set()
            return False
        return True

    def ping(self, timeout: float, done: Callable[[bool], None]) -> None:
        """Call `done` once: whether the seed answered in time. Any thread may call `done`, also this one; it must not
        block. Never blocks.
        """
        number, loop = next(self._numbers), self._node.control_loop
        timer = loop.call_at(loop.now() + timeout, lambda _: self._end_ping(number, answered=False))
        self._pings[number] = _Ping(timer, done)
        if not self.send(LivenessQuery(number)):
            self._end_ping(number, answered=False)

    def _end_ping(self, number: int, *, answered: bool) -> None:
        ping = self._pings.pop(number, None)
        if ping is not None:
            ping.timer.cancel()
            ping.done(answered)

    def _end_pings(self) -> None:
        for number in list(self._pings):
            self._end_ping(number, answered=False)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._listen()
            except (SeedConnectionLost, RefusedBySeed, NexarError) as lost:
                if self._stop.is_set() or self._is_expelled(lost) or not self._reconnect(lost):
                    return

    def _is_expelled(self, lost: Exception) -> bool:
        if not isinstance(lost, RefusedBySeed) or not lost.expelled:
            return False
        self._give_up(lost)
        self._listeners.on_refused(join_refused(lost, self._connection.address))
        return True

    def _listen(self) -> None:
        due = self._renew_at - datetime.now(UTC)
        wait = min(max(due.total_seconds(), 0.0), _LONGEST_WAIT)
        until = self._answer_by if self._asked else time.monotonic() + wait
        try:
            message = self._connection.receive(min(until, self._status_at))
        except TimeoutError:
            self._send_status()
            if self._asked and time.monotonic() >= self._answer_by:
                raise SeedConnectionLost("the seed does not answer") from None
            if not self._asked and datetime.now(UTC) >= self._renew_at:
                self._connection.send(Renew(request=make_request(self._node.id, self._node.key)))
                self._asked, self._answer_by = True, time.monotonic() + _ANSWER_TIMEOUT
            return
        try:
            self._handle(message)
        except (SeedConnectionLost, RefusedBySeed, NexarError):
            raise
        except Exception as fault:
            raise SeedConnectionLost(log_unhandled("the seed", fault)) from fault

    def _send_status(self) -> None:
        # A busy connection skips the report.
        now = time.monotonic()
        if self._status_of_node is None or now < self._status_at:
            return
        self._status_at = now + STATUS_INTERVAL
        try:
            report = self._status_of_node()
        except Exception:  # noqa: BLE001 - status reports must not end the session
            _log.exception("status report failed; this node sends the seed no further reports")
            self._status_of_node, self._status_at = None, math.inf
            return
        if report is not None and self._connection.unread_bytes <= _CLEAR_BYTES:
            self._connection.send(StatusUpdate(encode_status_report(report)))

    def _handle(self, message: JoinMessage) -> None:
        listeners = self._listeners
        match message:
            case Renewed():
                self._take(message.certificate)
            case LivenessQuery():
                self._connection.send(LivenessReply(message.number))
            case LivenessReply():
                self._end_ping(message.number, answered=True)
            case SeedPaxosMessage():
                self._handle_paxos(message.body)
            case MemberDied():
                listeners.on_died(message.node, message.epoch, _reported_loss(message))
            case Committed() | Started() | FormationFailed():
                self._handle_formation(message)
            case RunFailed():
                listeners.on_run_failed(message)
            case WaitingJoiners():
                listeners.on_waiting(self._members(message))

    def _handle_formation(self, message: Committed | Started | FormationFailed) -> None:
        match message:
            case Committed():
                self._listeners.on_committed()
            case Started():
                self._listeners.on_started()
            case FormationFailed():
                self._listeners.on_failed(message)

    def _handle_paxos(self, body: bytes) -> None:
        try:
            message = control.decode(body)
        except control.MessageError as error:
            raise SeedConnectionLost(f"invalid message from the seed: {error}") from error
        if not isinstance(message, control.Unknown):
            self._listeners.on_control(message)

    def _members(self, message: WaitingJoiners) -> tuple[Member, ...]:
        try:
            return tuple(decode_member(each) for each in message.members)
        except MembershipError as error:
            raise SeedConnectionLost(f"invalid message from the seed: {error}") from error

    def _take(self, certificate: bytes) -> None:
        self._renew_at = self._next_renewal(*take_certificate(self._node, self._cluster, certificate, self._authority))
        self._asked = False
        _log.info("certificate renewed; the next renewal is due %s", self._renew_at.isoformat(timespec="seconds"))

    def _next_renewal(self, not_before: datetime, not_after: datetime) -> datetime:
        return renew_at(not_before, not_after, datetime.now(UTC), self._spread)

    def _reconnect(self, lost: Exception) -> bool:
        """False if the node closes or is refused."""
        self._give_up(lost)
        bound = 1.0
        while self._pause(bound):
            bound = min(2 * bound, LONGEST_PAUSE)
            try:
                self._connection = self._connect()
            except JoinRefused as refused:
                self._listeners.on_refused(refused)
                return False
            except DialCancelled:
                return False
            except (OSError, NexarError) as error:
                _log.debug("no seed: %s", error)
            else:
                self._asked = False
                self._listeners.on_back(self._connection.epoch)
                return True
        return False

    def _give_up(self, lost: Exception) -> None:
        _log.info("%s; members continue without it", lost)
        self._connection.close("the connection is lost")
        self._end_pings()
        self._listeners.on_lost(str(lost))

    def _pause(self, bound: float) -> bool:
        # Random, so that nodes do not reconnect all at once.
        if self._has_message.wait(self._random.uniform(0.0, bound)):
            self._stop.wait(self._random.uniform(0.0, _SOON_PAUSE))
            self._has_message.clear()
        return not self._stop.is_set()


def _reported_loss(message: MemberDied) -> Loss:
    by_launcher = message.reported_by == REPORTED_BY_LAUNCHER
    return Loss(LossKind.LAUNCHER_REPORT if by_launcher else LossKind.SEED_CONNECTION_BROKEN, message.cause)


_MAX_HOST: Final = 255


def _node_without_links(config: Config) -> Node:
    """For a launcher or observer. No node dials it, so it leaves the configured port to the members."""
    network = tuple(scheme for scheme in config.transports if not capabilities_of(scheme).shares_memory)
    return Node(dataclasses.replace(config, port=0, port_range=None, transports=network))


class LauncherSession:
    """Reserves `count` ranks for the children of this process while open. In a formed elastic cluster they join without
    ranks. Close it when the children have ended. It reconnects to a lost seed and sends pending reports.

    The constructor raises JoinRefused, SeedUnreachable or VersionMismatch.
    """

    def __init__(
        self,
        invitation: Invitation,
        count: int,
        config: Config,
        first_rank: Rank | None = None,
        *,
        tell: Tell | None = None,
        on_run_failed: Callable[[RunFailed], None] | None = None,
    ) -> None:
        """`tell` shows waits for the seed. A thread calls `on_run_failed` with the failure, on any host, that stops the
        run; it must not block.
        """
        self._tell = tell
        self._invitation, self._count, self._config = invitation, count, config
        self._lock = threading.Lock()
        self._on_run_failed = on_run_failed or _ignore_run_failure
        self._reports: deque[ChildDied | RunFailed] = deque()  # not sent yet; guarded by the lock
        self._formed = threading.Event()  # set by the session thread
        self._session: SeedSession | None = None  # written once, here
        self.first_rank = first_rank  # of the block; None: the children join without ranks
        self._node = _node_without_links(config)
        try:
            self._reserve()
        except BaseException:
            self._node.close()
            raise

    def _reserve(self) -> None:
        client = JoinClient(self._node, self._invitation, timeout=self._config.formation_timeout, tell=self._tell)
        connection, welcome = client.enter("launcher", self._ask)
        self.first_rank = welcome.first_rank
        self.group_rank: int | None = welcome.group_rank  # index among the launchers; None if the children get no ranks
        self.elastic: bool = welcome.elastic  # the cluster continues without failed ranks
        self.size: int = welcome.size  # of the world
        listeners = SeedCallbacks(
            on_committed=self._formed.set,
            on_run_failed=self._on_run_failed,
            on_back=lambda _: self._send_reports(),
            on_refused=self._refused,
        )
        self._session = SeedSession(self._node, connection, welcome, self._connect)
        self._session.start(listeners)

    def _ask(self, proof: bytes) -> ReserveRanks:
        request = make_request(self._node.id, self._node.key)
        host, first_rank = self._node.host, self.first_rank  # the same block from a restarted seed
        epoch = 1 if self.formed else 0  # a seed of another cluster must not accept this launcher as its own
        return ReserveRanks(
            proof=proof, request=request, host=host, count=self._count, first_rank=first_rank, epoch=epoch
        )

    def _connect(self) -> JoinConnection:
        client = JoinClient(self._node, self._invitation, timeout=self._config.join_auth_timeout)
        return client.enter_again("launcher", self._ask)

    def _refused(self, refused: JoinRefused) -> None:
        # The children report their own refusals.
        _log.info("the seed refused this launcher: %s", refused.reason)

    @property
    def node(self) -> NodeId:
        return self._node.id

    @property
    def formed(self) -> bool:
        return self._formed.is_set()

    def report(self, rank: Rank, cause: str, *, well: bool = False) -> None:
        """Report the end of a child (`well`: it succeeded), now or when the seed is back. Never raises."""
        self._report(ChildDied(rank=rank, cause=cause, well=well))

    def report_failure(self, rank: Rank, cause: str, code: int, *, consequence: bool) -> None:
        """Like `report`; stops the run on all hosts."""
        host = foreign_line(platform.node())[:_MAX_HOST]
        self._report(RunFailed(rank=rank, cause=cause, code=code, consequence=consequence, host=host))

    def _report(self, message: ChildDied | RunFailed) -> None:
        with self._lock:
            self._reports.append(message)
        self._send_reports()

    def _send_reports(self) -> None:
        with self._lock:
            while self._reports and self._session is not None and self._session.send(self._reports[0]):
                self._reports.popleft()

    def close(self) -> None:
        """Idempotent."""
        if self._session is not None:
            self._session.close("its children have ended")
        self._node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _ignore_run_failure(_: RunFailed) -> None:
    """Does nothing."""


_RETRY_PAUSE: Final = 1.0


class ObserverSession:
    """Reads the seed's status board. One thread at a time. Close it.

    The constructor raises JoinRefused, SeedUnreachable or VersionMismatch within `timeout` seconds; with `hurry` at
    once if no process listens.
    """

    def __init__(self, invitation: Invitation, config: Config, *, timeout: float = 5.0, hurry: bool = False) -> None:
        self._invitation = invitation
        if hurry and nobody_listens(invitation.addresses, _RETRY_PAUSE):
            timeout = min(timeout, _RETRY_PAUSE)  # for QUIC, which is never refused: a seed may run without TCP
        self._timeout: Final = timeout
        self._node = _node_without_links(config)
        try:
            self._connection, _ = JoinClient(self._node, invitation, timeout=timeout).watch()
        except BaseException:
            self._node.close()
            raise

    def read_board(self) -> StatusPage:
        """Raises SeedUnreachable."""
        return gather_pages(self._page)

    def _page(self, first: int) -> StatusPage:
        try:
            self._connection.send(StatusPageRequest(first))
            answer = self._connection.expect(StatusPageReply, time.monotonic() + self._timeout)
        except RefusedBySeed as refused:
            raise join_refused(refused, self._connection.address) from refused
        except (SeedConnectionLost, TimeoutError) as lost:
            raise self._gone(lost) from lost
        return answer.board

    def _gone(self, cause: Exception) -> SeedUnreachable:
        return SeedUnreachable(
            addresses=self._invitation.addresses,
            attempts=1,
            cause=str(cause),
            remedy="the cluster has ended, or its members go on without the seed: start one again from its --state-dir",
        )

    def close(self) -> None:
        """Idempotent."""
        self._connection.leave("the observer closed")
        self._node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
