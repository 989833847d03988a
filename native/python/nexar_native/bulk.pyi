"""Large transfers over TCP, moved by native threads: TLS 1.3, or plain after an authenticated handshake.

An `Endpoint` dials channels, and takes over accepted TCP connections that begin with `PREAMBLE`. A `Channel` is one or
more connections to one peer. A transfer has a number that the sender chooses and the receiver knows beforehand, and the
memory of both is used directly: workers encrypt from it, and decrypt, copy or reduce into it, without the GIL.

A receiver calls `expect` before it asks the sender, by other means, to `send`. A chunk of a transfer that is not
expected, or of another length, is a protocol violation, which ends the channel. So a peer can neither choose where bytes
go nor make this side allocate memory. `op` and `dtype` are the numbers of `nexar_native.reduce`.

`poll` returns what has happened, as tuples (event, channel id, transfer, detail). Integer 0 and None stand where there is
nothing to say:

    ACCEPTED   a peer has dialed; detail: the Channel
    LANDED     all bytes of an expected transfer are in their memory
    SENT       the memory of a sent transfer is not used any longer; the peer may not have all of it yet
    FINISHED   the peer sends nothing more; an incomplete transfer counts as withdrawn
    LOST       the channel has ended, with all its connections; detail: (kind, reason). The last event of the channel
    REFUSED    an adopted connection did not become part of a channel; detail: (address, reason)

The kinds of a loss are those of `ConnectionLost`: "peer_closed", "reset", "timed_out", "protocol" (the peer violated the
protocol), and besides "fault" (an error of this side). There is no LOST after `abort`, or when both sides have finished.

Lengths and transfer numbers have 64 bits. Methods of an ended channel raise `ConnectionLost`, except `applied`,
`withdraw`, `finish`, `abort`, `stats`. Every object may be used from several threads. Every call in a forked child
raises `ForkedError`.
"""

from collections.abc import Sequence
from typing import Any, Final, Self, final

from typing_extensions import Buffer

from nexar_native.quic import (
    ConnectError,
    ConnectionLost,
    Credentials,
    EndpointClosed,
    ForkedError,
    QuicError,
    Trust,
    VerificationError,
)

__all__ = [
    "ACCEPTED",
    "CHUNK_BYTES",
    "FINISHED",
    "LANDED",
    "LOST",
    "MOVED",
    "PREAMBLE",
    "REFUSED",
    "SENT",
    "UNKNOWN",
    "Channel",
    "ConnectError",
    "ConnectionLost",
    "Credentials",
    "Endpoint",
    "EndpointClosed",
    "ForkedError",
    "QuicError",
    "Trust",
    "VerificationError",
]

PREAMBLE: Final[bytes]
"""The first bytes of a connection, in clear. TLS connections begin with 0x16, so one port can serve both."""
CHUNK_BYTES: Final[int]
"""Transfers are cut at multiples of this. Connections of a channel take the chunks in turn."""

ACCEPTED: Final[int]
LANDED: Final[int]
SENT: Final[int]
FINISHED: Final[int]
LOST: Final[int]
REFUSED: Final[int]
MOVED: Final[int]
UNKNOWN: Final[int]

