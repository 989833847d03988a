"""A node's standing with the seed, once it is in: the line is kept open, the certificate renewed in time, and what the
seed says about the cluster passed on to who listens.

None of it is needed for what members do among themselves. A seed that is gone is knocked at again, ever more rarely,
and soon when somebody has a word for it; one that came back with its state knows this node by its key.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from typing import Any, Final

from nexar.cluster.join_line import JoinLine, LineLost, RefusedBySeed
from nexar.cluster.membership import Member, MembershipError, decode_member
from nexar.cluster.node import Node
from nexar.cluster.recall import Recalled
from nexar.cluster.worker import take_certificate
from nexar.errors import JoinRefused, NexarError
from nexar.security.renewal import read_validity, renew_at
from nexar.security.request import make_request
from nexar.transport.unhandled import unhandled
from nexar.types import NodeId
from nexar.wire import messages
from nexar.wire.bulletin import Bulletin, encode_bulletin
from nexar.wire.joining import (
    MAX_JOIN_BYTES,
    MAX_WORD_BYTES,
    AreYouThere,
    Committed,
    Died,
    FormationFailed,
    Here,
    JoinMessage,
    News,
    Renew,
    Renewed,
    RunFailed,
    Started,
    Waiting,
    Welcome,
    Word,
)

_log = logging.getLogger(__name__)

LONGEST_PAUSE: Final = 30.0
"""Seconds between two knocks at a seed that is gone."""
_SOON: Final = 0.5
"""Seconds at most, when somebody has a word for it."""
_PATIENCE: Final = 10.0
_LONGEST_WAIT: Final = 3600.0
NEWS_INTERVAL: Final = 1.0
"""Seconds between two bulletins."""
_CLEAR_BYTES: Final = 64 << 10  # a line that still has more to carry is not given news on top


def _ignore(*_: Any) -> None:
    """Nobody listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Who is told what the seed says. Called by the thread of the standing, one after the other; none may block."""

    on_word: Callable[[messages.Message], None] = _ignore
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


class Standing:
    """One thread, which waits for the seed's word after `start`. Close it before the node."""

    def __init__(
        self,
        node: Node,
        line: JoinLine,
        welcome: Welcome,
        knock: Callable[[], JoinLine],
        *,
        random: Random | None = None,
        news: Callable[[], Bulletin | None] | None = None,
    ) -> None:
        """`knock` makes one attempt at a new line, and raises if it comes to nothing. `news`: what this node does, to
        be told every second by the thread; None: nothing, this time. It must not wait.
        """
        self._node = node
        self._line = line  # written by the thread; any thread says its words on the one it finds
        self._knock = knock
        self._listeners = Listeners()  # written by `start`, before the thread that calls them
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

    def start(self, listeners: Listeners) -> None:
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
        self._node.recall.make()
        self._line.interrupt()
        self._end_inquiries()
        if self._thread.ident is not None:
            self._thread.join()
        self._line.leave(reason)

    def say(self, message: messages.Message) -> bool:
        """A word to the seed. Never blocks; False: there is no line, the seed does not read, or it is too long. Any
        thread. MessageError for what no message may be.
        """
        body = messages.encode(message)
        return len(body) <= MAX_WORD_BYTES and self.send(Word(body))

    def send(self, message: JoinMessage) -> bool:
        """As `say`, of any message that whoever is in may send."""
        line = self._line
        try:
            if self._stop.is_set() or line.unread_bytes > MAX_JOIN_BYTES:
                return False
            line.send(message)
        except LineLost:
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
            return self.send(AreYouThere(number)) and answer.get(timeout=timeout)
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
            except (LineLost, RefusedBySeed, NexarError) as lost:
                if self._stop.is_set() or self._is_expelled(lost) or not self._knock_again(lost):
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
                raise LineLost("the seed does not answer") from None
            if not self._asked and datetime.now(UTC) >= self._renew_at:
                self._line.send(Renew(request=make_request(self._node.id, self._node.key)))
                self._asked, self._answer_by = True, time.monotonic() + _PATIENCE
            return
        try:
            self._heard(message)
        except (LineLost, RefusedBySeed, NexarError):
            raise
        except Exception as fault:
            raise LineLost(unhandled("the seed", fault)) from fault

    def _tell_news(self) -> None:
        """If it is time. What a busy line does not take is not told: the next bulletin says more."""
        now = time.monotonic()
        if self._news is None or now < self._news_at:
            return
        self._news_at = now + NEWS_INTERVAL
        try:
            bulletin = self._news()
        except Exception:  # noqa: BLE001 - what is only for watching must not cost the node its standing
            _log.exception("this node tells the seed nothing of itself any more")
            self._news, self._news_at = None, math.inf
            return
        if bulletin is not None and self._line.unread_bytes <= _CLEAR_BYTES:
            self._line.send(News(encode_bulletin(bulletin)))

    def _heard(self, message: JoinMessage) -> None:
        listeners = self._listeners
        match message:
            case Renewed():
                self._take(message.certificate)
            case AreYouThere():
                self._line.send(Here(message.number))
            case Here():
                inquiry = self._inquiries.get(message.number)
                if inquiry is not None:
                    inquiry.put(True)
            case Word():
                self._pass_on(message.body)
            case Died():
                listeners.on_died(message.node, message.epoch, message.cause)
            case Committed() | Started() | FormationFailed():
                self._heard_of_formation(message)
            case RunFailed():
                listeners.on_run_failed(message)
            case Waiting():
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
            word = messages.decode(body)
        except messages.MessageError as error:
            raise LineLost(f"the seed is not understood: {error}") from error
        if not isinstance(word, messages.Unknown):
            self._listeners.on_word(word)

    def _members(self, message: Waiting) -> tuple[Member, ...]:
        try:
            return tuple(decode_member(each) for each in message.members)
        except MembershipError as error:
            raise LineLost(f"the seed is not understood: {error}") from error

    def _take(self, certificate: bytes) -> None:
        self._renew_at = self._next_renewal(*take_certificate(self._node, self._cluster, certificate, self._authority))
        self._asked = False
        _log.info("certificate renewed; the next renewal is due %s", self._renew_at.isoformat(timespec="seconds"))

    def _next_renewal(self, not_before: datetime, not_after: datetime) -> datetime:
        return renew_at(not_before, not_after, datetime.now(UTC), self._spread)

    def _knock_again(self, lost: Exception) -> bool:
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
            except Recalled:
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
