"""A shared-memory carrier.

Any thread may call the Carrier methods, which use only RingFrameSender, PayloadSender and PayloadReceiver with their
own locks. Only the driver calls the rest. No lock is held during a sink call. The memory is unmapped once the carrier
has ended and the driver is outside (CarrierLifetime).
"""

from __future__ import annotations

import threading
from threading import get_ident
from typing import TYPE_CHECKING, Final

from nexar.transport.base import Buffer, Carrier, CarrierLost, Peer, Redirected, Sink
from nexar.transport.shm.ring import CarrierLifetime, RingCorrupt, WakeSocket, fence
from nexar.transport.shm.ring_frames import RingFrameSender, ShmSegment, flat, sleep_word
from nexar.transport.shm.ring_payloads import NOTHING, PayloadReceiver, PayloadSender
from nexar.wire.frame import Frame, FrameKind, Lane, encode

if TYPE_CHECKING:
    from nexar.transport.shm.transport import ShmTransport

_TURNS: Final = 4  # chunks per direction before other carriers are driven
_CHUNK, _FINISH, _HELLO = (
    int(FrameKind.CHUNK),
    int(FrameKind.FINISH),
    int(FrameKind.HELLO),
)  # adjacent; they never reach a sink


class ShmCarrier(Carrier):
    """One connection to a process of this host."""

    scheme = "shm"

    def __init__(
        self, owner: ShmTransport, peer: Peer, dialed: bool, segment: ShmSegment, wake_socket: WakeSocket
    ) -> None:
        self.peer = peer
        self.dialed = dialed
        self.wake_socket = wake_socket
        self.attention = False  # work that the rings do not show; any thread sets it, `drive` clears it
        self._owner = owner
        self._segment = segment
        self._words = segment.words
        self._frame_word, self._chunk_word = segment.news_words
        self._sleep_word = sleep_word(1 - segment.side)  # the peer's
        self._reader = segment.reader
        self._slot_reader = segment.slot_reader
        self._frames_out = RingFrameSender(segment.writer)
        self._life = CarrierLifetime()
        self._payloads_in = PayloadReceiver(segment.slot_reader, self._life)
        self._payloads_out = PayloadSender(segment.slot_writer)
        self._sink: Sink | None = None  # written by attach
        self._flag_lock = threading.Lock()  # guards the next three
        self._freed = False
        self._finish_asked = False  # sends are refused; set once, by any thread
        self._finish_due = False  # FINISH must still be queued; set by finish(), cleared by the driver
        self._finish_sent = False  # FINISH is queued; written by the driver
        self._finish_at: int | None = None  # number of chunks announced by the peer's FINISH; written by the driver
        self._finish_reported = False  # the sink knows; written by the driver
        self._process_ended = False  # the peer's; written by the driver
        # a sender found the segment corrupt; written by any thread, handled by the driver
        self._fault: str | None = None

    # ------------------------------------------------------------------ methods for any thread
    def attach(self, sink: Sink) -> None:
        self._sink = sink
        self.attention = True
        self._owner.attached(self)

    def send_frame(self, lane: Lane, communicator: int, header: bytes, *body: Buffer) -> None:
        if self._life.ended is not None or self._finish_asked:
            raise self._refusal()
        size = len(header)
        for part in body:
            if part.__class__ is memoryview and (part.format != "B" or part.ndim != 1):
                body = tuple(map(flat, body))
                size = len(header) + sum(map(len, body))
                break
            size += len(part)
        try:
            if not self._frames_out.send(lane, header, body, size):
                self._ask_for_driver()
            if sleep_number := self._words[self._sleep_word]:  # after the fence of the sender's lock: see ring.py
                self.wake_socket.signal(sleep_number)
        except RingCorrupt as error:
            self._report_corruption(error)
        except ValueError:
            self._raise_if_closing()  # another thread finished or aborted it
            raise

    def queued_bytes(self, lane: Lane) -> int:
        self._raise_if_ended()
        return self._frames_out.queued_bytes(lane)

    def expect_payload(self, transfer: int, into: memoryview) -> None:
        if not self._payloads_in.expect(transfer, memoryview(flat(into))):
            raise self._refusal()

    def redirect_payload(self, transfer: int, into: memoryview | None) -> Redirected:
        found = self._payloads_in.redirect(transfer, None if into is None else memoryview(flat(into)))
        if found is None:
            raise self._refusal()
        return found

    def send_payload(self, transfer: int, data: memoryview) -> None:
        closing = self._life.ended is not None or self._finish_asked
        if closing or not self._payloads_out.add(transfer, memoryview(flat(data))):
            raise self._refusal()
        try:
            self._payloads_out.pump(_TURNS)
            self._signal_peer(sent=True)
        except RingCorrupt as error:
            self._report_corruption(error)
        except ValueError:
            self._raise_if_closing()
            raise
        if self._payloads_out.waiting:
            self._ask_for_driver()

    def withdraw_payload(self, transfer: int) -> None:
        self._raise_if_ended()
        self._payloads_out.withdraw(transfer)

    def finish(self) -> None:
        self._raise_if_ended()
        with self._flag_lock:
            if self._finish_asked:
                return
            self._finish_asked = self._finish_due = True
        self._ask_for_driver()

    def abort(self, reason: str) -> None:
        if self._end(CarrierLost("closed", reason)):
            self._close_socket(reason)
            if not self._life.driver:
                self._free()
        self._life.wait_outside()

    def wake_peer(self) -> None:
        self.wake_socket.wake_peer()

    def stats(self) -> dict[str, float]:
        return {
            "bytes_sent": self._frames_out.bytes_sent + self._payloads_out.bytes_sent,
            "bytes_received": self._reader.tail + self._payloads_in.bytes_received,
            "frames_sent": self._frames_out.frames_sent,
            "frames_received": self._reader.frames_received,
            "payload_bytes_sent": self._payloads_out.bytes_sent,
            "payload_bytes_received": self._payloads_in.bytes_received,
        }

    def _refusal(self) -> CarrierLost:
        ended = self._life.ended
        # The same error each time, without the tracebacks of earlier raises.
        return CarrierLost("closed", "this side has finished") if ended is None else ended.with_traceback(None)

    def _raise_if_ended(self) -> None:
        if self._life.ended is not None:
            raise self._refusal()

    def _raise_if_closing(self) -> None:
        if self._life.ended is not None or self._finish_asked:
            raise self._refusal() from None

    def _ask_for_driver(self) -> None:
        self.attention = True
        self._owner.wake_driver()

    def _report_corruption(self, error: RingCorrupt) -> None:
        # The driver ends the carrier, because only it calls the sink.
        self._fault = str(error)
        self._ask_for_driver()

    # ------------------------------------------------------------------ driver
    def drive(self) -> bool:
        """Receive and send. Returns whether anything happened."""
        words = self._words
        try:
            news = words[self._frame_word] != self._reader.tail
            if not news and words[self._chunk_word] == self._slot_reader.tail and not self.attention:
                return False
        except ValueError:
            return False  # another thread aborted it and freed the memory
        life = self._life
        life.driver = get_ident()  # life.enter() inlined: this is the path of every frame
        if life.ended is not None:
            return life.enter()
        try:
            if news and self._reader.refresh():
                self._take_frames()
            if self.attention or words[self._chunk_word] != self._slot_reader.tail:
                return self._exchange() or news
            return news
        except RingCorrupt as error:
            self._lose("misbehaved", str(error))
            return True
        except BaseException as error:
            self._lose("fault", f"its sink raised {error!r}")
            raise
        finally:
            life.driver = 0
            if self._life.ended is not None:
                self._release()

    def _readable(self) -> bool:
        words = self._words
        return bool(words[self._frame_word] != self._reader.tail or words[self._chunk_word] != self._slot_reader.tail)

    def _take_frames(self) -> None:
        reader, life = self._reader, self._life
        assert self._sink is not None
        while reader.tail != reader.head and life.ended is None:
            frame = reader.next_frame()
            try:
                if frame is None:
                    continue
                if _CHUNK <= frame.kind <= _HELLO or self._finish_at is not None:
                    self._take_special(frame)
                else:
                    self._sink.frame_arrived(self, frame, reader.body)  # read for each frame: a sink may replace itself
            finally:
                reader.advance()
        if reader.should_check_writer():
            self._signal_peer(sent=False)

    def _take_special(self, frame: Frame) -> None:
        if frame.kind != _FINISH or self._finish_at is not None:
            raise RingCorrupt(f"a frame of kind {frame.kind} where none may come")
        self._finish_at = frame.count
        self.attention = True

    def _exchange(self) -> bool:
        happened = self._frames_out.waiting and self._frames_out.flush()
        if happened:
            self._signal_peer(sent=True)
        for _ in range(_TURNS):
            taken = self._take_chunk()
            filled = self._payloads_out.waiting and self._payloads_out.pump(1) > 0
            if not taken and not filled:
                break
            happened = True
            self._signal_peer(sent=filled)
            if self._life.ended is None and self._reader.refresh():
                self._take_frames()
        return (self._handle_attention() if self.attention else False) or happened

    def _signal_peer(self, *, sent: bool) -> None:
        """Wake a sleeping peer: if data was sent, or else only if it waits for room."""
        fence()
        sleep_number = self._words[self._sleep_word]
        if sleep_number & 1 or (sleep_number and sent):
            self.wake_socket.signal(sleep_number)

    def _take_chunk(self) -> bool:
        outcome = NOTHING if self._life.ended is not None else self._payloads_in.receive()
        if outcome >= 0 and self._sink is not None:
            self._sink.payload_arrived(self, outcome)
        return outcome != NOTHING

    def _handle_attention(self) -> bool:
        # Cleared first: work added later sets it again, work added before is seen below.
        self.attention = False
        if self._fault is not None:
            raise RingCorrupt(self._fault)
        happened = self._send_finish() | self._report_finish()
        if self._finish_reported and self._finish_sent and not self._frames_out.waiting:
            self._end(CarrierLost("closed", "both sides have finished"))
        elif self.wake_socket.peer_closed and not self._readable():
            self._lose(*self._end_of_peer())
            happened = True
        self.attention = self.attention or self._unsettled()
        return happened

    def _unsettled(self) -> bool:
        unreported = self._finish_at is not None and not self._finish_reported
        sending = self._frames_out.waiting or self._payloads_out.waiting
        return unreported or self._finish_due or self.wake_socket.peer_closed or sending

    def _send_finish(self) -> bool:
        if not self._finish_due:
            return False
        chunks = self._payloads_out.seal()
        if chunks is None:
            return False
        self._finish_due = False
        self._frames_out.send_last(encode(Frame(kind=_FINISH, count=chunks)))
        self._finish_sent = True
        self._signal_peer(sent=True)
        return True

    def _report_finish(self) -> bool:
        if self._finish_at is None or self._finish_reported or self._life.ended is not None:
            return False
        if self._payloads_in.chunks_received() > self._finish_at:
            raise RingCorrupt("a chunk after the end")
        if self._payloads_in.chunks_received() < self._finish_at:
            return False
        self._finish_reported = True
        assert self._sink is not None
        self._sink.carrier_finished(self)
        return True

    def socket_ready(self) -> None:
        if not self._life.enter():
            return
        try:
            self.wake_socket.drain()
            if self.wake_socket.peer_closed:
                self.attention = True
                self._owner.unwatch(self)
        finally:
            self._leave()

    def process_ended(self) -> None:
        """The peer's process has ended: like a closed socket, after everything that it sent."""
        if self._life.enter():
            self._process_ended = self.wake_socket.peer_closed = self.attention = True
            self._owner.unwatch(self)
            self._leave()

    def _end_of_peer(self) -> tuple[str, str]:
        if self._process_ended:
            return "ended", "its process has ended"
        return "peer", self.wake_socket.close_reason()

    def fall_asleep(self, sleep_number: int) -> None:
        """Ask the peer to signal changes. The caller then fences and calls `may_sleep`."""
        if self._life.enter():
            self.wake_socket.fall_asleep(sleep_number, self._frames_out.waiting or self._payloads_out.waiting)
            self._leave()

    def may_sleep(self) -> bool:
        if not self._life.enter():
            return True
        try:
            room = self._frames_out.can_move() or self._payloads_out.can_move()
            ending = self._finish_due and not self._payloads_out.waiting
            urgent = ending or self._fault is not None or self.wake_socket.peer_closed
            return not (self._readable() or room or urgent)
        finally:
            self._leave()

    def wake(self) -> None:
        if self._life.enter():
            self.wake_socket.wake()
            self._leave()

    # ------------------------------------------------------------------ ending
    def _leave(self) -> None:
        if self._life.leave():
            self._release()

    def _release(self) -> None:
        """Driver only, after leaving an ended carrier."""
        self._close_socket(None)
        self._free()
        self._life.settle()

    def _end(self, error: CarrierLost) -> bool:
        """Returns False if it had already ended."""
        if not self._life.end(error):
            return False
        self._frames_out.close()
        self._payloads_out.close()
        self._payloads_in.clear()
        return True

    def _lose(self, kind: str, reason: str) -> None:
        error = CarrierLost(kind, reason)
        if self._end(error) and self._sink is not None:
            self._sink.carrier_lost(self, error)

    def fail(self, error: CarrierLost) -> None:
        """Driver only, outside the carrier."""
        self._lose(error.kind, error.reason)
        self._release()

    def _close_socket(self, reason: str | None) -> None:
        self._owner.forget(self)
        self.wake_socket.close(reason)

    def _free(self) -> None:
        with self._flag_lock:
            if self._freed:
                return
            self._freed = True
        self._segment.release()

    def abandon(self) -> None:
        """Releases descriptor and mapping without writing to the segment."""
        forked = CarrierLost("closed", "this process is a fork of the one that owns the carrier")
        self._life.ended = self._life.ended or forked
        self.wake_socket.abandon()
        if not self._freed:
            self._freed = True
            self._segment.release()
