"""The seed's event log, the state of the formation, and the status board.

forming ──→ formed ──→ empty        each step happens once
   └──→ failed
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from nexar.clock import Clock, SystemClock
from nexar.cluster.decisions.admission_events import SeedEvent, SeedEventKind
from nexar.cluster.decisions.refusals import brief
from nexar.cluster.decisions.status_board import StatusBoard
from nexar.cluster.membership import Membership
from nexar.errors import NexarError
from nexar.types import NodeId, describe_peer
from nexar.wire.status import StatusPage, StatusReport, StatusRow

MAX_EVENTS: Final = 1024  # the newest are kept: unauthenticated peers can cause any number

_log: Final = logging.getLogger("nexar.seed")
_LEVELS: Final[dict[SeedEventKind, int]] = {
    "knocked": logging.DEBUG,
    "failed": logging.ERROR,
}
_LONGEST_LINE: Final = 500
_MOST_WARNINGS: Final = 64
"""Warnings about refusals at once, plus one per second: unauthenticated peers can cause any number."""


class SeedLog:
    """Keeps, logs and reports events from one thread at a time."""

    def __init__(
        self, on_seed_event: Callable[[SeedEvent], None] | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`on_seed_event` must not block. Its exceptions are logged."""
        self._on_seed_event = on_seed_event
        self._clock = clock
        self._warnings = float(_MOST_WARNINGS)  # warnings left; this and the next are written by the thread that adds
        self._warned = clock()
        self._lock = threading.Lock()
        self._events: deque[SeedEvent] = deque(maxlen=MAX_EVENTS)  # guarded by the lock

    @property
    def events(self) -> list[SeedEvent]:
        """Oldest first. Any thread."""
        with self._lock:
            return list(self._events)

    def add(self, event: SeedEvent) -> None:
        with self._lock:
            self._events.append(event)
        _log.log(self._level(event), "%s", describe_seed_event(event))
        if self._on_seed_event is None:
            return
        try:
            self._on_seed_event(event)
        except Exception:  # noqa: BLE001 - a user callback must not end the seed
            _log.exception("on_event raised")

    def _level(self, event: SeedEvent) -> int:
        # Unauthenticated peers cause no warnings.
        if event.kind != "refused":
            return _LEVELS.get(event.kind, logging.INFO)
        return logging.WARNING if event.node is not None and self._may_warn() else logging.INFO

    def _may_warn(self) -> bool:
        now = self._clock()
        left = min(self._warnings + now - self._warned, _MOST_WARNINGS)
        self._warned, self._warnings = now, left - 1 if left >= 1 else left
        return left >= 1


def describe_seed_event(event: SeedEvent) -> str:
    """One line for users."""
    is_named = event.address is not None or event.node is not None
    parts = [event.kind, describe_peer(event.rank, event.node, event.address) if is_named else "", event.reason]
    return brief(": ".join(part for part in parts if part), _LONGEST_LINE)


_ENDS: Final[frozenset[SeedEventKind]] = frozenset({"gone", "left", "refused", "dropped"})
LONGEST_WAIT: Final = 0.5
"""Longest sleep in seconds. A signal may be delivered to another thread (as after SIGSTOP and SIGCONT); the main
thread, which alone runs handlers, does not wake then.
"""


