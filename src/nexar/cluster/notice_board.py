"""The seed's board: members pin their bulletins to it, those who watch look at it. Everybody at any time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from nexar.clock import Clock, SystemClock
from nexar.cluster.decisions.admission_events import Note
from nexar.cluster.decisions.notices import Notices
from nexar.cluster.membership import Membership
from nexar.types import NodeId
from nexar.wire.bulletin import Board, Bulletin, Row

_LOST: Final = ("gone", "refused")


class NoticeBoard:
    """Any thread; nobody waits here for longer than a row takes to be written."""

    def __init__(self, cluster: str, size: int, joined: Callable[[], int], *, clock: Clock | None = None) -> None:
        """`joined`: how many have come while the cluster forms; it must not wait."""
        self._clock = clock or SystemClock()
        self._joined = joined
        self._lock = threading.Lock()
        self._notices = Notices(cluster, size)  # under the lock

    def pin(self, node: NodeId, bulletin: Bulletin) -> None:
        """The newest word of a member."""
        with self._lock:
            self._notices.news(node, bulletin, self._clock.now())

    def moved(self, membership: Membership, willing: frozenset[NodeId] = frozenset()) -> None:
        """These are the members. `willing`: who left for it of its own will."""
        with self._lock:
            self._notices.moved(membership, self._clock.now(), willing)

    def noted(self, note: Note) -> None:
        """Something happened at the door. Only who holds a rank is a member: a stranger may say any name."""
        if note.node is None or note.rank is None:
            return
        with self._lock:
            now = self._clock.now()
            if note.kind == "returned":
                self._notices.returned(note.node, now)
            elif note.kind in _LOST:
                self._notices.went(note.node, note.reason, now)
            elif note.kind == "left":
                self._notices.went(note.node, note.reason or "it closed its communicator", now, left=True)
            elif note.kind == "child died":
                self._notices.went(note.node, note.reason, now, told=True)

    def page(self, first: int = 0) -> Board:
        """Some rows, from this one on."""
        joined = self._joined()
        with self._lock:
            return self._notices.page(self._clock.now(), first=first, joined=joined)

    def whole(self) -> Board:
        """All rows, for who is in this process."""
        return gather(self.page)


def gather(page: Callable[[int], Board]) -> Board:
    """The pages of a board as one: more rows than a message may have. Rows that move meanwhile are shown once."""
    board = page(0)
    rows: dict[int, Row] = {row.node: row for row in board.rows}
    seen = len(board.rows)
    while board.rows and seen < board.total:
        board = page(seen)
        seen += len(board.rows)
        rows.update({row.node: row for row in board.rows})
    return Board(board.cluster, board.size, board.joined, board.epoch, tuple(rows.values()), 0, len(rows))
