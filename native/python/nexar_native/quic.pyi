"""QUIC with mutual TLS. The thread that waits drives the endpoint.

A thin binding of quinn-proto, quinn-udp and rustls: mutual TLS 1.3, streams, one UDP socket per
endpoint that dials and listens. There is no event loop and no executor: operations are *posted*,
and the thread that waits drives the socket itself. While no thread waits, a native background thread
serves timers, acknowledgements and keep-alives. It never runs Python code.

Every object may be used from several threads. Every call in a forked child raises `ForkedError`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Self, final

from typing_extensions import Buffer

__all__ = [
    "Cancelled",
    "Completions",
    "ConnectError",
    "Connection",
    "ConnectionLost",
    "Credentials",
    "Endpoint",
    "EndpointClosed",
    "ForkedError",
    "Operation",
    "QuicError",
    "Settings",
    "Stream",
    "StreamError",
    "Trust",
    "VerificationError",
    "spki_fingerprint",
]

class QuicError(ConnectionError):
    """Root of every error of this package."""

class ConnectError(QuicError):
    """The dial failed: refused, unreachable, or the handshake did not succeed. .kind is one of "timed_out" (of the handshake), "verification" (VerificationError), "failed". .reason is for people."""

    kind: str
    reason: str

class VerificationError(ConnectError):
    """A certificate was not accepted: theirs by us, or ours by them. Carries .reason, .by ("us" or "peer")."""

    by: str

class ConnectionLost(QuicError):
    """The connection is gone. .kind is one of "closed" (by us), "peer_closed" (with .code, .reason), "timed_out", "reset", "protocol"."""

    kind: str
    code: int | None
    reason: str

class StreamError(QuicError):
    """The stream is unusable. .kind is one of "reset" (peer reset it), "stopped" (peer stopped it), "closed" (finished, reset or stopped by us). .code is the peer's code or None."""

    kind: str
    code: int | None

class Cancelled(QuicError):
    """The operation was cancelled by its owner."""

class EndpointClosed(QuicError):
    """The endpoint was closed, or poisoned by an internal failure (then .reason says which)."""

    reason: str

class ForkedError(RuntimeError):
    """The object was made in the parent process; a forked child must make its own."""

@final
class Credentials:
    """A certificate chain and its private key, both PEM. An empty chain or unreadable PEM is a ValueError."""
    def __new__(cls, certificate_chain: bytes, private_key: bytes) -> Self: ...

@final
class Trust:
    """Whose certificates are accepted: signed by one of `authorities` (PEM, may be empty) or with a public key among `fingerprints`
    (SHA-256 of the SubjectPublicKeyInfo DER). Both empty: no certificate is. `allow_anonymous` accepts clients without a certificate; such
    connections have `verified == False`, `peer_certificate is None`. A certificate that *is* presented is always verified."""
    def __new__(
        cls, authorities: bytes = b"", fingerprints: Iterable[bytes] = (), *, allow_anonymous: bool = False
    ) -> Self: ...

@final
class Settings:
    """Protocol settings; the defaults were measured. A bad value raises ValueError, which names the argument.
    `max_mtu`, `loopback_mtu`: the largest packet on a path, and on one over the loopback interface. Each connection probes for the size
    that its path carries. Peers are told the larger of the two; datagrams above it are dropped.
    `handshake_timeout`: seconds that an inbound handshake may take, and a dial that has no timeout of its own.
    `max_handshakes`: inbound handshakes in progress at once. At the limit, one of the source address with the most of them is ended: a random
    one that has lasted a second, or any if the address of the new handshake has fewer. Otherwise the new handshake is refused.
    `handshake_budget`: handshakes that may begin at once, if it is more than `max_handshakes`; 64 are refilled each second. A handshake begins only
    if the budget holds more than its source address has taken in the last seconds; otherwise its first packet is ignored. The handshakes of peers
    that authenticate are refunded (see `Connection.lift_limits`). So a flood from some addresses does not lock out peers with other addresses.
    `retry_handshakes`: from this many on, or when half of the budget is spent, a client must first prove that it receives at its address (Retry, one more round trip).
    `unverified_streams`, `unverified_window_bytes`: what the peer of an inbound connection may open and send before its certificate is
    verified; see `Connection.lift_limits` for peers without one."""
    def __new__(
        cls,
        *,
        alpn: bytes = b"nexar",
        idle_timeout: float = 30.0,
        keep_alive_interval: float = 5.0,
        initial_mtu: int = 1200,
        max_mtu: int = 8972,
        loopback_mtu: int = 65000,
        stream_window_bytes: int = 64 << 20,
        connection_window_bytes: int = 256 << 20,
        send_window_bytes: int = 4 << 20,
        socket_buffer_bytes: int = 4 << 20,
        max_streams: int = 4096,
        max_connections: int = 65536,
        handshake_timeout: float = 10.0,
        max_handshakes: int = 256,
        retry_handshakes: int = 64,
        handshake_budget: int = 1024,
        unverified_streams: int = 4,
        unverified_window_bytes: int = 64 << 10,
    ) -> Self: ...

