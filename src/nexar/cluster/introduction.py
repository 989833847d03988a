"""The first words on a connection between two members: which place each holds, and in which membership.

    dialer                                   answerer
    Introduce(rank, epoch) ────────────────→  checks the pin, the rank and the epoch
          ←──────────────────────────────── Introduced(rank, epoch), or Declined
    anything else ─────────────────────────→  now it is a link here too

Law: the answerer makes a link of the connection when it has said Introduced and the dialer says anything more, and
says nothing else itself before that; the dialer makes a link of it when it hears Introduced. Lanes are not ordered
among one another, so this way no frame of a link can come before the link. Who goes on without having been welcomed
broke the protocol: a connection that was declined never becomes a link.

Who the other one is, the handshake of the transport has proven; what it claims here is compared with the membership.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

from nexar.transport.base import Carrier, CarrierLost
from nexar.transport.unhandled import unhandled
from nexar.types import describe_peer
from nexar.wire.frame import Frame, Kind, Lane, control_header
from nexar.wire.messages import Declined, Introduce, Introduced, Message, MessageError, Unknown
from nexar.wire.messages import decode as decode_message
from nexar.wire.messages import encode as encode_message

_CONTROL: Final = int(Kind.CONTROL)


def say(carrier: Carrier, message: Message) -> None:
    """Send a control message on a connection that is no link yet. Raises CarrierLost."""
    body = encode_message(message)
    carrier.send_frame(Lane.CONTROL, 0, control_header(len(body)), body)


def decline(carrier: Carrier, reason: str, *, superseded: bool = False, expelled: int = 0) -> None:
    """Say why not, and close politely: the other side reads it, then closes too."""
    try:
        say(carrier, Declined(reason=reason, superseded=superseded, expelled=expelled))
        carrier.finish()
    except CarrierLost:
        return  # it is gone already: nobody to tell


class Dialed:
    """The dialer's sink until the answer is here. `answered` gets the answer, or why there is none; once, on the
    driving thread, from inside the sink call: there a link may take the carrier over.
    """

    def __init__(self, carrier: Carrier, introduce: Introduce, answered: Answered) -> None:
        self._answered = answered
        self._done = False  # the driving thread writes
        carrier.attach(self)
        say(carrier, introduce)

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        """See Sink."""
        answer = _read(frame, body)
        try:
            if isinstance(answer, (Introduced, Declined)):
                self._tell(carrier, answer)
            else:
                self._tell(carrier, CarrierLost("misbehaved", f"it answered an introduction with {_name(answer)}"))
        except Exception as fault:  # noqa: BLE001 - the boundary of what an answer can do here
            carrier.abort(unhandled(_who(carrier), fault))

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """See Sink. None is expected."""

    def carrier_finished(self, carrier: Carrier) -> None:
        """See Sink."""
        self._tell(carrier, CarrierLost("peer", "it closed the connection"))
        try:
            carrier.finish()
        except CarrierLost:
            return  # it ended by itself

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        """See Sink."""
        self._tell(carrier, error)

    def _tell(self, carrier: Carrier, answer: Introduced | Declined | CarrierLost) -> None:
        if not self._done:
            self._done = True
            self._answered(carrier, answer)


class _Stage(Enum):
    """How far an answerer is."""

    NEW = "new"  # nothing was said
    JUDGED = "judged"  # the introduction is here, its answer is not said yet
    WELCOME = "welcome"  # Introduced was said
    OVER = "over"  # declined, handed over or ended


class Answering:
    """The answerer's sink until the connection is a link, or nothing. `introduced` is called with the first word;
    then, at once or later and from any thread, `welcome` or `decline` says the answer. `confirmed` is called when a
    dialer that was welcomed goes on: it must hand the carrier over, and gets the frame for the new sink. If it never
    comes to that, `ended` is called.
    """

    def __init__(
        self, carrier: Carrier, introduced: Heard, confirmed: Confirmed, ended: Callable[[Answering], None]
    ) -> None:
        self.carrier: Final = carrier
        self._introduced = introduced
        self._confirmed = confirmed
        self._ended = ended
        self.is_sidecar = False
        """What it has introduced itself as."""
        self._stage = _Stage.NEW  # the driving thread writes; from JUDGED on who answers, once
        carrier.attach(self)

    def welcome(self, answer: Introduced) -> None:
        """The dialer is who the membership says."""
        self._stage = _Stage.WELCOME  # before it is said: what follows may come at once
        try:
            say(self.carrier, answer)
        except CarrierLost:
            return  # the sink hears of it

    def decline(self, reason: str, *, superseded: bool = False, expelled: int = 0) -> None:
        """It is not, or its dial is not wanted. The carrier ends when the dialer has closed its side."""
        self._stage = _Stage.OVER
        decline(self.carrier, reason, superseded=superseded, expelled=expelled)

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        """See Sink."""
        try:
            self._take(frame, body)
        except Exception as fault:  # noqa: BLE001 - the boundary of what a dialer's frame can do here
            self._end(unhandled(_who(carrier), fault))

    def _take(self, frame: Frame, body: memoryview) -> None:
        if self._stage is _Stage.NEW:
            self._read_introduction(frame, body)
        elif self._stage is _Stage.WELCOME:
            self._stage = _Stage.OVER
            self._confirmed(self, frame, body)
        else:
            self._end("you went on without having been welcomed")

    def _read_introduction(self, frame: Frame, body: memoryview) -> None:
        message = _read(frame, body)
        if not isinstance(message, Introduce):
            self._end(f"you said {_name(message)} before introducing yourself")
            return
        self.is_sidecar = message.sidecar
        self._stage = _Stage.JUDGED
        self._introduced(self, message)

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """See Sink. None is expected."""

    def carrier_finished(self, carrier: Carrier) -> None:
        """See Sink. It has read that it was declined, or changed its mind."""
        self._end("you closed the connection before it was a link")

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        """See Sink. Nothing depended on it yet."""
        self._stage = _Stage.OVER
        self._ended(self)

    def _end(self, reason: str) -> None:
        self._stage = _Stage.OVER
        self.carrier.abort(reason)
        self._ended(self)


Answered = Callable[[Carrier, Introduced | Declined | CarrierLost], None]
Heard = Callable[[Answering, Introduce], None]
Confirmed = Callable[[Answering, Frame, memoryview], None]


def _read(frame: Frame, body: memoryview) -> Message | Unknown | None:
    if frame.kind != _CONTROL:
        return None
    try:
        return decode_message(body)
    except MessageError:
        return None


def _who(carrier: Carrier) -> str:
    return describe_peer(None, carrier.peer.node, carrier.peer.address)


def _name(message: Message | Unknown | None) -> str:
    return "nonsense" if message is None or isinstance(message, Unknown) else type(message).__name__
