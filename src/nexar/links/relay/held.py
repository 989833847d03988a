"""Frames for this node that it cannot take yet: of who is no member here yet, or of who may not be who it says.

All of it is a convenience, for a source sends again what was not acknowledged. So what is held has a bound, for each
neighbour that brings it, and the oldest makes room: whoever fills it takes nothing from who comes over others. No I/O,
guarded by the station's lock.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from nexar.types import NodeId
from nexar.wire.relay import RelayHeader

HELD_BYTES: Final = 512 << 10
"""For each neighbour; the newest frame is held even if it is larger."""
_FRAME_BYTES: Final = 256  # that one takes, however little it carries


class HeldFrame(NamedTuple):
    """With a copy of what it carries."""

    header: RelayHeader
    carried: bytes

    @property
    def size_bytes(self) -> int:
        """What it counts for."""
        return _FRAME_BYTES + 8 * len(self.header.route) + len(self.carried)


class Held:
    """Of one station."""

    def __init__(self) -> None:
        self._frames: dict[NodeId, deque[HeldFrame]] = {}  # by who brought them
        self._bytes: dict[NodeId, int] = {}
        self.displaced = 0
        """How many had to make room."""

    def __bool__(self) -> bool:
        return bool(self._frames)

    def put(self, header: RelayHeader, carried: bytes) -> None:
        """It came over the last node but one of its route."""
        before, frame = header.route[-2], HeldFrame(header, carried)
        frames = self._frames.setdefault(before, deque())
        frames.append(frame)
        held = self._bytes.get(before, 0) + frame.size_bytes
        while held > HELD_BYTES and len(frames) > 1:
            held -= frames.popleft().size_bytes
            self.displaced += 1
        self._bytes[before] = held

    def take(self, source: NodeId | None = None) -> list[HeldFrame]:
        """All of them, or those of one source, in the order in which each neighbour brought them."""
        held = [frame for frames in self._frames.values() for frame in frames]
        self._frames.clear()
        self._bytes.clear()
        if source is None:
            return held
        for frame in held:
            if frame.header.source != source:
                self.put(*frame)
        return [frame for frame in held if frame.header.source == source]
