"""A node's standing with the seed, once it is in: the line is kept open, the certificate renewed in time, and what the
seed says about the cluster passed on to who listens.

None of it is needed for what members do among themselves. A seed that is gone is knocked at again, ever more rarely,
and soon when somebody has a word for it; one that came back with its state knows this node by its key.

A launcher as the cluster knows it: authenticated, without a rank, there to reserve places and to report deaths.

Somebody who looks at a cluster from outside: it has the secret, and neither a rank nor a say.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import platform
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from typing import Any, Final, Self

from nexar.cluster.control_threads import DialCancelled
from nexar.cluster.join_client import JoinClient, JoinConnection, RefusedBySeed, SeedConnectionLost, take_certificate
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
from nexar.transport.registry import log_unhandled
from nexar.types import NodeId, Rank
from nexar.wire import control
from nexar.wire.join import (
    MAX_JOIN_BYTES,
    MAX_PAXOS_BYTES,
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

LONGEST_PAUSE: Final = 30.0
"""Seconds between two knocks at a seed that is gone."""
_SOON: Final = 0.5
"""Seconds at most, when somebody has a word for it."""
_ANSWER_TIMEOUT: Final = 10.0
_LONGEST_WAIT: Final = 3600.0
STATUS_INTERVAL: Final = 1.0
"""Seconds between two bulletins."""
_CLEAR_BYTES: Final = 64 << 10  # a line that still has more to carry is not given news on top


def _ignore(*_: Any) -> None:
    """Nobody listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedCallbacks:
    """Who is told what the seed says. Called by the thread of the standing, one after the other; none may block."""

    on_word: Callable[[control.Message], None] = _ignore
    """A word of the seed about who comes next; its sender is the seed."""
    on_died: Callable[[NodeId, int, str], None] = _ignore
    """A hint: this node may be gone, in the membership of this epoch, and why."""
    on_waiting: Callable[[tuple[Member, ...]], None] = _ignore
    """All who would like to become members now, and can be dialed."""
    on_committed: Callable[[], None] = _ignore
    """The cluster has formed: told to a launcher."""
    on_started: Callable[[], None] = _ignore
    """Every member of the first membership is connected."""
    on_failed: Callable[[FormationFailed], None] = _ignore
    """The first membership did not start."""
    on_run_failed: Callable[[RunFailed], None] = _ignore
    """A rank failed, and the run stops on all hosts: told to a launcher. A later failure replaces an earlier one."""
    on_lost: Callable[[str], None] = _ignore
    """The line to the seed is gone, and why."""
    on_back: Callable[[int], None] = _ignore
    """There is a line again, and the epoch of the membership that the seed knows: it may be behind."""
    on_refused: Callable[[str, int], None] = _ignore
    """The seed wants nothing more to do with this node, why, and the epoch since which it is no member, if it was
    expelled. Nothing more comes."""


