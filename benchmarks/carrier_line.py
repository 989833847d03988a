"""Benchmark talker over a bare carrier: frames for small messages, payloads for large ones, no link.

The receiver expects two payloads at a time and grants each with a frame; it confirms when all have arrived. Sinks may
send, so no step waits for the main loop.
"""

from __future__ import annotations

from memory import touched

from nexar.transport.base import Carrier, CarrierLost
from nexar.wire.frame import Frame, FrameKind, Lane, encode
from nexar_tools.bare_nodes import RawNode

TIMEOUT = 60.0
WINDOW = 2
_GRANT = encode(Frame(kind=FrameKind.GRANT, lane=Lane.DATA))
_DELIVERED = encode(Frame(kind=FrameKind.DELIVERED, lane=Lane.DATA))


class CarrierTalker:
    """Implements Talker; also the carrier's sink."""

    def __init__(self, node: RawNode, carrier: Carrier) -> None:
        self._node, self._carrier = node, carrier
        self._lost: CarrierLost | None = None
        self._expected = self._heard = 0
        self._grants = 0  # payloads the peer is ready for
        self._unsent = self._unreceived = 0
        self._delivered = True  # nothing of ours is in flight
        self._next_out = self._next_in = 1  # transfer numbers
        self._buffers: list[memoryview] = []
        self._data = memoryview(b"")
        carrier.attach(self)

    def prepare(self, size: int) -> None:
        self.outgoing, self.incoming = memoryview(bytearray(size)), memoryview(bytearray(size))
        self._header = encode(Frame(kind=FrameKind.EAGER, lane=Lane.DATA, length=size, body=size))

    def expect(self) -> None:
        self._expected += 1

    def say(self) -> None:
        self._carrier.send_frame(Lane.DATA, 0, self._header, self.outgoing)

    def hear(self) -> None:
        self._node.drive(self._everything_heard, TIMEOUT)

    def stream(self, size: int, out: int, into: int) -> None:
        self._data = touched(size)
        self._buffers = [touched(size, 1 + number) for number in range(WINDOW)] if into else []
        self._unreceived, self._unsent, self._delivered = into, out, not out
        for _ in range(min(WINDOW, into)):
            self._ready_for_one()
        self._send_granted()
        self._node.drive(self._streamed, TIMEOUT)

    def _everything_heard(self) -> bool:
        self._check()
        return self._heard >= self._expected

    def _streamed(self) -> bool:
        self._check()
        return self._delivered and not self._unreceived

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _ready_for_one(self) -> None:
        self._carrier.expect_payload(self._next_in, self._buffers[self._next_in % WINDOW])
        self._next_in += 1
        self._carrier.send_frame(Lane.DATA, 0, _GRANT)

    def _send_granted(self) -> None:
        while self._grants and self._unsent:
            self._grants -= 1
            self._unsent -= 1
            self._carrier.send_payload(self._next_out, self._data)
            self._next_out += 1

    # -- Sink ------------------------------------------------------------------------------------------

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        if frame.kind == FrameKind.EAGER:
            self.incoming[:] = body
            self._heard += 1
        elif frame.kind == FrameKind.GRANT:
            self._grants += 1
            self._send_granted()
        else:
            self._delivered = True

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        self._unreceived -= 1
        if self._unreceived >= WINDOW:
            self._ready_for_one()
        elif not self._unreceived:
            carrier.send_frame(Lane.DATA, 0, _DELIVERED)

    def carrier_finished(self, carrier: Carrier) -> None:
        self._lost = CarrierLost("peer", "the peer finished in the middle of a measurement")

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        self._lost = error
