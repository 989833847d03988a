"""One join connection at the seed, and the issuer of certificates. Messages become admission events.

Invariant: an unauthenticated peer costs no more than hashing a few hundred bytes. A certificate request is parsed and
signed only after its proof was verified.
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
    """Proves the seed, verifies proofs, signs certificates. Its repr hides the secret."""

    secret: bytes = field(repr=False)
    authority: Authority = field(repr=False)
    certificate: bytes = field(repr=False)  # DER, shown on every connection; proofs are bound to it
    lifetime: timedelta  # of issued certificates

    def challenge(self, hello: Hello, nonce: bytes) -> Challenge:
        return Challenge(nonce, prove(self.secret, "seed", hello.nonce, nonce, self.certificate))

    def is_proven(self, proof: bytes, role: Role, hello: Hello, nonce: bytes) -> bool:
        return proves(proof, self.secret, role, hello.nonce, nonce, self.certificate)

    def certify(self, node: NodeId, key: RequestedKey) -> bytes:
        """PEM. Raises UsageError when the authority has expired."""
        return self.authority.issue(node, key, self.lifetime).public_bytes(Encoding.PEM)


_CONTROL: Final = int(FrameKind.CONTROL)
_MAX_UNREAD_BYTES: Final = 8 * MAX_JOIN_BYTES
_Report: TypeAlias = Callable[[events.AdmissionEvent], None]


class _ProtocolViolation(ValueError):
    """No correct peer sends this now."""


class SeedConnection:
    """The `Sink` of one join connection. Calls `report` and `ended` without a lock. Reads nothing once its end has
    begun.
    """

    def __init__(
        self,
        number: int,
        carrier: Carrier,
        issuer: CertificateIssuer,
        *,
        board: StatusBoardService,
        report: _Report,
        ended: Callable[[SeedConnection], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Reads nothing before `open`. `clock`: seconds since 1970."""
        self.number: Final = number
        self.address: Final = carrier.peer.address
        self.hello: Hello | None = None  # written by the driver
        self.admitted = False  # written by `admit`
        self._carrier = carrier
        self._issuer = issuer
        self._board = board
        self._watches = False  # written by `show_board`
        self._report = report
        self._ended = ended
        self._clock = clock
        self._nonce: Final = make_nonce()
        self._key: RequestedKey | None = None  # of an authenticated request; written by the driver
        self._ending = False  # written by the thread that ends it

    @property
    def node(self) -> NodeId:
        """As claimed, until admission."""
        assert self.hello is not None
        return self.hello.node

    def open(self) -> None:
        self._carrier.attach(self)

    # -- sending: any thread -----------------------------------------------------------------------------

    def send(self, message: JoinMessage) -> None:
        """Ignored during the end and after a loss."""
        self.send_body(encode_join(message))

    def send_body(self, body: bytes) -> None:
        """`send`, encoded once for many."""
        if self._ending:
            return
        try:
            self._carrier.send_frame(Lane.CONTROL, 0, control_header(len(body)), body)
        except CarrierLost:
            return

    def notify(self, body: bytes) -> None:
        """`send_body`, unrequested. A peer that does not read is dropped."""
        if not self._ending and self._unread_bytes() > _MAX_UNREAD_BYTES:
            self._report(events.ConnectionEnded(self.number, "it does not read what the seed sends"))
            self.abort("you do not read what the seed sends")
            return
        self.send_body(body)

    def challenge(self) -> None:
        assert self.hello is not None
        self.send(self._issuer.challenge(self.hello, self._nonce))

    def admit(self) -> bytes:
        """Returns the certificate (PEM). Raises UsageError when the authority has expired."""
        assert self._key is not None
        self.admitted = True
        self._carrier.admit()
        return self._issuer.certify(self.node, self._key)

    def show_board(self) -> None:
        self._watches = True
        self._carrier.admit()
        self.send(StatusPageReply(self._board.page()))

    def finish(self) -> None:
        """Sent messages still arrive. Does not wait."""
        self._ending = True
        try:
            self._carrier.finish()
        except CarrierLost:
            self._ended(self)

    def abort(self, reason: str) -> None:
        """Idempotent."""
        self._ending = True
        self._carrier.abort(reason)
        self._ended(self)

    # -- receiving: the driver ---------------------------------------------------------------------------

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        if self._ending:
            return
        try:
            event = self._read(frame, body)
        except VersionMismatch as mismatch:
            event = self._bad(f"it speaks protocol {mismatch.theirs}, the seed speaks protocol {mismatch.ours}")
        except (HandshakeError, CertificateRequestRefused, UsageError, _ProtocolViolation) as error:
            event = self._bad(str(error))
        except Exception as fault:  # noqa: BLE001 - decoding must not raise into the transport
            node = None if self.hello is None else self.hello.node
            event = self._bad(log_unhandled(describe_peer(None, node, self.address), fault))
        if event is not None:
            self._report(event)

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """Not expected."""

    def carrier_finished(self, carrier: Carrier) -> None:
        # Without a Leave message the peer is gone.
        if not self._ending:
            self._report(events.ConnectionEnded(self.number, "it closed the connection"))
            self.finish()
        self._ended(self)

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        # A protocol violation counts as a refusal, although the peer cannot be notified.
        if not self._ending:
            gone = self._bad(error.reason) if error.misbehaved else events.ConnectionEnded(self.number, error.reason)
            self._report(gone)
        self._ended(self)

    def _bad(self, reason: str) -> events.BadMessage:
        return events.BadMessage(self.number, reason)

    def _read(self, frame: Frame, body: memoryview) -> events.AdmissionEvent | None:
        """None if the message was answered here."""
        if frame.kind != _CONTROL:
            raise _ProtocolViolation(f"it sent a frame of kind {frame.kind} on the join connection")
        if self.hello is None:
            self.hello = decode_hello(body)
            return events.HelloReceived(self.number, self.hello)
        message = decode_join(body, MAX_JOIN_BYTES if self.admitted or self._watches else MAX_UNVERIFIED_BYTES)
        match message:
            case JoinRequest():
                examined = self._examine(message, "candidate", self.hello)
                return events.JoinRequested(self.number, message, *examined, self._clock())
            case ReserveRanks():
                return events.RanksRequested(self.number, message, *self._examine(message, "launcher", self.hello))
            case WatchStatus():
                proven = self._issuer.is_proven(message.proof, "onlooker", self.hello, self._nonce)
                return events.BoardRequested(self.number, proven)
        return self._read_admitted(message)

    def _read_admitted(self, message: JoinMessage) -> events.AdmissionEvent | None:
        # Admission refuses these from unauthenticated peers.
        match message:
            case Ready() | Connected() | StartFailed() | FormationQuery():
                return self._read_candidate(message)
            case Leave():
                return events.LeaveReceived(self.number, message.reason)
            case ChildDied() | RunFailed():
                return self._read_report(message)
            case SeedPaxosMessage():
                return self._read_paxos(message)
            case LivenessReply():
                return events.MemberAnswered(self.number, message.number)
            case Renew() | LivenessQuery() | StatusUpdate() | StatusPageRequest():
                self._answer(message)
                return None
        raise _ProtocolViolation(f"it sent {type(message).__name__}, which only a seed sends")

    def _read_candidate(self, message: Ready | Connected | StartFailed | FormationQuery) -> events.AdmissionEvent:
        match message:
            case Ready():
                return events.JoinerReady(self.number)
            case Connected():
                return events.MemberConnected(self.number)
            case StartFailed():
                return events.StartFailureReported(self.number, message.reason)
            case FormationQuery():
                return events.ProgressRequested(self.number)

    def _read_report(self, message: ChildDied | RunFailed) -> events.ChildReported | events.RunFailureReported:
        if isinstance(message, RunFailed):
            return events.RunFailureReported(self.number, message)
        return events.ChildReported(self.number, message.rank, message.cause, message.well)

    def _read_paxos(self, message: SeedPaxosMessage) -> events.MemberMessageReceived | None:
        """None for a type unknown to this version."""
        try:
            inner = control.decode(message.body)
        except control.MessageError as error:
            raise _ProtocolViolation(str(error)) from None
        return None if isinstance(inner, control.Unknown) else events.MemberMessageReceived(self.number, inner)

    def _examine(self, message: JoinRequest | ReserveRanks, role: Role, hello: Hello) -> tuple[bool, bytes]:
        """Whether it knows the secret, and its key's fingerprint. Raises CertificateRequestRefused only if it does."""
        if self._key is not None:
            raise _ProtocolViolation("it asked to join twice")
        if not self._issuer.is_proven(message.proof, role, hello, self._nonce):
            return False, b""
        self._key = read_request(message.request, hello.node)
        return True, fingerprint(self._key)

    def _answer(self, message: Renew | LivenessQuery | StatusUpdate | StatusPageRequest) -> None:
        if isinstance(message, StatusPageRequest):
            self._answer_observer(message)
        else:
            self._answer_admitted(message)

    def _answer_observer(self, message: StatusPageRequest) -> None:
        if not self._watches:
            raise _ProtocolViolation("it requested the status board without a proof of the secret")
        if self._unread_bytes() > MAX_JOIN_BYTES:
            raise _ProtocolViolation("it requests the status board and does not read the answers")
        self.send(StatusPageReply(self._board.page(message.first)))

    def _answer_admitted(self, message: Renew | LivenessQuery | StatusUpdate) -> None:
        if not self.admitted or self._key is None:
            raise _ProtocolViolation(f"it sent {type(message).__name__} before it was admitted")
        if isinstance(message, StatusUpdate):
            status = decode_status_report(message.body)
            if status is not None:
                self._board.update_report(self.node, status)  # ignored for nodes that are not members
            return
        if self._unread_bytes() > MAX_JOIN_BYTES:
            raise _ProtocolViolation(f"it sends {type(message).__name__} and does not read the answers")
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
            return 0  # the loss is a separate event