class SeedSession:
    """One thread, which waits for the seed's word after `start`. Close it before the node."""

    def __init__(
        self,
        node: Node,
        line: JoinConnection,
        welcome: Welcome,
        knock: Callable[[], JoinConnection],
        *,
        random: Random | None = None,
        news: Callable[[], StatusReport | None] | None = None,
    ) -> None:
        """`knock` makes one attempt at a new line, and raises if it comes to nothing. `news`: what this node does, to
        be told every second by the thread; None: nothing, this time. It must not wait.
        """
        self._node = node
        self._line = line  # written by the thread; any thread says its words on the one it finds
        self._knock = knock
        self._listeners = SeedCallbacks()  # written by `start`, before the thread that calls them
        self._random = random or Random()
        self._spread = self._random.random()
        self._news = news
        self._news_at = math.inf if news is None else time.monotonic()  # of the next bulletin; the thread writes
        self._answer_by = 0.0  # when the answer to a renewal is overdue; likewise
        self._cluster, self._authority = welcome.cluster, welcome.authority
        self._renew_at = self._next_renewal(*read_validity(welcome.certificate))
        self._asked = False  # for a renewal, and not answered yet; the thread writes
        self._numbers = itertools.count(1)
        self._inquiries: dict[int, queue.SimpleQueue[bool]] = {}  # who waits for a Here; dict methods are atomic
        self._stop = threading.Event()
        self._wanted = threading.Event()  # set by who had a word and found no line, and at the end
        self._thread = threading.Thread(target=self._run, name="nexar-standing", daemon=True)

    def start(self, listeners: SeedCallbacks) -> None:
        """Listen to the seed from now on, and tell `listeners`. Once."""
        self._listeners = listeners
        self._thread.start()

    def close(self, reason: str = "") -> None:
        """Leave: tell the seed, and end the thread, also one that knocks; the node dials nobody from now on.
        Idempotent.
        """
        if self._stop.is_set():
            return
        self._stop.set()
        self._wanted.set()
        self._node.cancel_token.make()
        self._line.interrupt()
        self._end_inquiries()
        if self._thread.ident is not None:
            self._thread.join()
        self._line.leave(reason)

    def say(self, message: control.Message) -> bool:
        """A word to the seed. Never blocks; False: there is no line, the seed does not read, or it is too long. Any
        thread. MessageError for what no message may be.
        """
        body = control.encode(message)
        return len(body) <= MAX_PAXOS_BYTES and self.send(SeedPaxosMessage(body))

    def send(self, message: JoinMessage) -> bool:
        """As `say`, of any message that whoever is in may send."""
        line = self._line
        try:
            if self._stop.is_set() or line.unread_bytes > MAX_JOIN_BYTES:
                return False
            line.send(message)
        except SeedConnectionLost:
            self._wanted.set()
            return False
        return True

    def answers(self, timeout: float) -> bool:
        """Whether the seed answers in time. False at once when there is no line, and when it is lost meanwhile. Any
        thread, but not one that listens.
        """
        number = next(self._numbers)
        answer = self._inquiries[number] = queue.SimpleQueue()
        try:
            return self.send(LivenessQuery(number)) and answer.get(timeout=timeout)
        except queue.Empty:
            return False
        finally:
            self._inquiries.pop(number, None)

    def _end_inquiries(self) -> None:
        """Who asks from now on finds that there is no line."""
        for answer in list(self._inquiries.values()):
            answer.put(False)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._listen()
            except (SeedConnectionLost, RefusedBySeed, NexarError) as lost:
                if self._stop.is_set() or self._is_expelled(lost) or not self._reconnect(lost):
                    return

    def _is_expelled(self, lost: Exception) -> bool:
        """Whether the seed has said so: then there is no way back."""
        if not isinstance(lost, RefusedBySeed) or not lost.expelled:
            return False
        self._give_up(lost)
        self._listeners.on_refused(lost.reason, lost.expelled)
        return True

    def _listen(self) -> None:
        """Until the next word of the seed, or the next renewal."""
        due = self._renew_at - datetime.now(UTC)
        wait = min(max(due.total_seconds(), 0.0), _LONGEST_WAIT)
        until = self._answer_by if self._asked else time.monotonic() + wait
        try:
            message = self._line.receive(min(until, self._news_at))
        except TimeoutError:
            self._tell_news()
            if self._asked and time.monotonic() >= self._answer_by:
                raise SeedConnectionLost("the seed does not answer") from None
            if not self._asked and datetime.now(UTC) >= self._renew_at:
                self._line.send(Renew(request=make_request(self._node.id, self._node.key)))
                self._asked, self._answer_by = True, time.monotonic() + _ANSWER_TIMEOUT
            return
        try:
            self._heard(message)
        except (SeedConnectionLost, RefusedBySeed, NexarError):
            raise
        except Exception as fault:
            raise SeedConnectionLost(log_unhandled("the seed", fault)) from fault

    def _tell_news(self) -> None:
        """If it is time. What a busy line does not take is not told: the next bulletin says more."""
        now = time.monotonic()
        if self._news is None or now < self._news_at:
            return
        self._news_at = now + STATUS_INTERVAL
        try:
            bulletin = self._news()
        except Exception:  # noqa: BLE001 - what is only for watching must not cost the node its standing
            _log.exception("this node tells the seed nothing of itself any more")
            self._news, self._news_at = None, math.inf
            return
        if bulletin is not None and self._line.unread_bytes <= _CLEAR_BYTES:
            self._line.send(StatusUpdate(encode_status_report(bulletin)))

    def _heard(self, message: JoinMessage) -> None:
        listeners = self._listeners
        match message:
            case Renewed():
                self._take(message.certificate)
            case LivenessQuery():
                self._line.send(LivenessReply(message.number))
            case LivenessReply():
                inquiry = self._inquiries.get(message.number)
                if inquiry is not None:
                    inquiry.put(True)
            case SeedPaxosMessage():
                self._pass_on(message.body)
            case MemberDied():
                listeners.on_died(message.node, message.epoch, message.cause)
            case Committed() | Started() | FormationFailed():
                self._heard_of_formation(message)
            case RunFailed():
                listeners.on_run_failed(message)
            case WaitingJoiners():
                listeners.on_waiting(self._members(message))

    def _heard_of_formation(self, message: Committed | Started | FormationFailed) -> None:
        match message:
            case Committed():
                self._listeners.on_committed()
            case Started():
                self._listeners.on_started()
            case FormationFailed():
                self._listeners.on_failed(message)

    def _pass_on(self, body: bytes) -> None:
        try:
            message = control.decode(body)
        except control.MessageError as error:
            raise SeedConnectionLost(f"the seed is not understood: {error}") from error
        if not isinstance(message, control.Unknown):
            self._listeners.on_word(message)

    def _members(self, message: WaitingJoiners) -> tuple[Member, ...]:
        try:
            return tuple(decode_member(each) for each in message.members)
        except MembershipError as error:
            raise SeedConnectionLost(f"the seed is not understood: {error}") from error

    def _take(self, certificate: bytes) -> None:
        self._renew_at = self._next_renewal(*take_certificate(self._node, self._cluster, certificate, self._authority))
        self._asked = False
        _log.info("certificate renewed; the next renewal is due %s", self._renew_at.isoformat(timespec="seconds"))

    def _next_renewal(self, not_before: datetime, not_after: datetime) -> datetime:
        return renew_at(not_before, not_after, datetime.now(UTC), self._spread)

    def _reconnect(self, lost: Exception) -> bool:
        """Until there is a line again. False: the node is closing, or the seed wants nothing to do with us."""
        self._give_up(lost)
        bound = 1.0
        while self._pause(bound):
            bound = min(2 * bound, LONGEST_PAUSE)
            try:
                self._line = self._knock()
            except JoinRefused as refused:
                self._listeners.on_refused(refused.reason, refused.expelled)
                return False
            except DialCancelled:
                return False
            except (OSError, NexarError) as error:
                _log.debug("no seed: %s", error)
            else:
                self._asked = False
                self._listeners.on_back(self._line.epoch)
                return True
        return False

    def _give_up(self, lost: Exception) -> None:
        """There is no line any more, at least for now."""
        _log.info("%s; members go on without it", lost)
        self._line.close("the line is dead")
        self._end_inquiries()
        self._listeners.on_lost(str(lost))

    def _pause(self, bound: float) -> bool:
        """A while, of random length, so that not all knock at once. False: the node is closing."""
        if self._wanted.wait(self._random.uniform(0.0, bound)):
            self._stop.wait(self._random.uniform(0.0, _SOON))
            self._wanted.clear()
        return not self._stop.is_set()


