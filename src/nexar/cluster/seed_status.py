"""What happened at the seed's door: kept, logged and told, one note after the other.

What became of a formation, and who is still there: told by the door, waited for by whoever holds the seed.

forming ──→ formed ──→ empty        each step once, for good, but that others may come into an elastic cluster
   └──→ failed

The seed's board: members pin their bulletins to it, those who watch look at it. Everybody at any time.
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

MAX_EVENTS: Final = 1024
"""The newest are kept: strangers can make as many as they like."""

_log: Final = logging.getLogger("nexar.seed")
_LEVELS: Final[dict[SeedEventKind, int]] = {
    "knocked": logging.DEBUG,
    "failed": logging.ERROR,
}
_LONGEST_LINE: Final = 500
_MOST_WARNINGS: Final = 64
"""Refusals that are warned of at once; one more each second. A stranger can be refused as often as it likes."""


class SeedLog:
    """Notes come in from one thread at a time, in the order of what happened."""

    def __init__(
        self, on_seed_event: Callable[[SeedEvent], None] | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`on_note` is called with each note and must not block. What it raises is logged, and changes nothing."""
        self._on_seed_event = on_seed_event
        self._clock = clock
        self._warnings = float(_MOST_WARNINGS)  # of refusals, that are left; who adds a note writes this and the next
        self._warned = clock()
        self._lock = threading.Lock()
        self._notes: deque[SeedEvent] = deque(maxlen=MAX_EVENTS)  # under the lock

    @property
    def notes(self) -> list[SeedEvent]:
        """The newest MAX_NOTES, oldest first. Any thread."""
        with self._lock:
            return list(self._notes)

    def add(self, note: SeedEvent) -> None:
        """It happened."""
        with self._lock:
            self._notes.append(note)
        _log.log(self._level(note), "%s", describe_seed_event(note))
        if self._on_seed_event is None:
            return
        try:
            self._on_seed_event(note)
        except Exception:  # noqa: BLE001 - foreign code must not cost the cluster its seed
            _log.exception("on_event raised")

    def _level(self, note: SeedEvent) -> int:
        """Refusals of unnamed connections are never warnings; those of named nodes are, within the budget."""
        if note.kind != "refused":
            return _LEVELS.get(note.kind, logging.INFO)
        return logging.WARNING if note.node is not None and self._may_warn() else logging.INFO

    def _may_warn(self) -> bool:
        now = self._clock()
        left = min(self._warnings + now - self._warned, _MOST_WARNINGS)
        self._warned, self._warnings = now, left - 1 if left >= 1 else left
        return left >= 1


def describe_seed_event(note: SeedEvent) -> str:
    """One line for people."""
    somebody = note.address is not None or note.node is not None
    parts = [note.kind, describe_peer(note.rank, note.node, note.address) if somebody else "", note.reason]
    return brief(": ".join(part for part in parts if part), _LONGEST_LINE)


_ENDS: Final[frozenset[SeedEventKind]] = frozenset({"gone", "left", "refused", "dropped"})
LONGEST_WAIT: Final = 0.5
"""Seconds that a thread sleeps at a stretch. A signal may be given to another thread of the process (it is after
SIGSTOP and SIGCONT), and does not wake the main thread then, which alone runs its handler."""


