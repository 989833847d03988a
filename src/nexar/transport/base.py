"""The contract between nexar and its transports: Transport, Carrier, Sink, Acceptor, Waker, Sleeper.

A transport belongs to one node and makes carriers. A carrier is one mutually authenticated connection to one peer
process. It moves frames (small, copied when sent) and payloads (large, identified by a transfer number that the sending
link chooses).

Order. Frames arrive in order per (lane, communicator); nothing else is ordered. Lower lanes are sent first. A payload
delays frames by at most one chunk.

Delivery. Frames and payloads are reliable until the carrier ends. A payload moves directly from the sender's memory
into the receiver's. The receiving link must expect it before it asks for it. The sender's credit (links/) bounds the
frame bytes in flight.

Loss. A carrier ends exactly once: with `carrier_finished` on both sides, or with `carrier_lost` and the reason. After
that, every method except `abort` raises CarrierLost with the same kind and reason.

Cancellation. `withdraw_payload` cancels a send, `redirect_payload` cancels or moves a receive. Once either has
returned, or the carrier has ended, the carrier no longer touches the old memory. A payload that is incomplete when the
peer half-closes counts as withdrawn. Frames cannot be cancelled.

Closing. The link closes its carrier: `finish` half-closes, `abort` ends it at once. A carrier closes itself when both
sides have finished. `Transport.close` aborts all carriers and ends blocked `connect` calls.

Threads. One thread at a time, the driver, calls `poll()`, which never blocks: it receives, calls sinks and acceptors,
and sends queued data. The driver calls `prepare_sleep()` before it sleeps; descriptors registered with the Waker end
the sleep. Any thread may call the methods of a carrier, also inside a sink. They send at once as much as the connection
takes and never call a sink. Only `abort` may block, to wait for a running sink call. `connect` blocks its caller and
needs no driver.

Sinks. The driver holds no transport lock while it calls a sink, and makes one call at a time per carrier. Once
`abort()` has returned to a thread that is not itself inside a sink, the sink is not called again. A sink may call
`attach` from its methods: the new sink gets everything that follows.

Exceptions. An exception from a sink, or from an acceptor that was given a carrier, propagates out of `poll()` (or
`sleep()`). That carrier is lost with kind `fault`, and its sink, if any, is notified. The others continue at the next
poll.

Protocol violations. Bytes that are not a frame, a chunk of an unexpected payload, or a frame above its limit lose the
carrier with kind `misbehaved`. The memory committed to a peer is proportional to the bytes received, not to announced
sizes.

Unverified peers. Until `admit()`, on both sides, a peer that the handshake has not verified may send only FINISH and,
on the control lane, CONTROL frames of at most `unverified.UNVERIFIED_BYTES`. Any other header is a protocol violation
before its body is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, Protocol, TypeAlias

from nexar.security.certificates import Credentials, Trust
from nexar.wire.frame import Frame, Lane

Buffer: TypeAlias = bytes | bytearray | memoryview


class CarrierLost(ConnectionError):
    """The carrier has ended. `kind` says how:

    closed      this side aborted it, or both sides finished
    peer        the peer ended it, or its process is gone
    ended       its process has ended: the kernel says so
    timeout     the peer was silent for longer than the transport allows
    misbehaved  the peer violated the protocol
    fault       a local error (out of descriptors or memory, a sink that raised, …)
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{reason} [{kind}]")
        self.kind = kind
        self.reason = reason

    @property
    def misbehaved(self) -> bool:
        return self.kind == "misbehaved"


class ConnectRefused(ConnectionError):
    """No carrier could be made. `verification` is True if a certificate was rejected."""

    def __init__(self, address: str, reason: str, *, verification: bool = False) -> None:
        super().__init__(f"cannot connect to {address}: {reason}")
        self.address = address
        self.reason = reason
        self.verification = verification


class Redirected(Enum):
    """Result of `Carrier.redirect_payload`."""

    MOVED = "moved"  # the received part was copied (or dropped); the rest follows it
    # Too late: the payload is complete in the old memory; payload_arrived was or will be called. Remembered at least
    # until then, and for some thousand payloads more; UNKNOWN afterwards.
    COMPLETE = "complete"
    UNKNOWN = "unknown"  # no such payload is expected: it was never announced, or was discarded


