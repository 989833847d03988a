"""The contract of every transport, on one page.

A *transport* belongs to one node and makes *carriers*; a carrier is an open, mutually authenticated
connection to one peer process. It moves two things:

frames    small, copied when sent. Reliable. In order per (lane, communicator); nothing is promised
          between different lanes or communicators, and a carrier lets a lower lane number leave first.
          The number of bytes in flight is bounded by the sender's credit (see links/), not here.
payloads  large, named by a `transfer` number that the sending link chose, read straight from the
          sender's memory and written straight into the receiver's, which must have been expected
          *before* the peer was told to send. A payload never delays frames by more than one chunk.

Driving   Nothing moves by itself. One thread at a time (links/progress) *drives*: it calls `poll()`,
          which never blocks, takes in what arrived, calls the sinks, and sends what is due. Before it
          sleeps it calls `arm()`; descriptors registered with the Waker end the sleep.
          `send_frame`, `send_payload` and the other verbs may be called from any thread at any time,
          also from inside a sink call; they send at once what the carrier takes and leave the rest to
          the next poll. They never block and never call a sink.
Sinks     are called by the driving thread, with no lock of the transport held, never two at a time for
          one carrier, and never after `abort()` returned to a thread that is not itself inside a sink.
          A sink may hand its carrier over: `attach` called again, from inside a call of the present sink, makes the
          other one the sink of everything that follows; nothing is lost, nothing more goes to the old one.
          What a sink, or an acceptor that was given a carrier, raises comes out of `poll()` (or `sleep()`). It
          costs the carrier it concerned, which is lost with `fault` and says so to its sink if it has one;
          every other carrier of the transport goes on at the next poll.
Loss      A carrier ends once: by `carrier_finished` on both sides (polite), or by `carrier_lost` with the
          reason. After that every verb but abort raises that same CarrierLost (finish too). Nothing is
          retransmitted on another carrier here; frames sent but not delivered are gone. A payload that is
          not whole when the peer half-closes was taken back: it is dropped, never reported.
Buffers   When `redirect_payload` or `withdraw_payload` has returned, or the carrier has ended, the old
          memory is not touched any more.
Garbage   Bytes that are not frames, a chunk nobody expects, a frame above its limit: the carrier is lost
          with `misbehaved` set; memory committed to a peer follows the bytes that really arrived.
Strangers A peer that the handshake has not verified may send CONTROL frames on the control lane, each with at
          most STRANGER_BYTES of body, and nothing else: whatever its header announces beyond that is garbage
          before a byte of it is read. That holds on the side that dialed as well. `admit()` ends it.

The sink of a carrier that has ended, or whose owner wants to hear no more.

An ended carrier that kept its sink would be a ring with it: neither would be freed before the collector finds both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol, TypeAlias

from nexar.security.certificates import Credentials, Trust
from nexar.wire.frame import Frame, Lane

Buffer: TypeAlias = bytes | bytearray | memoryview


class CarrierLost(ConnectionError):
    """The carrier is gone. `kind` says how, so that the layer above need not read the text.

    closed      this side aborted it, or it ended politely
    peer        the peer ended it, or its process is gone
    timeout     silence for longer than the transport allows
    misbehaved  the peer broke the protocol
    fault       the local system refused (out of descriptors, memory, …)
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{reason} [{kind}]")
        self.kind = kind
        self.reason = reason

    @property
    def misbehaved(self) -> bool:
        return self.kind == "misbehaved"


class ConnectRefused(ConnectionError):
    """A carrier could not be made.

    `reason` is text; `verification` tells a refused certificate from a network that says no.
    """

    def __init__(self, address: str, reason: str, *, verification: bool = False) -> None:
        super().__init__(f"cannot connect to {address}: {reason}")
        self.address = address
        self.reason = reason
        self.verification = verification


