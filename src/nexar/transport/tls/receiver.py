"""The receiving half of one connection: bytes in, calls of the sink out. Belongs to the driving thread.

The sink is called with no lock held, and only while the carrier has not ended. What goes wrong while reading ends the
carrier; what a sink raises passes through here, and ends it too.
"""

from __future__ import annotations

from typing import Final

from nexar.transport.base import Carrier, CarrierLost, Sink
from nexar.transport.tls.connection import Connection, as_loss
from nexar.transport.tls.ending import Ending
from nexar.transport.tls.inbox import Inbox
from nexar.wire.frame import HEADER_BYTES, Frame, FrameError, Kind

_CHUNK, _FINISH = int(Kind.CHUNK), int(Kind.FINISH)
_OURS: Final = frozenset({_CHUNK, _FINISH, int(Kind.HELLO)})


class Receiver:
    """Takes in one connection of a carrier. Without an inbox no payload may come this way."""

    sink: Sink
    """Set before anything is received, and looked up at every call: a sink may hand over to another."""

    def __init__(self, connection: Connection, ending: Ending, inbox: Inbox | None = None) -> None:
        self.connection = connection
        self.peer_finished = False
        self.frames_received = 0
        self._ending = ending
        self._inbox = inbox  # used under the connection's lock
        self._header_next = False  # a chunk has just ended

    def receive(self, carrier: Carrier) -> bool:
        """Take in what has come, within the budget. True if anything has. What is left shows in `holds_input`."""
        received = 0
        channel = self.connection.channel
        while self._ending.lost is None and received < channel.burst_bytes:
            count = self._take(carrier)
            received += count
            if not count or (channel.exhausted and not channel.buffered):
                break
        return received > 0

    @property
    def holds_input(self) -> bool:
        """Bytes have arrived that the socket does not show any more."""
        return self._ending.lost is None and self.connection.holds_input

    def _take(self, carrier: Carrier) -> int:
        if self._inbox is not None and self._inbox.missing:
            count, complete = self._read_chunk(self._inbox)
            if complete is not None and self._ending.lost is None:
                self.sink.payload_arrived(carrier, complete)
            return count
        count = self._fill()
        self._dispatch(carrier)
        return count

    def _fill(self) -> int:
        # Behind a chunk another one is likely: its header is read alone, so that its body need not be copied.
        limit = HEADER_BYTES if self._header_next else None
        self._header_next = False
        try:
            return self.connection.fill(limit)
        except (EOFError, OSError) as error:
            return self._end_of_stream(error)

    def _read_chunk(self, inbox: Inbox) -> tuple[int, int | None]:
        """Read on into the payload's own memory, or into nowhere."""
        connection = self.connection
        try:
            with connection.lock:
                if connection.ended is not None:
                    return 0, None
                place = inbox.destination()
                if place is None:  # the reader is empty now: its memory is a fine nowhere
                    place = connection.reader.room()[: inbox.missing]
                count = connection.channel.read_into(place)
                complete = inbox.took(count)
        except (EOFError, OSError) as error:
            return self._end_of_stream(error), None
        connection.bytes_received += count
        self._header_next = not inbox.missing
        return count, complete

    def _end_of_stream(self, error: EOFError | OSError) -> int:
        if isinstance(error, EOFError) and self.peer_finished and self.connection.said_farewell:
            # The peer has all it wants and closed first. The other connection tells the same in a moment.
            self.connection.close(CarrierLost("closed", "both sides have finished"))
        else:
            self._ending.lose(as_loss(error))
        return 0

    def _dispatch(self, carrier: Carrier) -> None:
        while self._ending.lost is None and (found := self._next()) is not None:
            frame, body = found
            if frame.kind in _OURS or self.peer_finished:
                self._handle(carrier, frame, body)
            else:
                self.frames_received += 1
                self.sink.frame_arrived(carrier, frame, body)

    def _next(self) -> tuple[Frame, memoryview] | None:
        try:
            return self.connection.reader.next()
        except FrameError as error:
            self._ending.lose(CarrierLost("misbehaved", str(error)))
            return None

    def _handle(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        """Frames that are the carrier's own business."""
        if self.peer_finished:
            self._ending.lose(CarrierLost("misbehaved", f"a frame of kind {frame.kind} behind the last one"))
        elif frame.kind == _FINISH:
            self.peer_finished = True
        elif frame.kind == _CHUNK and self._inbox is not None:
            complete = self._begin_chunk(self._inbox, frame, body)
            if complete is not None:
                self.sink.payload_arrived(carrier, complete)
        else:
            self._ending.lose(CarrierLost("misbehaved", f"a frame of kind {frame.kind} where none may come"))

    def _begin_chunk(self, inbox: Inbox, frame: Frame, body: memoryview) -> int | None:
        try:
            with self.connection.lock:
                complete = inbox.begin(frame, body)
        except CarrierLost as error:
            self._ending.lose(error)
            return None
        self._header_next = not inbox.missing
        return complete