@final
class Endpoint:
    """One UDP socket that dials and listens. Close it, or leave its `with` block; garbage collection and interpreter exit close it too."""
    def __new__(
        cls, address: tuple[str, int], credentials: Credentials | None, trust: Trust, settings: Settings | None = None
    ) -> Self:
        """Bind `address` (numeric IPv4 or IPv6; port 0 = any; "::" is dual-stack). Without credentials the endpoint only dials, anonymously. OSError when binding fails."""
    @property
    def address(self) -> tuple[str, int]: ...
    def replace_credentials(self, credentials: Credentials, trust: Trust) -> None:
        """Applies to new connections; open ones keep theirs."""
    def set_max_handshakes(self, count: int) -> None:
        """Replace Settings.max_handshakes. Handshakes in progress continue."""
    def post_connect(
        self,
        address: tuple[str, int],
        server_name: str,
        completions: Completions | None = None,
        *,
        trust: Trust | None = None,
        verify: bool = True,
        anonymous: bool = False,
        token: Any = None,
    ) -> Operation:
        """Dial. Result: Connection, once the peer has accepted *our* certificate too (HANDSHAKE_DONE received).
        By authority, the certificate must name `server_name`; by fingerprint, the name is not checked. `trust` replaces the endpoint's.
        verify=False leaves verification to the caller: the connection is marked `verified == False`. anonymous=True presents no certificate."""
    def post_accept(self, completions: Completions | None = None, *, token: Any = None) -> Operation:
        """Result: the next inbound Connection whose handshake succeeded."""
    def refusals(self) -> list[tuple[tuple[str, int], str]]:
        """Inbound handshakes that failed since the last call, (address, reason); at most the newest 256 are kept."""
    def stats(self) -> dict[str, int]:
        """connections, handshakes (in progress), inbound_handshakes (those of them that peers began), datagrams_sent, datagrams_received, bytes_sent, bytes_received, refused,
        retried (address validations), ignored (first packets beyond the budget of handshakes), waiting (threads inside a wait), rounds, background_rounds."""
    def wait(
        self, operations: Sequence[Operation], timeout: float | None = None, *, descriptors: Sequence[int] = ()
    ) -> tuple[list[Operation], list[int]]:
        """Drive until at least one of the operations is done or a descriptor is readable; return those. Both empty: the timeout passed.
        Releases the GIL and runs signal handlers (KeyboardInterrupt leaves the operations posted)."""
    def connect(
        self,
        address: tuple[str, int],
        server_name: str,
        timeout: float | None = None,
        *,
        trust: Trust | None = None,
        verify: bool = True,
        anonymous: bool = False,
    ) -> Connection:
        """post_connect + wait; TimeoutError cancels the dial. With a timeout, Settings.handshake_timeout does not apply; a path
        that is silent for Settings.idle_timeout raises ConnectError in any case."""
    def accept(self, timeout: float | None = None) -> Connection: ...
    def close(self, code: int = 0, reason: str = "") -> None:
        """Tell every peer, fail every operation, join the background thread, close the socket. Idempotent."""
    def __enter__(self) -> Endpoint: ...
    def __exit__(self, *exc: object) -> None: ...

@final
class Completions:
    """A queue of finished operations, to wait for many without naming them in each call. An operation posted with a queue
    appears in exactly one wait() result, also if it was cancelled."""
    def __new__(cls, endpoint: Endpoint) -> Self: ...
    def wait(self, timeout: float | None = None, *, spin: float = 0.0) -> tuple[list[Operation], list[int]]:
        """Drive the endpoint until operations have finished, a watched descriptor is ready, kick() was called or the timeout passed; timeout=0 is one
        non-blocking round. First spins with sched_yield up to `spin` seconds, less if spinning did not pay lately."""
    def watch(self, descriptor: int, *, readable: bool = True, writable: bool = False) -> None: ...
    def unwatch(self, descriptor: int) -> None: ...
    def kick(self) -> None:
        """Make the current wait, or if there is none the next one, return early. Callable from any thread."""
    def fileno(self) -> int:
        """An eventfd that is readable while finished operations are queued (for loop.add_reader). From the first call on, the background thread
        drives without delay while no thread waits."""

