"""The seed's cryptography: it proves itself, checks who proves itself, and certifies keys. No I/O.

Law: for a stranger nothing is done that costs more than the hash of a few hundred bytes. A request for a certificate is
looked at, and signed, only after the proof beside it was right.

The join line, on the side of the seed: one carrier from somebody who wants to join, or has joined.

What comes in is decoded and checked here and becomes an event of admission; what admission decides is said here. The
line reads nothing any more once its end has begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, TypeAlias

from cryptography.hazmat.primitives.serialization import Encoding

from nexar.cluster.decisions import admission_events as events
from nexar.cluster.seed_status import StatusBoardService
from nexar.errors import UsageError, VersionMismatch
from nexar.security.authority import Authority
from nexar.security.certificates import CertificateRequestRefused, RequestedKey, fingerprint, read_request
from nexar.security.proof import Role, make_nonce, prove, proves
from nexar.transport.base import Carrier, CarrierLost
from nexar.transport.registry import log_unhandled
from nexar.types import NodeId, describe_peer
from nexar.wire import control
from nexar.wire.frame import Frame, FrameKind, Lane, control_header
from nexar.wire.hello import HandshakeError, Hello, decode_hello
from nexar.wire.join import (
    MAX_JOIN_BYTES,
    MAX_UNVERIFIED_BYTES,
    Challenge,
    ChildDied,
    Connected,
    FormationQuery,
    JoinMessage,
    JoinRequest,
    Leave,
    LivenessQuery,
    LivenessReply,
    Ready,
    Renew,
    Renewed,
    ReserveRanks,
    RunFailed,
    SeedPaxosMessage,
    StartFailed,
    StatusPageReply,
    StatusPageRequest,
    StatusUpdate,
    WatchStatus,
    decode_join,
    encode_join,
)
from nexar.wire.status import decode_status_report


@dataclass(frozen=True, slots=True)
class CertificateIssuer:
    """Knows the secret; it shows in no repr."""

    secret: bytes = field(repr=False)
    authority: Authority = field(repr=False)
    certificate: bytes = field(repr=False)
    """DER, of the leaf that the seed shows on every connection: proofs are good for that one alone."""
    lifetime: timedelta
    """Of the certificates it issues."""

    def challenge(self, hello: Hello, nonce: bytes) -> Challenge:
        """The answer to a hello, on the connection that has this nonce."""
        return Challenge(nonce, prove(self.secret, "seed", hello.nonce, nonce, self.certificate))

    def is_proven(self, proof: bytes, role: Role, hello: Hello, nonce: bytes) -> bool:
        """Whether who said `hello`, and was challenged with `nonce`, knows the secret."""
        return proves(proof, self.secret, role, hello.nonce, nonce, self.certificate)

    def certify(self, node: NodeId, key: RequestedKey) -> bytes:
        """A certificate, PEM. UsageError when the authority has expired."""
        return self.authority.issue(node, key, self.lifetime).public_bytes(Encoding.PEM)


_CONTROL: Final = int(FrameKind.CONTROL)
_MOST_UNREAD_BYTES: Final = 8 * MAX_JOIN_BYTES
_Report: TypeAlias = Callable[[events.AdmissionEvent], None]


class _ProtocolViolation(ValueError):
    """Something that nobody honest says here and now."""


class SeedConnection:
    """A `Sink`. `report` is given the events, `ended` the line once its carrier is over; both without any lock."""

    def __init__(
        self,
        connection: int,
        carrier: Carrier,
        issuer: CertificateIssuer,
        *,
        board: StatusBoardService,
        report: _Report,
        ended: Callable[[SeedConnection], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Reads nothing before `open`. `clock`: seconds since 1970."""
        self.connection: Final = connection
        self.address: Final = carrier.peer.address
        self.hello: Hello | None = None  # written by the driving thread
        self.admitted = False  # written by `admit`
        self._carrier = carrier
        self._issuer = issuer
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
            self._report(events.ConnectionEnded(self.connection, "it does not read what the seed says"))
            self.abort("you do not read what the seed says")
            return
        self.send_body(body)

    def challenge(self) -> None:
        """Answer its hello."""
        assert self.hello is not None
        self.send(self._issuer.challenge(self.hello, self._nonce))

    def admit(self) -> bytes:
        """It is no stranger any more: its certificate (PEM). UsageError when the authority has expired."""
        assert self._key is not None
        self.admitted = True
        self._carrier.admit()
        return self._issuer.certify(self.node, self._key)

    def show(self) -> None:
        """It may look at the board from now on, and sees it."""
        self._watches = True
        self._carrier.admit()
        self.send(StatusPageReply(self._board.page()))

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
        except (HandshakeError, CertificateRequestRefused, UsageError, _ProtocolViolation) as error:
            event = self._bad(str(error))
        except Exception as fault:  # noqa: BLE001 - the boundary of reading; that of deciding and doing is in Doorway
            node = None if self.hello is None else self.hello.node
            event = self._bad(log_unhandled(describe_peer(None, node, self.address), fault))
        if event is not None:
            self._report(event)

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """See Sink. None is ever expected here."""

    def carrier_finished(self, carrier: Carrier) -> None:
        """See Sink. Without a farewell: it is gone. Our side of the end is said too, and that is all."""
        if not self._parting:
            self._report(events.ConnectionEnded(self.connection, "it closed the line"))
            self.part()
        self._ended(self)

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        """See Sink. Who broke the protocol is refused, though it cannot be told any more."""
        if not self._parting:
            gone = (
                self._bad(error.reason) if error.misbehaved else events.ConnectionEnded(self.connection, error.reason)
            )
            self._report(gone)
        self._ended(self)

    def _bad(self, reason: str) -> events.BadMessage:
        return events.BadMessage(self.connection, reason)

    def _read(self, frame: Frame, body: memoryview) -> events.AdmissionEvent | None:
        """What arrived, as an event; None: it was answered here."""
        if frame.kind != _CONTROL:
            raise _ProtocolViolation(f"it sent a frame of kind {frame.kind} on the join line")
        if self.hello is None:
            self.hello = decode_hello(body)
            return events.HelloReceived(self.connection, self.hello)
        message = decode_join(body, MAX_JOIN_BYTES if self.admitted or self._watches else MAX_UNVERIFIED_BYTES)
        match message:
            case JoinRequest():
                examined = self._examine(message, "candidate", self.hello)
                return events.JoinRequested(self.connection, message, *examined, self._clock())
            case ReserveRanks():
                return events.RanksRequested(self.connection, message, *self._examine(message, "launcher", self.hello))
            case WatchStatus():
                proven = self._issuer.is_proven(message.proof, "onlooker", self.hello, self._nonce)
                return events.BoardRequested(self.connection, proven)
        return self._read_insider(message)

    def _read_insider(self, message: JoinMessage) -> events.AdmissionEvent | None:
        """What only those say who are in; admission refuses it from the others."""
        match message:
            case Ready() | Connected() | StartFailed() | FormationQuery():
                return self._read_candidate(message)
            case Leave():
                return events.LeaveReceived(self.connection, message.reason)
            case ChildDied() | RunFailed():
                return self._read_report(message)
            case SeedPaxosMessage():
                return self._read_word(message)
            case LivenessReply():
                return events.MemberAnswered(self.connection, message.number)
            case Renew() | LivenessQuery() | StatusUpdate() | StatusPageRequest():
                self._answer(message)
                return None
        raise _ProtocolViolation(f"it said {type(message).__name__}, which only a seed says")

    def _read_candidate(self, message: Ready | Connected | StartFailed | FormationQuery) -> events.AdmissionEvent:
        match message:
            case Ready():
                return events.JoinerReady(self.connection)
            case Connected():
                return events.MemberConnected(self.connection)
            case StartFailed():
                return events.StartFailureReported(self.connection, message.reason)
            case FormationQuery():
                return events.ProgressRequested(self.connection)

    def _read_report(self, message: ChildDied | RunFailed) -> events.ChildReported | events.RunFailureReported:
        """Of a launcher."""
        if isinstance(message, RunFailed):
            return events.RunFailureReported(self.connection, message)
        return events.ChildReported(self.connection, message.rank, message.cause, message.well)

    def _read_word(self, message: SeedPaxosMessage) -> events.MemberMessageReceived | None:
        """None for a word that this version does not know."""
        try:
            word = control.decode(message.body)
        except control.MessageError as error:
            raise _ProtocolViolation(str(error)) from None
        return None if isinstance(word, control.Unknown) else events.MemberMessageReceived(self.connection, word)

    def _examine(self, message: JoinRequest | ReserveRanks, role: Role, hello: Hello) -> tuple[bool, bytes]:
        """Whether it knows the secret and, if so, the fingerprint of its key. RequestRefused, only if it does."""
        if self._key is not None:
            raise _ProtocolViolation("it asked to be let in twice")
        if not self._issuer.is_proven(message.proof, role, hello, self._nonce):
            return False, b""
        self._key = read_request(message.request, hello.node)
        return True, fingerprint(self._key)

    def _answer(self, message: Renew | LivenessQuery | StatusUpdate | StatusPageRequest) -> None:
        if isinstance(message, StatusPageRequest):
            self._answer_onlooker(message)
        else:
            self._answer_insider(message)

    def _answer_onlooker(self, message: StatusPageRequest) -> None:
        if not self._watches:
            raise _ProtocolViolation("it wanted to see the board, and has not proven that it may")
        if self._unread_bytes() > MAX_JOIN_BYTES:
            raise _ProtocolViolation("it says Look and does not read the answers")
        self.send(StatusPageReply(self._board.page(message.first)))

    def _answer_insider(self, message: Renew | LivenessQuery | StatusUpdate) -> None:
        if not self.admitted or self._key is None:
            raise _ProtocolViolation(f"it said {type(message).__name__} before it was let in")
        if isinstance(message, StatusUpdate):
            bulletin = decode_status_report(message.body)
            if bulletin is not None:
                self._board.pin(self.node, bulletin)  # of who is no member the board knows nothing
            return
        if self._unread_bytes() > MAX_JOIN_BYTES:
            raise _ProtocolViolation(f"it says {type(message).__name__} and does not read the answers")
        self.send(
            LivenessReply(message.number) if isinstance(message, LivenessQuery) else self._renew(message, self._key)
        )

    def _renew(self, message: Renew, key: RequestedKey) -> Renewed:
        if fingerprint(read_request(message.request, self.node)) != fingerprint(key):
            raise _ProtocolViolation("it asked for a certificate for another key than the one it joined with")
        return Renewed(self._issuer.certify(self.node, key))

    def _unread_bytes(self) -> int:
        try:
            return self._carrier.queued_bytes(Lane.CONTROL)
        except CarrierLost:
            return 0  # the loss is an event of its own