class FormationStatus:
    """Any thread. Whatever ends a wait stays, so later waits end at once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._membership: Membership | None = None  # this and all below under the condition
        self._failure: NexarError | None = None
        self._here: set[NodeId] = set()
        """Members with a line."""
        self._awaited: set[NodeId] = set()
        """Members of a resumed cluster that may still come back."""
        self._launchers: set[NodeId] = set()
        """Launchers with a line."""
        self._patience = 0.0  # until when they may
        self._watchers: set[Callable[[], None]] = set()

    @property
    def membership(self) -> Membership | None:
        """The newest that was committed; None before."""
        with self._changed:
            return self._membership

    # -- telling -----------------------------------------------------------------------------------------

    def moved(self, membership: Membership, present: Iterable[NodeId]) -> None:
        """Everybody is there, or the members went on; who of them has a line. Told again, it changes nothing."""
        with self._changed:
            if self._membership is None or membership.epoch > self._membership.epoch:
                self._membership = membership
                self._here = set(present)
                self._awaited.intersection_update(member.node for member in membership.members)
                self._tell()

    def resumed(self, membership: Membership, patience: float) -> None:
        """It had formed before; until `patience` (time.monotonic) the members may come back to this seed."""
        with self._changed:
            self._membership, self._patience = membership, patience
            self._awaited = {member.node for member in membership.members}
            self._tell()

    def failed(self, error: NexarError) -> None:
        """It will not form, or the seed is over. What was said first stays."""
        with self._changed:
            self._failure = self._failure or error
            self._tell()

    def noted(self, note: SeedEvent) -> None:
        """Somebody came or went. Members have a rank; of the others only launchers are counted."""
        if note.node is None:
            return
        if note.rank is None:
            self._noted_launcher(note.node, note.kind)
            return
        with self._changed:
            if self._membership is None:
                return
            if note.kind in _ENDS:
                self._here.discard(note.node)
            elif note.kind == "returned":
                self._here.add(note.node)
            else:
                return
            self._awaited.discard(note.node)
            self._tell()

    def _noted_launcher(self, node: NodeId, kind: SeedEventKind) -> None:
        with self._changed:
            if kind in ("reserved", "returned"):
                self._launchers.add(node)
            elif kind in _ENDS and node in self._launchers:
                self._launchers.discard(node)
                self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        for watcher in self._watchers:
            watcher()

    # -- waiting -----------------------------------------------------------------------------------------

    def wait_formed(self, timeout: float | None) -> Membership | None:
        """The membership; None at the timeout. Raises why there will be none."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._is_settled() and self._rest(deadline):
                continue
            return self._settled()

    async def formed_soon(self) -> Membership | None:
        """As `wait_formed`, for a task. Cancelled, it leaves nothing behind."""
        import asyncio  # noqa: PLC0415 - whoever awaits has it; a launcher need not

        loop, settled = asyncio.get_running_loop(), asyncio.Event()

        def watcher() -> None:
            if not loop.is_closed():  # a loop that was closed over its task: nobody waits there, and the seed goes on
                loop.call_soon_threadsafe(settled.set)

        with self._changed:
            if self._is_settled():
                return self._settled()
            self._watchers.add(watcher)
        try:
            await settled.wait()
        finally:
            with self._changed:
                self._watchers.discard(watcher)
        with self._changed:
            return self._settled()

    def wait_empty(self, timeout: float | None) -> bool:
        """Until every member that was there has gone, or there will be none. False at the timeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._is_empty():
                if not self._rest(deadline, self._patience):
                    return False
            return True

    def wait_launchers(self, timeout: float) -> bool:
        """Until no launcher has a line, or there will be no cluster. False at the timeout."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._launchers and self._failure is None:
                if not self._rest(deadline):
                    return False
            return True

    def _rest(self, deadline: float | None, look: float = 0.0) -> bool:
        """Until something is told, or `look` has come, if that is still to come. False: the deadline has passed."""
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
        if self._membership is None or self._here:
            return False
        return not self._awaited or time.monotonic() >= self._patience


_LOST: Final = ("gone", "refused")


class StatusBoardService:
    """Any thread; nobody waits here for longer than a row takes to be written."""

    def __init__(self, cluster: str, size: int, joined: Callable[[], int], *, clock: Clock | None = None) -> None:
        """`joined`: how many have come while the cluster forms; it must not wait."""
        self._clock = clock or SystemClock()
        self._joined = joined
        self._lock = threading.Lock()
        self._status_board = StatusBoard(cluster, size)  # under the lock

    def pin(self, node: NodeId, bulletin: StatusReport) -> None:
        """The newest word of a member."""
        with self._lock:
            self._status_board.news(node, bulletin, self._clock.now())

    def moved(self, membership: Membership, willing: frozenset[NodeId] = frozenset()) -> None:
        """These are the members. `willing`: who left for it of its own will."""
        with self._lock:
            self._status_board.moved(membership, self._clock.now(), willing)

    def noted(self, note: SeedEvent) -> None:
        """Something happened at the door. Only who holds a rank is a member: a stranger may say any name."""
        if note.node is None or note.rank is None:
            return
        with self._lock:
            now = self._clock.now()
            if note.kind == "returned":
                self._status_board.returned(note.node, now)
            elif note.kind in _LOST:
                self._status_board.went(note.node, note.reason, now)
            elif note.kind == "left":
                self._status_board.went(note.node, note.reason or "it closed its communicator", now, left=True)
            elif note.kind == "child died":
                self._status_board.went(note.node, note.reason, now, told=True)

    def page(self, first: int = 0) -> StatusPage:
        """Some rows, from this one on."""
        joined = self._joined()
        with self._lock:
            return self._status_board.page(self._clock.now(), first=first, joined=joined)

    def whole(self) -> StatusPage:
        """All rows, for who is in this process."""
        return gather_pages(self.page)


def gather_pages(page: Callable[[int], StatusPage]) -> StatusPage:
    """The pages of a board as one: more rows than a message may have. Rows that move meanwhile are shown once."""
    board = page(0)
    rows: dict[int, StatusRow] = {row.node: row for row in board.rows}
    seen = len(board.rows)
    while board.rows and seen < board.total:
        board = page(seen)
        seen += len(board.rows)
        rows.update({row.node: row for row in board.rows})
    return StatusPage(board.cluster, board.size, board.joined, board.epoch, tuple(rows.values()), 0, len(rows))