@final
class Endpoint:
    """Close it, or leave its `with` block; garbage collection and interpreter exit close it too."""
    def __new__(
        cls,
        credentials: Credentials,
        trust: Trust,
        *,
        threads: int,
        allow_plain: bool = False,
        handshake_timeout: float = 10.0,
        max_handshakes: int = 256,
    ) -> Self:
        """`threads` workers serve the connections in turn; they start with the first connection.
        `allow_plain`: a dialer may stop encrypting after the handshake. `handshake_timeout`: seconds for a peer that dials to complete
        its handshake and all connections of its channel. `max_handshakes`: adopted connections whose peer is not verified."""
    def replace_credentials(self, credentials: Credentials, trust: Trust) -> None:
        """Applies to new connections; open ones keep theirs."""
    def connect(
        self,
        addresses: Sequence[tuple[str, int]],
        server_name: str,
        fingerprint: bytes | None,
        hello: bytes,
        *,
        connections: int = 1,
        plain: bool = False,
        timeout: float,
    ) -> Channel:
        """Dial a channel of 1 to 64 connections. Blocks without the GIL and runs signal handlers.

        Numeric addresses of one peer; the next is tried when one fails, or does not answer in 250 ms. The peer's certificate must be trusted
        and, by authority, name `server_name`; with `fingerprint` its public key must have this one, too (`quic.spki_fingerprint`).
        `hello` (at most 4096 bytes) is what the peer sees as `Channel.hello`. When this returns, the peer has verified this side and
        has all connections. With `plain` they are not encrypted from there on if the peer allows it: see `Channel.plain`.

        Raises VerificationError or ConnectError; its kind is "timed_out", "refused" (by the peer's endpoint) or "failed"."""
    def adopt(self, fd: int) -> None:
        """Take over the descriptor of an accepted TCP connection, of which nothing was read. ACCEPTED or REFUSED follows; one ACCEPTED for
        all connections of a channel. OSError: it is no open TCP socket; then the descriptor is closed, unless it is not open."""
    def fileno(self) -> int:
        """An eventfd that is readable while `poll` has events."""
    def poll(self) -> list[tuple[int, int, int, Any]]:
        """The events since the last call, in order. Never blocks. At most 256 REFUSED are kept."""
    def stats(self) -> dict[str, int]:
        """threads, channels, connections, handshakes (of adopted connections), refused, bytes_sent, bytes_received (of transfers),
        rounds (of all workers)."""
    def close(self) -> None:
        """End all channels and join the workers. Idempotent. Events that were not polled are dropped."""
    def __enter__(self) -> Endpoint: ...
    def __exit__(self, *exc: object) -> None: ...

@final
class Channel:
    """Ends when this object is dropped. Events name it by its `id`, which is unique in its endpoint."""
    @property
    def id(self) -> int: ...
    @property
    def dialed(self) -> bool: ...
    @property
    def connections(self) -> int: ...
    @property
    def hello(self) -> bytes:
        """What the dialer said. Only its certificate is proven: compare them."""
    @property
    def peer_certificate(self) -> bytes:
        """DER of the leaf the peer proved to own, on every connection."""
    @property
    def plain(self) -> bool:
        """Neither encrypted nor protected from changes on the way: never decide anything by what arrives."""
    def expect(self, transfer: int, into: Buffer, *, op: int = 0, dtype: int = 0, before: bool = False) -> None:
        """Receive a transfer of exactly the length of `into`, which is borrowed until LANDED or LOST is polled, or it is redirected.

        With `op` and `dtype` each element is combined: into = into ⊕ received, or received ⊕ into with `before`. An average is only summed.
        Raises ValueError for a number in use, or a reduction that is not defined or does not fit the length."""
    def redirect(self, transfer: int, into: Buffer | None) -> int:
        """Receive into other memory of the same length, or discard the transfer (None: no event follows). On return the old memory is free.

        MOVED: what had arrived was copied, the rest follows. LANDED: too late, it is complete, and the event was or will be polled.
        UNKNOWN: not expected, or discarded. ValueError: a reduced transfer can only be discarded, and lengths must be equal.
        May wait for workers that copy a piece of up to a chunk."""
    def applied(self, transfer: int) -> list[tuple[int, int]]:
        """The ranges (begin, end) of bytes that are in the destination: whole elements, in order. Also after LOST, when no more follow."""
    def send(self, transfer: int, data: Buffer) -> None:
        """Borrow `data` and send it; until SENT or LOST is polled, or it is withdrawn. ValueError: the number is in use."""
    def withdraw(self, transfer: int) -> None:
        """Stop sending. On return the memory is free. The peer still gets the chunks that were begun; if these were the last ones, the
        transfer lands. Numbers that are not being sent are ignored."""
    def finish(self) -> None:
        """End the sending half after all transfers. When both sides have finished, the channel ends without an event. Idempotent."""
    def abort(self, reason: str = "") -> None:
        """End the channel at once. On return no memory is used. The peer is told the reason (256 bytes) if that costs nothing. Idempotent."""
    def stats(self) -> dict[str, float]:
        """connections, bytes_sent, bytes_received, transfers_sent, transfers_received, expected, sending."""
