"""Reading an ordered stream: bytes in, frames out, without a copy where a frame fits into the buffer.

Law: one read is always posted, into the free part of one buffer, which belongs to the driving thread. `_start.._end` of
the buffer has arrived and was not delivered yet: nothing, or one frame that is not whole. A read waits for the bytes
that make it whole, no fewer.
Memory follows the bytes that arrived. The buffer starts small, because a peer may open thousands of streams; it doubles
only when it is nearly full, up to the largest frame, and falls back to KEPT_BYTES, which holds an eager message whole.
"""

from __future__ import annotations

from typing import Final

from nexar_quic import Operation, QuicError, Stream

from nexar.transport.quic.receiving import Receiver
from nexar.wire.codec import MAX_FRAME_BYTES, next_frame
from nexar.wire.frame import Frame, FrameError, Kind

FIRST_BYTES: Final = 4 << 10
KEPT_BYTES: Final = 128 << 10
# Plain numbers: looking a member up in an enum class costs as much as a small decode.
_FIRST_PRIVATE: Final = int(Kind.CHUNK)  # CHUNK, FINISH and HELLO are between carriers, not for sinks
_LAST_PRIVATE: Final = int(Kind.HELLO)


class OrderedReader:
    """One ordered stream of the peer. Everything here runs in the driving thread."""

    __slots__ = ("_end", "_minimum", "_receiver", "_size", "_start", "_stream", "_view")

    def __init__(self, receiver: Receiver, stream: Stream) -> None:
        self._receiver = receiver
        self._stream = stream
        self._view = memoryview(bytearray(FIRST_BYTES))
        self._size = FIRST_BYTES
        self._start = self._end = 0
        self._minimum = 1
        self._post(self._view, self.arrived)

    @property
    def buffer_bytes(self) -> int:
        """Memory held."""
        return self._size

    def arrived(self, operation: Operation) -> None:
        """Bytes have come, or the stream is over."""
        try:
            count = operation.result()
        except QuicError as error:
            return self._receiver.read_failed(error)
        if count < self._minimum:
            return self._over(count)
        receiver = self._receiver
        receiver.inside = True
        try:
            start = self._deliver(self._start, self._end + count)
        finally:
            receiver.leave()
        if start < 0:
            return None
        if start == self._end < self._size <= KEPT_BYTES:  # all delivered, with room to spare: by far the usual case
            self._start = self._end = 0
            return self._post(self._view, operation.token)
        return self._post(self._make_room(start), operation.token)

    def interrupted(self, error: BaseException) -> None:
        """See Handler."""
        self._receiver.interrupted(error)

    def _deliver(self, start: int, end: int) -> int:
        """Hand over every whole frame; where the next one starts, or -1 if nothing more is to be read: the peer has
        broken the protocol, or nobody holds the carrier.
        """
        self._end = end
        self._minimum = 1
        view, receiver = self._view, self._receiver
        carrier = receiver.carrier
        if carrier is None:
            return -1
        while start < end:
            try:
                found = next_frame(view, start, end, receiver.decode)
            except FrameError as error:
                return self._refuse(str(error))
            if isinstance(found, int):
                self._minimum = found
                break
            frame, body, start = found
            if _FIRST_PRIVATE <= frame.kind <= _LAST_PRIVATE:
                if not self._take_private(frame):
                    return -1
            else:
                receiver.frames_received += 1
                receiver.sink.frame_arrived(carrier, frame, view[body:start])
        return start

    def _take_private(self, frame: Frame) -> bool:
        if frame.kind == Kind.FINISH:
            self._receiver.finish_announced(frame.count)
            return True
        self._refuse(f"a frame of kind {Kind(frame.kind).name}, which has no meaning on QUIC")
        return False

    def _refuse(self, reason: str) -> int:
        self._receiver.misbehaved(reason)
        return -1

    def _post(self, room: memoryview, token: object) -> None:
        try:
            self._stream.post_read(room, self._receiver.completions, minimum=self._minimum, token=token)
        except QuicError as error:
            self._receiver.read_failed(error)

    def _over(self, count: int) -> None:
        held = self._end - self._start + count
        if held:
            return self._receiver.misbehaved(f"an ordered stream that ends {held} bytes into a frame")
        return self._receiver.stream_over()

    def _make_room(self, start: int) -> memoryview:
        """A free part of the buffer for the next read. Views handed out before are void."""
        held = self._end - start
        if not held:
            self._replace(start, min(2 * self._size, KEPT_BYTES))
        elif self._end + self._minimum <= self._size:
            self._start = start  # the rest of the frame fits behind what is there
        elif 4 * (self._size - held) < self._size < held + self._minimum:
            self._replace(start, min(2 * self._size, MAX_FRAME_BYTES))
        else:
            self._view[:held] = self._view[start : self._end]
            self._start, self._end = 0, held
        self._minimum = min(self._minimum, self._size - self._end)
        return self._view[self._end :]

    def _replace(self, start: int, size: int) -> None:
        held = self._end - start
        view = memoryview(bytearray(size))
        view[:held] = self._view[start : self._end]
        self._view, self._size = view, size
        self._start, self._end = 0, held
