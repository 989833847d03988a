"""One connection between two doctors: questions are answered at once, times are taken as bytes come in.

Times are taken by the thread that drives the transports, in the sink: what it takes to wake the asker is no part of the
trip.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from nexar.cli.doctor.questions import Answer, Ask, Conclude, Hand, NotADoctor, Said, decode, encode
from nexar.transport.address import host_of
from nexar.transport.base import Carrier, CarrierLost
from nexar.wire.frame import Frame, Lane, control_header

QUESTIONS: Final = 16
_UDP_BYTES: Final = 8
_IPV4_BYTES: Final = 20
_IPV6_BYTES: Final = 40

Heard: TypeAlias = Callable[["Conversation", "Hand | Conclude"], None]


@dataclass(frozen=True, slots=True)
class Sounding:
    """The shortest of several trips, and what it says of the other clock."""

    round_trip: float
    skew: float


@dataclass(frozen=True, slots=True)
class _Heard:
    answer: Answer
    moment: float
    clock: float


def _header_bytes(address: str) -> int:
    """Of UDP and IP, in each datagram to this address."""
    host = host_of(address)
    return _UDP_BYTES + (_IPV6_BYTES if host is not None and ":" in host else _IPV4_BYTES)


class Conversation:
    """A `Sink`. What is no question goes to `heard`, on the driving thread. To close: `finish`, then await `ended`."""

    def __init__(self, carrier: Carrier, heard: Heard) -> None:
        self._carrier = carrier
        self._heard = heard
        self._answers: queue.SimpleQueue[_Heard | CarrierLost] = queue.SimpleQueue()
        self.ended: Final = threading.Event()
        carrier.attach(self)

    def sound(self, deadline: float) -> Sounding:
        """Ask several times. CarrierLost; TimeoutError at the deadline (time.monotonic)."""
        return min((self._ask(number, deadline) for number in range(QUESTIONS)), key=lambda found: found.round_trip)

    def _ask(self, number: int, deadline: float) -> Sounding:
        clock, begin = time.time(), time.perf_counter()
        self.say(Ask(number))
        try:
            heard = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError("connected, and no answer came") from None
        if isinstance(heard, CarrierLost):
            raise heard
        # The answer was written somewhere between our two looks at the clock: in the middle, if both ways are alike.
        return Sounding(heard.moment - begin, heard.answer.clock - (clock + heard.clock) / 2)

    def say(self, said: Said) -> None:
        """Raises CarrierLost."""
        body = encode(said)
        self._carrier.send_frame(Lane.CONTROL, 0, control_header(len(body)), body)

    def mtu_bytes(self) -> int | None:
        """Of the path, where the transport finds it out: what QUIC may put into a datagram, and the headers."""
        payload = self._carrier.stats().get("mtu")
        return None if payload is None else int(payload) + _header_bytes(self._carrier.peer.address)

    def finish(self) -> None:
        """Say no more: what was said still arrives."""
        try:
            self._carrier.finish()
        except CarrierLost:
            self.ended.set()  # it was over already

    # -- Sink: the driving thread ------------------------------------------------------------------------

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        """See Sink."""
        moment, clock = time.perf_counter(), time.time()
        try:
            said = decode(body)
        except NotADoctor as error:
            self._end(CarrierLost("misbehaved", f"a doctor was expected: {error}"))
            carrier.abort("this is a doctor, which speaks to doctors only")
            return
        if isinstance(said, Ask):
            self._answer(said, clock)
        elif isinstance(said, Answer):
            self._answers.put(_Heard(said, moment, clock))
        else:
            self._heard(self, said)

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """See Sink. None is ever expected here."""

    def carrier_finished(self, carrier: Carrier) -> None:
        """See Sink."""
        self._end(CarrierLost("peer", "the other doctor has left"))
        self.finish()

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        """See Sink."""
        self._end(error)

    def _answer(self, ask: Ask, clock: float) -> None:
        try:
            self.say(Answer(ask.number, clock))
        except CarrierLost as error:
            self._end(error)

    def _end(self, error: CarrierLost) -> None:
        self._answers.put(error)
        self.ended.set()
