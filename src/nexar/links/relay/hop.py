"""One neighbour, as a way to others: what waits to go over it, and how much it takes. No I/O, no lock of its own.

Law: what is relayed is held in buffers classed by the hops that it has travelled. What arrives after h hops lies in
class h until it goes on, and it goes on as soon as class h + 1 of the next node has room. So a class waits only for
higher classes, the highest of which wait for nobody: their frames have arrived, and a destination takes everything. No
circle of waits can form, however the routes cross.

Each class of each neighbour holds CLASS_BYTES, and the frame with which that is exceeded. Who sends counts, who has
passed it on gives the room back.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Final, NamedTuple

from nexar.types import NodeId
from nexar.wire.frame import FrameError

if TYPE_CHECKING:
    from nexar.links.link import Link

CLASS_BYTES: Final = 512 << 10
RETURN_BYTES: Final = CLASS_BYTES // 4
"""Room is given back in amounts of this size: less than that is never what a sender waits for."""
WORDS_BYTES: Final = CLASS_BYTES
"""So many words of this node's own wait for a neighbour that gives no room, and no more."""
MOST_SOURCES: Final = 4096
"""Remembered for each two neighbours."""


class Waiting(NamedTuple):
    """Something that is to go on."""

    hops: int
    """That it will have travelled when it arrives there."""
    body: bytearray | bytes
    came_over: Hop | None
    """Who is to get the room back; None: it is this node's own."""


class Hop:
    """A neighbour. Guarded by its station's lock."""

    def __init__(self, node: NodeId) -> None:
        self.node = node
        self.link: Link | None = None
        """None: not open yet."""
        self._under_way: Counter[int] = Counter()  # bytes by class, sent there and not passed on yet
        self._waiting: dict[int, deque[Waiting]] = {}
        self._lying: Counter[int] = Counter()  # bytes by class, that came from there and lie here
        self._passed_on: Counter[int] = Counter()  # bytes by class, that have gone on, and it has not been told
        self._words_bytes = 0  # of those that wait and are this node's own
        # Whose frames have gone over it, with the route from here back to each: by the neighbour that brought them, so
        # that whoever invents sources keeps none from being remembered but those that come over the same neighbour.
        self._sources: dict[NodeId, dict[NodeId, tuple[NodeId, ...]]] = {}

    def has_room(self, hops: int) -> bool:
        """For one more frame of this class."""
        return self.link is not None and self._under_way[hops] < CLASS_BYTES

    @property
    def takes_words(self) -> bool:
        """Whether one more word of this node's own may wait. Who asks and gives no room gets no more answers."""
        return self._words_bytes < WORDS_BYTES

    def put(self, waiting: Waiting) -> None:
        """It goes when there is room."""
        self._waiting.setdefault(waiting.hops, deque()).append(waiting)
        if waiting.came_over is None:
            self._words_bytes += len(waiting.body)

    def take(self) -> Waiting | None:
        """What goes now, those that have come the farthest first; None: nothing can."""
        for hops in sorted(self._waiting, reverse=True):
            if self.has_room(hops):
                found = self._waiting[hops].popleft()
                if not self._waiting[hops]:
                    del self._waiting[hops]
                if found.came_over is None:
                    self._words_bytes -= len(found.body)
                self.sent(hops, len(found.body))
                return found
        return None

    def sent(self, hops: int, size_bytes: int) -> None:
        """So much is under way."""
        self._under_way[hops] += size_bytes

    def has_taken(self, hops: int, size_bytes: int) -> None:
        """The neighbour has passed it on. Of what never went there it says nothing."""
        left = self._under_way.pop(hops, 0) - size_bytes
        if left > 0:
            self._under_way[hops] = left

    def took_in(self, hops: int, size_bytes: int) -> None:
        """Something has come from there. FrameError: more than it may give us."""
        if self._lying[hops] >= CLASS_BYTES:
            raise FrameError("body", size_bytes, f"no more than {CLASS_BYTES} bytes at a time after {hops} hops")
        self._lying[hops] += size_bytes

    def passed_on(self, hops: int, size_bytes: int) -> int:
        """What came from there has gone on. Returns what the neighbour is to be told now; 0: nothing yet."""
        self._lying[hops] -= size_bytes
        self._passed_on[hops] += size_bytes
        if self._passed_on[hops] < RETURN_BYTES:
            return 0
        return self._passed_on.pop(hops)

    def drain(self) -> list[Waiting]:
        """All that waits, and does not any more."""
        found = [each for hops in sorted(self._waiting) for each in self._waiting[hops]]
        self._waiting.clear()
        self._words_bytes = 0
        return found

    def remember(self, back: tuple[NodeId, ...]) -> None:
        """Frames of the last one of this route go over it; the route leads back from here. The one that was heard of
        longest ago makes room: it will be remembered with its next frame.
        """
        known = self._sources.setdefault(back[1], {})
        known.pop(back[-1], None)
        if len(known) >= MOST_SOURCES:
            del known[next(iter(known))]
        known[back[-1]] = back

    @property
    def sources(self) -> list[tuple[NodeId, ...]]:
        """The ways back to everybody whose frames have gone over it."""
        return [back for known in self._sources.values() for back in known.values()]

    @property
    def waits(self) -> int:
        """How many frames wait."""
        return sum(map(len, self._waiting.values()))