@final
class Operation:
    """A posted operation. `token` is the object that was given when it was posted."""

    token: Any
    @property
    def done(self) -> bool: ...
    @property
    def transferred(self) -> int:
        """Bytes moved so far. A read has filled that much of its buffer and consumed it from the stream, also if it was cancelled."""
    def result(self) -> Any:
        """Return its result or raise its error. RuntimeError if it is not done."""
    def cancel(self) -> bool:
        """Cancel it. When this returns, the operation's buffer is not used any more. False if it was done already."""

@final
class Connection:
    """Lives until either side closes it, or until this object, its streams and its pending operations are dropped (then it is
    closed with code 0). Data that has arrived stays readable after the peer closed it."""
    @property
    def peer_certificate(self) -> bytes | None:
        """DER of the leaf the peer proved to own."""
    @property
    def verified(self) -> bool: ...
    @property
    def dialed(self) -> bool: ...
    @property
    def remote_address(self) -> tuple[str, int]: ...
    @property
    def local_certificate(self) -> bytes | None:
        """DER of the leaf *we* presented on this connection."""
    def export_keying_material(self, label: bytes, context: bytes, length: int) -> bytes:
        """RFC 5705 exporter: the same bytes on both ends (channel binding)."""
    def lift_limits(self) -> None:
        """Give the peer the streams and windows of a verified one; for a peer without a certificate that has authenticated in another way.
        Verified peers, and peers that we dialed, have them without this call. Idempotent; no effect on a lost connection."""
    def open_uni(self) -> Stream:
        """Raises BlockingIOError when the peer's stream limit is reached (then use post_open_uni)."""
    def open_bi(self) -> Stream: ...
    def post_open_uni(self, completions: Completions | None = None, *, token: Any = None) -> Operation: ...
    def post_open_bi(self, completions: Completions | None = None, *, token: Any = None) -> Operation: ...
    def post_accept_uni(self, completions: Completions | None = None, *, token: Any = None) -> Operation: ...
    def post_accept_bi(self, completions: Completions | None = None, *, token: Any = None) -> Operation: ...
    def post_closed(self, completions: Completions | None = None, *, token: Any = None) -> Operation:
        """Done when the connection is gone; result() raises its ConnectionLost."""
    def stats(self) -> dict[str, float]:
        """rtt, min_rtt, cwnd, mtu, lost_packets, lost_bytes, sent_packets, congestion_events, black_holes, datagrams_sent,
        datagrams_received, bytes_sent, bytes_received, streams, last_received (seconds since the last authenticated packet)."""
    def close(self, code: int = 0, reason: str = "") -> None:
        """Close at once; unsent data is dropped. To deliver all data, finish() the streams and wait for post_finished() before. Idempotent."""

@final
class Stream:
    """Abandoned when this object and its pending operations are dropped: reset with code 0 unless it was finished, and stopped with
    code 0 if more arrives."""
    @property
    def id(self) -> int: ...
    @property
    def connection(self) -> Connection: ...
    priority: int
    """Streams with a higher priority are sent first, also from the queues. Default 0."""
    def write(self, *buffers: Buffer) -> None:
        """Copy and send: as much as the protocol takes now; the rest is queued, ahead of later writes. Never blocks. The caller limits the queue by checking queued_bytes."""
    @property
    def queued_bytes(self) -> int: ...
    def post_write(self, buffer: Buffer, completions: Completions | None = None, *, token: Any = None) -> Operation:
        """Borrow `buffer` and send it, in order with other writes. Done when the protocol has copied all of it. If it is cancelled half-way, the stream is reset (code 0)."""
    def post_read(
        self, buffer: Buffer, completions: Completions | None = None, *, minimum: int | None = None, token: Any = None
    ) -> Operation:
        """Done when at least `minimum` (default: all) bytes of `buffer` are filled, or the stream ended. Result: the count; less than
        minimum means the end of the stream. One read at a time per stream: a second one raises ValueError."""
    def finish(self) -> None:
        """End the sending half. Queued bytes are still sent."""
    def post_finished(self, completions: Completions | None = None, *, token: Any = None) -> Operation:
        """Done when the peer's transport has acknowledged all bytes and the end."""
    def reset(self, code: int = 0) -> None: ...
    def stop(self, code: int = 0) -> None:
        """Ask the peer to stop sending; unread data is dropped."""

def spki_fingerprint(certificate_der: bytes) -> bytes:
    """SHA-256 of the certificate's SubjectPublicKeyInfo."""
