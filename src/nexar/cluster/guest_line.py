"""The join line, on the side of the seed: one carrier from somebody who wants to join, or has joined.

What comes in is decoded and checked here and becomes an event of admission; what admission decides is said here. The
line reads nothing any more once its end has begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeAlias

from nexar.cluster.decisions import admission_events as events
from nexar.cluster.notary import Notary
from nexar.cluster.notice_board import NoticeBoard
from nexar.errors import UsageError, VersionMismatch
from nexar.security.identity import fingerprint
from nexar.security.proof import Role, make_nonce
from nexar.security.request import RequestedKey, RequestRefused, read_request
from nexar.transport.base import Carrier, CarrierLost
from nexar.transport.unhandled import unhandled
from nexar.types import NodeId, describe_peer
from nexar.wire import messages
from nexar.wire.bulletin import decode_bulletin
from nexar.wire.frame import Frame, Kind, Lane, control_header
from nexar.wire.handshake import HandshakeError, Hello, decode_hello
from nexar.wire.joining import (
    MAX_JOIN_BYTES,
    MAX_STRANGER_BYTES,
    Apply,
    AreYouThere,
    ChildDied,
    Connected,
    Here,
    Inquire,
    JoinMessage,
    Leave,
    Look,
    News,
    Ready,
    Renew,
    Renewed,
    Reserve,
    RunFailed,
    Shown,
    StartFailed,
    Watch,
    Word,
    decode_join,
    encode_join,
)

_CONTROL: Final = int(Kind.CONTROL)
_MOST_UNREAD_BYTES: Final = 8 * MAX_JOIN_BYTES
_Report: TypeAlias = Callable[[events.Event], None]


class _Nonsense(ValueError):
    """Something that nobody honest says here and now."""


class GuestLine:
    """A `Sink`. `report` is given the events, `ended` the line once its carrier is over; both without any lock."""

    def __init__(
        self,
        connection: int,
        carrier: Carrier,
        notary: Notary,
        *,
        board: NoticeBoard,
        report: _Report,
        ended: Callable[[GuestLine], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Reads nothing before `open`. `clock`: seconds since 1970."""
        self.connection: Final = connection
        self.address: Final = carrier.peer.address
        self.hello: Hello | None = None  # written by the driving thread
        self.admitted = False  # written by `admit`
        self._carrier = carrier
        self._notary = notary
        self._board = board
        self._watches = False  # written by `show`
        self._report = report
        self._ended = ended
        self._clock = clock
        self._nonce: Final = make_nonce()
        self._key: RequestedKey | None = None  # of a request whose sender has proven itself; by the driving thread
        self._parting = False  # by whoever ends it

    @property
    def node(self) -> NodeId:
        """Who it says it is; admission decides from when on that counts."""
        assert self.hello is not None
        return self.hello.node

    def open(self) -> None:
        """From now on read."""
        self._carrier.attach(self)

    # -- saying: any thread ------------------------------------------------------------------------------

    def send(self, message: JoinMessage) -> None:
        """Say it. On a line that is lost nothing is said, the loss is an event of its own; nor behind the last word."""
        self.send_body(encode_join(message))

    def send_body(self, body: bytes) -> None:
        """As `send`, of a message that was encoded once for many."""
        if self._parting:
            return
        try:
            self._carrier.send_frame(Lane.CONTROL, 0, control_header(len(body)), body)
        except CarrierLost:
            return

    def tell(self, body: bytes) -> None:
        """As `send_body`, of what is said unasked. Who does not read it is gone: nobody else waits for it."""
        if not self._parting and self._unread_bytes() > _MOST_UNREAD_BYTES:
            self._report(events.Gone(self.connection, "it does not read what the seed says"))
            self.abort("you do not read what the seed says")
            return
        self.send_body(body)

    def challenge(self) -> None:
        """Answer its hello."""
        assert self.hello is not None
        self.send(self._notary.challenge(self.hello, self._nonce))

    def admit(self) -> bytes:
        """It is no stranger any more: its certificate (PEM). UsageError when the authority has expired."""
        assert self._key is not None
        self.admitted = True
        self._carrier.admit()
        return self._notary.certify(self.node, self._key)

    def show(self) -> None:
        """It may look at the board from now on, and sees it."""
        self._watches = True
        self._carrier.admit()
        self.send(Shown(self._board.page()))

    def part(self) -> None:
        """End it politely: what was said still arrives. Who waits for the other side does so elsewhere."""
        self._parting = True
        try:
            self._carrier.finish()
        except CarrierLost:
            self._ended(self)

    def abort(self, reason: str) -> None:
        """End it now. Idempotent."""
        self._parting = True
        self._carrier.abort(reason)
        self._ended(self)

    # -- hearing: the driving thread ---------------------------------------------------------------------

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        """See Sink."""
        if self._parting:
            return
        try:
            event = self._read(frame, body)
        except VersionMismatch as mismatch:
            event = self._bad(f"it speaks protocol {mismatch.theirs}, the seed speaks protocol {mismatch.ours}")
        except (HandshakeError, RequestRefused, UsageError, _Nonsense) as error:
            event = self._bad(str(error))
        except Exception as fault:  # noqa: BLE001 - the boundary of reading; that of deciding and doing is in Doorway
            node = None if self.hello is None else self.hello.node
            event = self._bad(unhandled(describe_peer(None, node, self.address), fault))
        if event is not None:
            self._report(event)

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """See Sink. None is ever expected here."""

    def carrier_finished(self, carrier: Carrier) -> None:
        """See Sink. Without a farewell: it is gone. Our side of the end is said too, and that is all."""
        if not self._parting:
            self._report(events.Gone(self.connection, "it closed the line"))
            self.part()
        self._ended(self)

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        """See Sink. Who broke the protocol is refused, though it cannot be told any more."""
        if not self._parting:
            gone = self._bad(error.reason) if error.misbehaved else events.Gone(self.connection, error.reason)
            self._report(gone)
        self._ended(self)

    def _bad(self, reason: str) -> events.BadMessage:
        return events.BadMessage(self.connection, reason)

    def _read(self, frame: Frame, body: memoryview) -> events.Event | None:
        """What arrived, as an event; None: it was answered here."""
        if frame.kind != _CONTROL:
            raise _Nonsense(f"it sent a frame of kind {frame.kind} on the join line")
        if self.hello is None:
            self.hello = decode_hello(body)
            return events.Greeted(self.connection, self.hello)
        message = decode_join(body, MAX_JOIN_BYTES if self.admitted or self._watches else MAX_STRANGER_BYTES)
        match message:
            case Apply():
                examined = self._examine(message, "candidate", self.hello)
                return events.Applied(self.connection, message, *examined, self._clock())
            case Reserve():
                return events.Reserved(self.connection, message, *self._examine(message, "launcher", self.hello))
            case Watch():
                proven = self._notary.is_proven(message.proof, "onlooker", self.hello, self._nonce)
                return events.Watched(self.connection, proven)
        return self._read_insider(message)

    def _read_insider(self, message: JoinMessage) -> events.Event | None:
        """What only those say who are in; admission refuses it from the others."""
        match message:
            case Ready() | Connected() | StartFailed() | Inquire():
                return self._read_candidate(message)
            case Leave():
                return events.Left(self.connection, message.reason)
            case ChildDied() | RunFailed():
                return self._read_report(message)
            case Word():
                return self._read_word(message)
            case Here():
                return events.Answered(self.connection, message.number)
            case Renew() | AreYouThere() | News() | Look():
                self._answer(message)
                return None
        raise _Nonsense(f"it said {type(message).__name__}, which only a seed says")

    def _read_candidate(self, message: Ready | Connected | StartFailed | Inquire) -> events.Event:
        match message:
            case Ready():
                return events.Ready(self.connection)
            case Connected():
                return events.Connected(self.connection)
            case StartFailed():
                return events.StartFailed(self.connection, message.reason)
            case Inquire():
                return events.Inquired(self.connection)

    def _read_report(self, message: ChildDied | RunFailed) -> events.ChildDied | events.RunFailed:
        """Of a launcher."""
        if isinstance(message, RunFailed):
            return events.RunFailed(self.connection, message)
        return events.ChildDied(self.connection, message.rank, message.cause, message.well)

    def _read_word(self, message: Word) -> events.Said | None:
        """None for a word that this version does not know."""
        try:
            word = messages.decode(message.body)
        except messages.MessageError as error:
            raise _Nonsense(str(error)) from None
        return None if isinstance(word, messages.Unknown) else events.Said(self.connection, word)

    def _examine(self, message: Apply | Reserve, role: Role, hello: Hello) -> tuple[bool, bytes]:
        """Whether it knows the secret and, if so, the fingerprint of its key. RequestRefused, only if it does."""
        if self._key is not None:
            raise _Nonsense("it asked to be let in twice")
        if not self._notary.is_proven(message.proof, role, hello, self._nonce):
            return False, b""
        self._key = read_request(message.request, hello.node)
        return True, fingerprint(self._key)

    def _answer(self, message: Renew | AreYouThere | News | Look) -> None:
        if isinstance(message, Look):
            self._answer_onlooker(message)
        else:
            self._answer_insider(message)

    def _answer_onlooker(self, message: Look) -> None:
        if not self._watches:
            raise _Nonsense("it wanted to see the board, and has not proven that it may")
        if self._unread_bytes() > MAX_JOIN_BYTES:
            raise _Nonsense("it says Look and does not read the answers")
        self.send(Shown(self._board.page(message.first)))

    def _answer_insider(self, message: Renew | AreYouThere | News) -> None:
        if not self.admitted or self._key is None:
            raise _Nonsense(f"it said {type(message).__name__} before it was let in")
        if isinstance(message, News):
            bulletin = decode_bulletin(message.body)
            if bulletin is not None:
                self._board.pin(self.node, bulletin)  # of who is no member the board knows nothing
            return
        if self._unread_bytes() > MAX_JOIN_BYTES:
            raise _Nonsense(f"it says {type(message).__name__} and does not read the answers")
        self.send(Here(message.number) if isinstance(message, AreYouThere) else self._renew(message, self._key))

    def _renew(self, message: Renew, key: RequestedKey) -> Renewed:
        if fingerprint(read_request(message.request, self.node)) != fingerprint(key):
            raise _Nonsense("it asked for a certificate for another key than the one it joined with")
        return Renewed(self._notary.certify(self.node, key))

    def _unread_bytes(self) -> int:
        try:
            return self._carrier.queued_bytes(Lane.CONTROL)
        except CarrierLost:
            return 0  # the loss is an event of its own
