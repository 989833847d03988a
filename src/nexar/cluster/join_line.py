"""The join line, on the side of the node that joins: the carrier to the seed, and what is said on it.

It stays open as long as the node is part of the cluster, so that the seed knows who is there, and certificates are
renewed over it. Nobody else is ever spoken to here, and nothing but join messages.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Final, TypeAlias, TypeVar

from nexar.errors import NexarError, VersionMismatch
from nexar.security.invitation import Invitation
from nexar.security.proof import Role, make_nonce, prove, proves
from nexar.transport.base import Carrier, CarrierLost
from nexar.types import NodeId
from nexar.wire.frame import Frame, Kind, Lane, control_header
from nexar.wire.handshake import HandshakeError, Hello, encode_hello
from nexar.wire.joining import (
    MAX_JOIN_BYTES,
    Challenge,
    JoinMessage,
    Leave,
    Refused,
    decode_join,
    encode_join,
)

_CONTROL: Final = int(Kind.CONTROL)
_MOST_WAITING: Final = 512  # messages that nobody has taken: who listens takes them at once
_Said = TypeVar("_Said")
_Received: TypeAlias = JoinMessage | NexarError | ConnectionError


class LineLost(ConnectionError):
    """The line to the seed is gone, or what comes over it makes no sense."""


class Impostor(ConnectionError):
    """Who answers at `address`, the seed's, does not know the secret."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(reason)
        self.address = address


class RefusedBySeed(ConnectionError):
    """The seed said no. `reason` is the seed's; `expelled`: the epoch since which this node is no member; 0: it was
    none, or left; `nobody_left`: every member has left or died.
    """

    def __init__(self, reason: str, expelled: int = 0, *, nobody_left: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.expelled = expelled
        self.nobody_left = nobody_left


class JoinLine:
    """One carrier to the seed. A `Sink`; messages wait until `receive` takes them. Close it, or `leave`."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._received: queue.SimpleQueue[_Received] = queue.SimpleQueue()  # put by the driving thread
        self.epoch = 0
        """Of the membership that the seed told on this line; 0: none yet. Written by who receives."""
        carrier.attach(self)

    @property
    def address(self) -> str:
        """Where the seed was reached."""
        return self._carrier.peer.address

    @property
    def scheme(self) -> str:
        """How."""
        return self._carrier.scheme

    def send(self, message: JoinMessage) -> None:
        """Raises LineLost."""
        self._send(encode_join(message))

    @property
    def unread_bytes(self) -> int:
        """What was sent and not yet taken by the system. LineLost."""
        try:
            return self._carrier.queued_bytes(Lane.CONTROL)
        except CarrierLost as loss:
            raise LineLost(f"the line to the seed is gone: {loss.reason}") from loss

    def receive(self, deadline: float) -> JoinMessage:
        """The next message. LineLost, VersionMismatch, RefusedBySeed; TimeoutError at the deadline (inf: none)."""
        try:
            left = max(0.0, deadline - time.monotonic())
            received = self._received.get(timeout=min(left, threading.TIMEOUT_MAX))
        except queue.Empty:
            raise TimeoutError(f"no word from the seed at {self.address}") from None
        if isinstance(received, Exception):
            self._received.put(received)  # it stays the last word
            raise received
        if isinstance(received, Refused):
            raise RefusedBySeed(received.reason, received.expelled, nobody_left=received.nobody_left)
        return received

    def expect(self, kind: type[_Said], deadline: float) -> _Said:
        """The next message, which must be of this kind: as `receive`."""
        message = self.receive(deadline)
        if not isinstance(message, kind):
            raise LineLost(f"the seed said {type(message).__name__} where {kind.__name__} was due")
        return message

    def prove_each_other(
        self, invitation: Invitation, node: NodeId, role: Role, capabilities: frozenset[str], deadline: float
    ) -> bytes:
        """Say hello, check the seed's proof, and return ours. Impostor before anything was said that depends on the
        secret; what else goes wrong as `receive`.
        """
        nonce = make_nonce()
        assert role != "seed"
        self._send(encode_hello(Hello(node=node, role=role, capabilities=capabilities, nonce=nonce)))
        challenge = self.expect(Challenge, deadline)
        certificate = self._carrier.peer.certificate or b"\0"  # a carrier without one proves nothing, and cannot match
        if not proves(challenge.proof, invitation.secret, "seed", nonce, challenge.nonce, certificate):
            self.close("you do not know the secret")
            raise Impostor(
                self.address,
                f"whoever answers at {self.address} cannot prove that it knows the secret: the ticket or token belongs "
                "to another cluster, or somebody stands between this node and the seed",
            )
        self._carrier.admit()
        return prove(invitation.secret, role, nonce, challenge.nonce, certificate)

    def leave(self, reason: str = "") -> None:
        """Tell the seed, politely; do not wait for it."""
        try:
            self.send(Leave(reason=reason))
            self._carrier.finish()
        except (LineLost, CarrierLost):
            return  # the seed is gone already: nobody to tell

    def interrupt(self) -> None:
        """End a `receive` that waits, with LineLost; also the next one. The line itself stays."""
        self._received.put(LineLost("this side stopped listening"))

    def close(self, reason: str) -> None:
        """Now. Idempotent."""
        self._carrier.abort(reason)

    def _send(self, body: bytes) -> None:
        try:
            self._carrier.send_frame(Lane.CONTROL, 0, control_header(len(body)), body)
        except CarrierLost as loss:
            raise LineLost(f"the line to the seed is gone: {loss.reason}") from loss

    # -- Sink: the driving thread ------------------------------------------------------------------------

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        """See Sink."""
        if frame.kind != _CONTROL:
            self._end(LineLost(f"the seed sent a frame of kind {frame.kind} on the join line"))
            return
        if self._received.qsize() >= _MOST_WAITING:
            self._end(LineLost("the seed says more than anybody asked for"))
            return
        try:
            self._received.put(decode_join(body, MAX_JOIN_BYTES))
        except VersionMismatch as mismatch:
            self._end(VersionMismatch(ours=mismatch.ours, theirs=mismatch.theirs, peer=f"the seed at {self.address}"))
        except HandshakeError as error:
            self._end(LineLost(f"the seed is not understood: {error}"))

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """See Sink. None is ever expected here."""

    def carrier_finished(self, carrier: Carrier) -> None:
        """See Sink. Finish too, so that the seed need not wait for us."""
        self._received.put(LineLost("the seed closed the line"))
        try:
            carrier.finish()
        except CarrierLost:
            return  # it has ended by itself

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        """See Sink."""
        self._received.put(LineLost(f"the line to the seed is gone: {error.reason}"))

    def _end(self, error: NexarError | ConnectionError) -> None:
        self._received.put(error)
        self._carrier.abort(str(error))