_MAX_HOST: Final = 255


class LauncherSession:
    """A block of `count` ranks, reserved at the seed for the children of this process, as long as it is open. Where the
    cluster has formed and is elastic the children get no ranks here: they join.

    JoinRefused, SeedUnreachable, VersionMismatch when it is made. Close it, or leave its `with` block, when the
    children have ended. A seed that goes away is knocked at again, and hears then what could not be reported.
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
        """`tell` shows the user what it waits for while no seed answers. `on_run_failed` is told by a thread which
        failure, on any host, stops the run. It must not block.
        """
        self._tell = tell
        self._invitation, self._count, self._config = invitation, count, config
        self._lock = threading.Lock()
        self._on_run_failed = on_run_failed or _ignore_run_failure
        self._reports: deque[ChildDied | RunFailed] = deque()  # that the seed has not heard; under the lock
        self._formed = threading.Event()  # set by the thread of the standing
        self._session: SeedSession | None = None  # written once, here
        self.first_rank = first_rank
        """Of the block; None: the children are to join without ranks."""
        # Nobody dials a launcher, so the port of the settings is left to the members.
        network = tuple(scheme for scheme in config.transports if scheme != "shm")
        self._node = Node(dataclasses.replace(config, port=0, port_range=None, transports=network))
        try:
            self._reserve()
        except BaseException:
            self._node.close()
            raise

    def _reserve(self) -> None:
        worker = JoinClient(self._node, self._invitation, timeout=self._config.formation_timeout, tell=self._tell)
        line, welcome = worker.enter("launcher", self._ask)
        self.first_rank = welcome.first_rank
        self.group_rank: int | None = welcome.group_rank
        """The place of this launcher among the launchers; None where the children get no ranks."""
        self.elastic: bool = welcome.elastic
        """Whether the cluster goes on without ranks that fail."""
        self.size: int = welcome.size
        """Of the whole world."""
        listeners = SeedCallbacks(
            on_committed=self._formed.set,
            on_run_failed=self._on_run_failed,
            on_back=lambda _: self._send_reports(),
            on_refused=self._refused,
        )
        self._session = SeedSession(self._node, line, welcome, self._knock)
        self._session.start(listeners)

    def _ask(self, proof: bytes) -> ReserveRanks:
        request = make_request(self._node.id, self._node.key)
        host, first_rank = self._node.host, self.first_rank  # the same block, from a seed that began anew
        epoch = 1 if self.formed else 0  # a seed of another cluster must not take us for one of its own
        return ReserveRanks(
            proof=proof, request=request, host=host, count=self._count, first_rank=first_rank, epoch=epoch
        )

    def _knock(self) -> JoinConnection:
        worker = JoinClient(self._node, self._invitation, timeout=self._config.join_auth_timeout)
        return worker.enter_again("launcher", self._ask)

    def _refused(self, reason: str, _: int) -> None:
        """The children know better why, if they are concerned."""
        _log.info("the seed refused this launcher: %s", reason)

    @property
    def node(self) -> NodeId:
        """What children name as their launcher."""
        return self._node.id

    @property
    def formed(self) -> bool:
        """Whether everybody was there, once."""
        return self._formed.is_set()

    def report(self, rank: Rank, cause: str, *, well: bool = False) -> None:
        """A child has ended, `well` if as it should: tell the seed. If that is gone, then when it is back; meanwhile
        the members find out by themselves.
        """
        self._report(ChildDied(rank=rank, cause=cause, well=well))

    def report_failure(self, rank: Rank, cause: str, code: int, *, consequence: bool) -> None:
        """A child has failed, and the run is to stop on all hosts, with this exit code. As `report`."""
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
    """Nobody wants to know."""


_RETRY_PAUSE: Final = 1.0


class ObserverSession:
    """A line to the seed on which its board is shown. One thread at a time. Close it, or leave its `with` block.

    JoinRefused, SeedUnreachable, VersionMismatch when it is made, within `timeout` seconds; `hurry`: at once where
    nobody listens, since the seed was there before its ticket was.
    """

    def __init__(self, invitation: Invitation, config: Config, *, timeout: float = 5.0, hurry: bool = False) -> None:
        self._invitation = invitation
        if hurry and nobody_listens(invitation.addresses, _RETRY_PAUSE):
            timeout = min(timeout, _RETRY_PAUSE)  # for QUIC, which nobody refuses: a seed may do without TCP
        self._timeout: Final = timeout
        # Nobody dials an onlooker, so the port of the settings is left to the members.
        network = tuple(scheme for scheme in config.transports if scheme != "shm")
        self._node = Node(dataclasses.replace(config, port=0, port_range=None, transports=network))
        try:
            self._line, _ = JoinClient(self._node, invitation, timeout=timeout).watch()
        except BaseException:
            self._node.close()
            raise

    def look(self) -> StatusPage:
        """What the board shows now. SeedUnreachable when the seed is gone, or does not answer in time."""
        return gather_pages(self._page)

    def _page(self, first: int) -> StatusPage:
        try:
            self._line.send(StatusPageRequest(first))
            answer = self._line.expect(StatusPageReply, time.monotonic() + self._timeout)
        except RefusedBySeed as refused:
            raise JoinRefused(reason=refused.reason, address=self._line.address) from refused
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
        self._line.leave("it has seen enough")
        self._node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