class Redirected(Enum):
    """What redirect_payload found."""

    MOVED = "moved"
    """What had arrived was moved, the rest follows it (or is discarded)."""
    LANDED = "landed"
    """Too late: every byte is in the old memory, and payload_arrived has been or will be called. (Remembered until it
    has been, and for some thousand payloads longer; then unknown.)"""
    UNKNOWN = "unknown"
    """No such payload is expected (any more): it was discarded before, or never announced."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who the handshake proved to be at the other end.

    `verified` is False only for a joining candidate (no certificate) or a dial that left verification to its caller;
    such a peer is a stranger (see the module), and the layer above confines its carrier to join messages.
    """

    node: int
    certificate: bytes | None
    verified: bool
    address: str


@dataclass(frozen=True, slots=True)
class Expected:
    """Whom a dial means to reach: the node the certificate must name and, where known, its pinned key."""

    node: int
    fingerprint: bytes | None = None
    anonymous: bool = False
    """Show no certificate although this node has one: it joins, and is a stranger to the other side. Without meaning
    where no certificates are shown and every peer is verified by other means (shared memory)."""
    plain: bool = False
    """Go on without encryption once both are authenticated: only where the transport can, and the other side agrees."""


class Sink(Protocol):
    """What a carrier calls as things happen (a Link, in practice)."""

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        """A whole frame. `body` is valid during the call only. CHUNK, FINISH and HELLO never get here."""

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """Every byte of an expected payload is in its destination."""

    def carrier_finished(self, carrier: Carrier) -> None:
        """The peer half-closed, and everything it sent before has been delivered."""

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        """The end. Called exactly once unless both sides finished."""


class Acceptor(Protocol):
    """Receives inbound carriers."""

    def carrier_accepted(self, carrier: Carrier) -> None:
        """A peer dialed us and its handshake succeeded. Attach a sink, or abort; until then nothing is read from it."""

    def candidate_refused(self, address: str, reason: str) -> None:
        """An inbound handshake failed. Told, so that somebody can say who knocked and why it was not let in."""


class Waker(Protocol):
    """Ends the driving thread's sleep; given to each transport when it is made. Callable from any thread."""

    def watch(self, descriptor: int, *, readable: bool = True, writable: bool = False) -> None:
        """Wake when the descriptor is ready (level-triggered).

        Again for the same descriptor: replaces what is watched.
        """

    def unwatch(self, descriptor: int) -> None:
        """Must be called before the descriptor is closed."""

    def wake(self) -> None:
        """Wake now: something changed that no descriptor shows."""


class Sleeper(Waker, Protocol):
    """The one thing of a node that its driving thread sleeps in."""

    def sleep(self, timeout: float, spin: float) -> None:
        """Return when a watched descriptor is ready, somebody kicked, or `timeout` seconds have passed; `spin` seconds
        of it are spent yielding rather than sleeping, where the sleeper knows how to look for news meanwhile. Releases
        the GIL, runs signal handlers (Ctrl-C raises). May drive its own transport meanwhile (QUIC does), calling
        sinks.
        """