@dataclass(frozen=True, slots=True)
class Peer:
    """The identity that the handshake proved.

    `verified` is False only for a joining node (no certificate) and for a dial whose caller verifies the peer itself.
    The layer above restricts such carriers to join messages.
    """

    node: int
    certificate: bytes | None
    verified: bool
    address: str


@dataclass(frozen=True, slots=True)
class Expected:
    """The peer that a dial must reach: its node id and, if known, its pinned key."""

    node: int
    fingerprint: bytes | None = None
    # Show no certificate although this node has one, because it joins; the other side treats it as unverified. No
    # effect where all peers are verified without certificates (shared memory).
    anonymous: bool = False
    plain: bool = False  # stop encrypting after authentication, if the transport can and the peer agrees


class Sink(Protocol):
    """Callbacks of a carrier. The driver calls them."""

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        """A whole frame, never CHUNK, FINISH or HELLO. `body` is valid during the call only."""

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """All bytes of an expected payload are in its memory."""

    def carrier_finished(self, carrier: Carrier) -> None:
        """The peer half-closed; everything it sent before has been delivered."""

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        """Called exactly once, unless both sides finished or this side aborted."""


class Acceptor(Protocol):
    """Receives inbound carriers. The driver calls it."""

    def carrier_accepted(self, carrier: Carrier) -> None:
        """Attach a sink or abort; nothing is read before that."""

    def candidate_refused(self, address: str, reason: str) -> None:
        """An inbound handshake failed."""


class Waker(Protocol):
    """Ends the driver's sleep. Any thread."""

    def watch(self, descriptor: int, *, readable: bool = True, writable: bool = False) -> None:
        """Wake when the descriptor is ready (level-triggered). A second call replaces the events."""

    def unwatch(self, descriptor: int) -> None:
        """Call it before closing the descriptor."""

    def wake(self) -> None:
        """Wake because of a change that no descriptor shows."""


class Sleeper(Waker, Protocol):
    """A Waker in which a node's driver sleeps."""

    def sleep(self, timeout: float, spin: float) -> None:
        """Block until a watched descriptor is ready, `wake` is called, or `timeout` seconds have passed.

        Polls and yields for the first `spin` seconds if supported. Releases the GIL and runs signal handlers (Ctrl-C
        raises). May drive its own transport (QUIC does) and so call sinks.
        """


class Carrier(ABC):
    """One connection to one peer process, with the guarantees above."""

    scheme: str
    peer: Peer
    dialed: bool  # True on the side that dialed

    @abstractmethod
    def attach(self, sink: Sink) -> None:
        """Deliver to `sink`. Nothing is read before the first call; later calls are allowed only inside the current
        sink.
        """

    def admit(self) -> None:  # noqa: B027 - no effect where every peer is verified
        """Lift the limits for unverified peers, once the layer above has authenticated this one."""

    @abstractmethod
    def send_frame(self, lane: Lane, communicator: int, header: bytes, *body: Buffer) -> None:
        """Copy and send one frame; `header` holds the size of the joined body. Raises CarrierLost."""

    @abstractmethod
    def queued_bytes(self, lane: Lane) -> int:
        """Return this lane's frame bytes that neither the system nor the protocol has taken."""

    @abstractmethod
    def expect_payload(self, transfer: int, into: memoryview) -> None:
        """Accept payload `transfer` into `into` (writable bytes)."""

    @abstractmethod
    def redirect_payload(self, transfer: int, into: memoryview | None) -> Redirected:
        """Receive the rest of an expected payload into other memory of the same size, or discard it (None).

        Copies the received part. A discarded payload is not reported. Raises CarrierLost.
        """

    @abstractmethod
    def send_payload(self, transfer: int, data: memoryview) -> None:
        """Send `data` (contiguous bytes). Raises CarrierLost.

        The carrier reads `data` until the link withdraws it, the peer's link confirms delivery in a frame, or the
        carrier ends.
        """

    @abstractmethod
    def withdraw_payload(self, transfer: int) -> None:
        """Stop sending a payload; the link notifies the peer. Unknown transfers are ignored."""

    @abstractmethod
    def finish(self) -> None:
        """Half-close: earlier data is still sent, then the peer's sink gets `carrier_finished`. Idempotent."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End the carrier now; queued frames may be lost. Idempotent.

        Notifies the peer if that costs nothing. Waits for a sink call of another thread to return. Later calls raise
        CarrierLost("closed", reason).
        """

    def wake_peer(self) -> None:  # noqa: B027 - most carriers share no memory
        """Wake a sleeping peer after a change in other shared memory. The caller has fenced."""

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Return bytes_sent, bytes_received, frames_sent, frames_received, and counters of the transport."""


@dataclass(frozen=True, slots=True)
class TransportCapabilities:
    """Properties of a scheme, by which the layers above treat its carriers. The defaults are those of an unknown
    scheme.

    The layers above name built-in schemes only to open them, for the bulk channel and in `nexar doctor`.
    `transport.registry` has the capabilities of every scheme.
    """

    node_port: Literal["UDP", "TCP"] | None = None
    """It listens at this port of the node's host:port. The seed and all members can be dialed there."""
    in_process: bool = False  # connects nodes of one process only
    shares_memory: bool = False
    """Connects processes of one host only. A link gives each peer its address, so it is not advertised, and its
    carriers implement `wake_peer`."""
    has_certificates: bool = True  # False: a secret that only this peer has, or the process, authenticates it
    encrypts: bool = True
    closes_on_death: bool = False  # a carrier is lost at once when the peer's process ends
    shows_life: bool = False  # packets of a live process arrive even while its Python code does not run