class FormationStatus:
    """The formation and the connected members. Any thread. A condition that ended one wait ends later ones too."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._membership: Membership | None = None  # this and all below: guarded by the condition
        self._failure: NexarError | None = None
        self._connected: set[NodeId] = set()  # connected members
        self._awaited: set[NodeId] = set()  # members of a resumed cluster that may still return
        self._launchers: set[NodeId] = set()  # connected launchers
        self._return_deadline = 0.0  # deadline of `_awaited`
        self._wakers: set[Callable[[], None]] = set()

    @property
    def membership(self) -> Membership | None:
        with self._changed:
            return self._membership

    # -- updates -----------------------------------------------------------------------------------------

    def moved(self, membership: Membership, present: Iterable[NodeId]) -> None:
        """`present` are connected. Older epochs are ignored."""
        with self._changed:
            if self._membership is None or membership.epoch > self._membership.epoch:
                self._membership = membership
                self._connected = set(present)
                self._awaited.intersection_update(member.node for member in membership.members)
                self._notify()

    def resumed(self, membership: Membership, return_deadline: float) -> None:
        """Members may return until `return_deadline` (time.monotonic)."""
        with self._changed:
            self._membership, self._return_deadline = membership, return_deadline
            self._awaited = {member.node for member in membership.members}
            self._notify()

    def failed(self, error: NexarError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._notify()

    def event_added(self, event: SeedEvent) -> None:
        # Members have a rank; launchers have none.
        if event.node is None:
            return
        if event.rank is None:
            self._launcher_event(event.node, event.kind)
            return
        with self._changed:
            if self._membership is None:
                return
            if event.kind in _ENDS:
                self._connected.discard(event.node)
            elif event.kind == "returned":
                self._connected.add(event.node)
            else:
                return
            self._awaited.discard(event.node)
            self._notify()

    def _launcher_event(self, node: NodeId, kind: SeedEventKind) -> None:
        with self._changed:
            if kind in ("reserved", "returned"):
                self._launchers.add(node)
            elif kind in _ENDS and node in self._launchers:
                self._launchers.discard(node)
                self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        for waker in self._wakers:
            waker()

    # -- waiting -----------------------------------------------------------------------------------------

    def wait_formed(self, timeout: float | None) -> Membership | None:
        """None at the timeout. Raises the failure."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._is_settled() and self._wait(deadline):
                continue
            return self._settled()

    async def formed_soon(self) -> Membership | None:
        """`wait_formed` for a task."""
        import asyncio  # noqa: PLC0415 - a coroutine has it loaded; a launcher does not need it

        loop, settled = asyncio.get_running_loop(), asyncio.Event()

        def waker() -> None:
            if not loop.is_closed():  # a loop closed during the task has no waiter, and the seed goes on
                loop.call_soon_threadsafe(settled.set)

        with self._changed:
            if self._is_settled():
                return self._settled()
            self._wakers.add(waker)
        try:
            await settled.wait()
        finally:
            with self._changed:
                self._wakers.discard(waker)
        with self._changed:
            return self._settled()

    def wait_empty(self, timeout: float | None) -> bool:
        """False at the timeout. Also ends if no member will come."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._is_empty():
                if not self._wait(deadline, self._return_deadline):
                    return False
            return True

    def wait_launchers(self, timeout: float) -> bool:
        """False at the timeout. Also ends if the formation failed."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._launchers and self._failure is None:
                if not self._wait(deadline):
                    return False
            return True

    def _wait(self, deadline: float | None, look: float = 0.0) -> bool:
        """Wait for a change or the time `look`. False after the deadline."""
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            return False
        times = [each - now for each in (deadline, look) if each is not None and each > now]
        self._changed.wait(min(*times, LONGEST_WAIT) if times else LONGEST_WAIT)
        return True

    def _is_settled(self) -> bool:
        return self._membership is not None or self._failure is not None

    def _settled(self) -> Membership | None:
        if self._membership is None and self._failure is not None:
            raise self._failure
        return self._membership

    def _is_empty(self) -> bool:
        if self._failure is not None:
            return True
        if self._membership is None or self._connected:
            return False
        return not self._awaited or time.monotonic() >= self._return_deadline


_LOST: Final = ("gone", "refused")


class StatusBoardService:
    """The status board with a lock. Any thread."""

    def __init__(self, cluster: str, size: int, joined: Callable[[], int], *, clock: Clock | None = None) -> None:
        """`joined` counts nodes while the cluster forms; it must not block."""
        self._clock = clock or SystemClock()
        self._joined = joined
        self._lock = threading.Lock()
        self._status_board = StatusBoard(cluster, size)  # guarded by the lock

    def update_report(self, node: NodeId, report: StatusReport) -> None:
        with self._lock:
            self._status_board.report_received(node, report, self._clock.now())

    def moved(self, membership: Membership, willing: frozenset[NodeId] = frozenset()) -> None:
        """`willing`: members that left on request."""
        with self._lock:
            self._status_board.moved(membership, self._clock.now(), willing)

    def event_added(self, event: SeedEvent) -> None:
        # An unauthenticated peer may claim any node, but has no rank.
        if event.node is None or event.rank is None:
            return
        with self._lock:
            now = self._clock.now()
            if event.kind == "returned":
                self._status_board.returned(event.node, now)
            elif event.kind in _LOST:
                self._status_board.went(event.node, event.reason, now)
            elif event.kind == "left":
                self._status_board.went(event.node, event.reason or "it closed its communicator", now, left=True)
            elif event.kind == "child died":
                self._status_board.went(event.node, event.reason, now, told=True)

    def page(self, first: int = 0) -> StatusPage:
        joined = self._joined()
        with self._lock:
            return self._status_board.page(self._clock.now(), first=first, joined=joined)

    def whole(self) -> StatusPage:
        return gather_pages(self.page)


def gather_pages(page: Callable[[int], StatusPage]) -> StatusPage:
    """All pages as one. Rows that move between pages appear once."""
    board = page(0)
    rows: dict[int, StatusRow] = {row.node: row for row in board.rows}
    seen = len(board.rows)
    while board.rows and seen < board.total:
        board = page(seen)
        seen += len(board.rows)
        rows.update({row.node: row for row in board.rows})
    return StatusPage(board.cluster, board.size, board.joined, board.epoch, tuple(rows.values()), 0, len(rows))
