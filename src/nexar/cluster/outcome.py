"""What became of a formation, and who is still there: told by the door, waited for by whoever holds the seed.

forming ──→ formed ──→ empty        each step once, for good, but that others may come into an elastic cluster
   └──→ failed
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from nexar.cluster.decisions.admission_events import Note, NoteKind
from nexar.cluster.membership import Membership
from nexar.errors import NexarError
from nexar.types import NodeId

_ENDS: Final[frozenset[NoteKind]] = frozenset({"gone", "left", "refused", "dropped"})
LONGEST_WAIT: Final = 0.5
"""Seconds that a thread sleeps at a stretch. A signal may be given to another thread of the process (it is after
SIGSTOP and SIGCONT), and does not wake the main thread then, which alone runs its handler."""


class Outcome:
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

    def noted(self, note: Note) -> None:
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

    def _noted_launcher(self, node: NodeId, kind: NoteKind) -> None:
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