class Transport(ABC):
    """Makes the carriers of one scheme for one node."""

    scheme: str  # equal to that of its carriers; a link tells them apart by it
    capabilities: TransportCapabilities = TransportCapabilities()
    """Declared by transports of other packages. The registry declares nexar's own, which may not be importable."""
    address: str | None = None  # where it listens, as returned by `listen`

    def replace_credentials(self, credentials: Credentials, trust: Trust) -> None:  # noqa: B027 - not all have any
        """Use these for new handshakes in both directions. Any thread."""

    def expect_peers(self, count: int) -> None:  # noqa: B027 - not all schemes have unauthenticated connections
        """Set the number of peers that may dial at once, which limits unauthenticated connections. Any thread, even
        after `close`.
        """

    def lose_at_exit(self, enabled: bool) -> None:  # noqa: B027 - few transports notice it
        """Set whether a carrier is lost (kind "ended") as soon as its peer's process ends, before the system closes its
        connections: others may still find its port open. Initially not. Any thread, even after `close`.
        """

    @abstractmethod
    def listen(self, address: str, acceptor: Acceptor) -> str:
        """Accept dials on `address`. Returns the actual address (port 0 resolved) for `connect`. Raises OSError."""

    def address_for(self, node: int) -> str | None:
        """Return the address that this peer must dial (it may contain a secret); None while not listening."""
        return self.address

    @abstractmethod
    def connect(self, address: str, expected: Expected, deadline: float) -> Carrier:
        """Dial and authenticate in both directions. Blocks; thread-safe. Ctrl-C interrupts it.

        Raises ConnectRefused on failure or when the transport is closed, TimeoutError at `deadline` (time.monotonic).

        If addresses are host:port, `address` may list several, separated by commas, and names may resolve to several.
        They are dialed in parallel. If all fail, the error has every reason, and `verification` is True if a
        certificate was rejected.
        """

    @abstractmethod
    def poll(self) -> bool:
        """Make progress without blocking. Driver only. Returns True if anything happened."""

    @property
    def spins(self) -> bool:
        """Whether data may arrive before a descriptor shows it, so that polling beats sleeping."""
        return False

    def prepare_sleep(self) -> bool:
        """Ensure that a descriptor ends the coming sleep. Returns False if there is work now."""
        return True

    def due(self) -> float | None:
        """Return the latest time of the next poll() (time.monotonic), None if nothing is timed."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Abort every carrier and stop listening. Idempotent."""

    @abstractmethod
    def abandon(self) -> None:
        """In a forked child: close descriptors, notify nobody, touch nothing shared with the parent. Takes no lock,
        because a thread of the parent may hold it.
        """


class _Silent:
    """Replaces the sink of an ended carrier, which would form a reference cycle with the carrier."""

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None: ...

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None: ...

    def carrier_finished(self, carrier: Carrier) -> None: ...

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None: ...


SILENT_SINK: Final[Sink] = _Silent()