class Carrier(ABC):
    """One open connection to one peer process. See the module's law."""

    scheme: str
    peer: Peer
    dialed: bool
    """True on the side that dialed."""

    @abstractmethod
    def attach(self, sink: Sink) -> None:
        """From now on deliver to `sink`. Called before anything can be lost: nothing is read before it. Called again
        only from inside a call of the sink it has: see the module's law on handing over.
        """

    def admit(self) -> None:  # noqa: B027 - where every peer is verified there is nothing to do
        """The layer above has authenticated this peer by other means: it is no stranger any more, the usual limits
        hold from the next frame on. Callable from any thread; without effect on a verified peer, and once it has ended.
        """

    @abstractmethod
    def send_frame(self, lane: Lane, communicator: int, header: bytes, *body: Buffer) -> None:
        """Copy and send one frame (`header` says the size of the joined body). Raises CarrierLost."""

    @abstractmethod
    def queued_bytes(self, lane: Lane) -> int:
        """Frames of this lane accepted but not yet taken by the system or the protocol."""

    @abstractmethod
    def expect_payload(self, transfer: int, into: memoryview) -> None:
        """The peer may now be told to send payload `transfer`; it lands in `into` (writable, contiguous bytes)."""

    @abstractmethod
    def redirect_payload(self, transfer: int, into: memoryview | None) -> Redirected:
        """Let the rest of an expected payload land elsewhere (same size), moving what has arrived; None: discard it.

        On return the old memory is free. A discarded payload is not reported any more. Raises CarrierLost.
        """

    @abstractmethod
    def send_payload(self, transfer: int, data: memoryview) -> None:
        """Send `data` (contiguous bytes), which stays borrowed until the link withdraws it, learns that it was
        delivered (the peer's link says so in a frame), or the carrier ends. Raises CarrierLost.
        """

    @abstractmethod
    def withdraw_payload(self, transfer: int) -> None:
        """Stop sending.

        On return the memory is free. The peer is told by the link, not here; unknown transfers are ignored.
        """

    @abstractmethod
    def finish(self) -> None:
        """Half-close: what was sent before still goes, then the peer's sink gets carrier_finished.

        Receiving goes on. Idempotent. When both sides have finished, the carrier is closed and its resources are
        freed.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End it now, telling the peer if that costs nothing; queued frames may be lost.

        This side's sink is not called. Idempotent; later verbs raise CarrierLost("closed", reason).
        """

    def wake_peer(self) -> None:  # noqa: B027 - most carriers share no memory
        """Wake the peer if it sleeps: something changed in memory that both share beside the carrier, and the caller
        has fenced. Without effect on carriers that share none.
        """

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Counters of this carrier (bytes_sent, bytes_received, frames_sent, frames_received, and what the transport
        adds).
        """


class Transport(ABC):
    """A node's way to make carriers of one scheme."""

    scheme: str
    """Its carriers have the same; a link tells them apart by it."""
    address: str | None = None
    """Where we listen, as `listen` returned it."""

    def replace_credentials(self, credentials: Credentials, trust: Trust) -> None:  # noqa: B027 - not all show any
        """Show and believe these from now on: newcomers are judged by them and dials use them, carriers that exist are
        not touched. Callable from any thread. Default: a scheme without certificates has nothing to do.
        """

    def expect_peers(self, count: int) -> None:  # noqa: B027 - not all meet strangers
        """So many peers may dial at once; limits for connections that have not authenticated follow from it. Callable
        from any thread, also when the transport is closed. Default: the scheme has no such limit.
        """

    @abstractmethod
    def listen(self, address: str, acceptor: Acceptor) -> str:
        """Accept dials on `address`; returns the real one (port 0 resolved) in the form `connect` takes.

        OSError if it cannot.
        """

    def address_for(self, node: int) -> str | None:
        """What that peer must be given to dial us: None while not listening.

        Only schemes whose address holds a secret make it per peer.
        """
        return self.address

    @abstractmethod
    def connect(self, address: str, expected: Expected, deadline: float) -> Carrier:
        """Dial and authenticate, both ways, or raise ConnectRefused (TimeoutError at the deadline, of time.monotonic).
        Blocks its caller, needs nobody to drive, and may run in several threads at once. Interruptible by Ctrl-C, and
        ended with ConnectRefused when another thread closes the transport.

        Where addresses are host:port, `address` may be several, separated by commas, and a name may stand for several:
        they are dialed side by side, and the first that answers is taken (see transport.race). If none does, the error
        has the reason of each, and `verification` if it was one of them.
        """

    @abstractmethod
    def poll(self) -> bool:
        """Drive once without blocking. True if anything happened. Only ever called by one thread at a time."""

    @property
    def spins(self) -> bool:
        """True while news may come without any descriptor showing it at once (shared memory), so that looking again
        beats sleeping.
        """
        return False

    def prepare_sleep(self) -> bool:
        """About to sleep: make sure a descriptor will end it.

        False: do not sleep, something has come. Default: nothing to do.
        """
        return True

    def due(self) -> float | None:
        """When poll() must be called again at the latest (time.monotonic), None if nothing is timed."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Abort every carrier, stop listening, free everything. Idempotent."""

    @abstractmethod
    def abandon(self) -> None:
        """In a forked child: close the descriptors, tell nobody, touch nothing shared with the parent."""


class _Silent:
    """Hears everything and does nothing."""

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        """Dropped."""

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """Dropped."""

    def carrier_finished(self, carrier: Carrier) -> None:
        """Dropped."""

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        """Dropped."""


SILENT_SINK: Final[Sink] = _Silent()
