"""Authentication of one TCP connection, and pairing of a carrier's two connections.

The dialer sends a random token in the first frame (hello) of both connections. The listener answers once it has both
hellos. Only the answer proves to the dialer that its certificate was accepted: in TLS 1.3 the dialer's handshake ends
before the listener has checked it.

`dial` and `answer` are generators. They yield the events they wait for and return the carrier's channel or raise
HandshakeFailed.

Without encryption both sides shut TLS down after the hellos and continue on the same socket. The engine reads no byte
beyond the peer's close alert.
"""

from __future__ import annotations

import os
import ssl
import struct
from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias, TypeVar

from nexar.security.certificates import (
    Credentials,
    ForeignCertificate,
    Trust,
    certificate_fingerprint,
    identify,
    node_name,
)
from nexar.security.tls import client_context, server_context
from nexar.transport.base import Expected, Peer
from nexar.transport.tls.sockets import READABLE, WRITABLE, Channel, PlainChannel, TlsChannel, pending_error
from nexar.types import UNKNOWN_NODE, NodeId, format_node
from nexar.wire.frame import HEADER_BYTES, Frame, FrameError, FrameKind, decode, encode
from nexar.wire.text import foreign_line

TOKEN_BYTES: Final = 16
MAX_HELLO_BYTES: Final = 512  # limit of the body, and so of the memory that an unverified peer gets
_LAYOUT: Final = struct.Struct(f"<BBBx{TOKEN_BYTES}s")


class Half(IntEnum):
    """One of a carrier's two connections."""

    CONTROL = 0
    DATA = 1


class HelloAnswer(IntEnum):
    """The listener's answer. A dialer's hello always says WELCOME."""

    WELCOME = 0
    REFUSED = 1
    UNVERIFIED = 2  # refused because of the certificate


class HelloError(ValueError):
    """The first frame is not a hello."""


@dataclass(frozen=True, slots=True)
class ConnectionHello:
    """The first frame of each side."""

    half: Half
    token: bytes
    plain: bool  # the sender wants no encryption
    answer: HelloAnswer = HelloAnswer.WELCOME
    reason: str = ""


def encode_connection_hello(hello: ConnectionHello) -> bytes:
    """Return the whole frame."""
    reason = hello.reason.encode()[: MAX_HELLO_BYTES - _LAYOUT.size]
    body = _LAYOUT.pack(hello.half, hello.answer, hello.plain, hello.token) + reason
    return encode(Frame(kind=FrameKind.HELLO, body=len(body))) + body


def decode_connection_hello(frame: Frame, body: bytes | memoryview) -> ConnectionHello:
    """Raises HelloError."""
    if frame.kind != FrameKind.HELLO or not _LAYOUT.size <= len(body) <= MAX_HELLO_BYTES:
        raise HelloError(f"the first frame is of kind {frame.kind} with {len(body)} bytes, not a hello")
    half, answer, plain, token = _LAYOUT.unpack_from(body)
    reason = foreign_line(bytes(body[_LAYOUT.size :]).decode(errors="replace"))
    try:
        return ConnectionHello(Half(half), token, bool(plain), HelloAnswer(answer), reason)
    except ValueError as error:
        raise HelloError(f"invalid hello: {error}") from error


Result = TypeVar("Result")
HandshakeSteps: TypeAlias = Generator[int, None, Result]


class HandshakeFailed(Exception):
    """The connection cannot be used. `verification`: a certificate was rejected or missing."""

    def __init__(self, reason: str, *, verification: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.verification = verification


def dial(
    channel: TlsChannel, hello: ConnectionHello, check_certificate: Callable[[bytes | None], None]
) -> HandshakeSteps[Channel]:
    """Run the dialer's side, from a socket that is still connecting."""
    try:
        yield from _connected(channel)
        yield from _secured(channel)
        check_certificate(channel.engine.getpeercert(True))
        yield from _send(channel, hello)
        answer = yield from _receive_hello(channel)
        _take_answer(hello, answer)
        return (yield from _settled(channel, plain=hello.plain))
    except (EOFError, OSError, FrameError, HelloError) as error:
        raise explain(error) from error


def answer(
    channel: TlsChannel, decide: Callable[[ConnectionHello, bytes | None], ConnectionHello | None]
) -> HandshakeSteps[tuple[ConnectionHello, Channel]]:
    """Run the listener's side. `decide` returns the answer to a hello, or None to be asked again later."""
    try:
        yield from _secured(channel)
        hello = yield from _receive_hello(channel)
        while (reply := decide(hello, channel.engine.getpeercert(True))) is None:
            yield READABLE
            if channel.receive():
                raise HandshakeFailed("it sent data before it got the answer")
        yield from _send(channel, reply)
        if reply.answer != HelloAnswer.WELCOME:
            raise HandshakeFailed(reply.reason, verification=reply.answer == HelloAnswer.UNVERIFIED)
        return hello, (yield from _settled(channel, plain=hello.plain))
    except (EOFError, OSError, FrameError, HelloError) as error:
        raise explain(error) from error


def _connected(channel: TlsChannel) -> HandshakeSteps[None]:
    yield WRITABLE
    reason = pending_error(channel.socket)
    if reason:
        raise HandshakeFailed(reason)


def _secured(channel: TlsChannel) -> HandshakeSteps[None]:
    try:
        yield from _engine_done(channel, channel.engine.do_handshake)
    except ssl.SSLError:
        channel.flush()  # the engine queued an alert that tells the peer why
        raise


def _engine_done(channel: TlsChannel, step: Callable[[], object]) -> HandshakeSteps[None]:
    while True:
        try:
            step()
        except ssl.SSLWantReadError:
            yield from _more(channel)
        else:
            yield from _flushed(channel)
            return


def _more(channel: TlsChannel) -> HandshakeSteps[None]:
    channel.flush()
    while not channel.receive():
        yield READABLE | (WRITABLE if channel.holds_output else 0)
        channel.flush()


def _flushed(channel: TlsChannel) -> HandshakeSteps[None]:
    while not channel.flush():
        yield WRITABLE


def _send(channel: TlsChannel, hello: ConnectionHello) -> HandshakeSteps[None]:
    channel.write(memoryview(encode_connection_hello(hello)))
    yield from _flushed(channel)


def _receive_hello(channel: TlsChannel) -> HandshakeSteps[ConnectionHello]:
    header = yield from _exactly(channel, HEADER_BYTES)
    frame = decode(header)
    if frame.body > MAX_HELLO_BYTES:
        raise HelloError(f"the first frame has {frame.body} bytes, a hello at most {MAX_HELLO_BYTES}")
    body = yield from _exactly(channel, frame.body)
    return decode_connection_hello(frame, body)


def _exactly(channel: TlsChannel, size: int) -> HandshakeSteps[memoryview]:
    view, got = memoryview(bytearray(size)), 0
    while got < size:
        count = channel.read_into(view[got:])
        if not count:
            yield READABLE
        got += count
    return view


def _take_answer(hello: ConnectionHello, reply: ConnectionHello) -> None:
    if reply.answer != HelloAnswer.WELCOME:
        raise HandshakeFailed(reply.reason, verification=reply.answer == HelloAnswer.UNVERIFIED)
    if (reply.half, reply.token, reply.plain) != (hello.half, hello.token, hello.plain):
        raise HandshakeFailed("the answer belongs to another connection")


def _settled(channel: TlsChannel, *, plain: bool) -> HandshakeSteps[Channel]:
    if not plain:
        return channel
    yield from _engine_done(channel, channel.engine.unwrap)
    return PlainChannel(channel.socket, channel.remainder())


# parts of names of TLS alerts that reject our certificate
_REFUSALS = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED", "DECRYPT_ERROR")


def explain(error: EOFError | OSError | FrameError | HelloError) -> HandshakeFailed:
    """Describe the failure and whether it is about certificates."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return HandshakeFailed(f"its certificate was rejected: {error.verify_message}", verification=True)
    if isinstance(error, ssl.SSLError):
        return _explain_tls(error)
    if isinstance(error, EOFError):
        return HandshakeFailed("it closed the connection during the handshake")
    if isinstance(error, OSError):
        return HandshakeFailed(error.strerror or os.strerror(error.errno or 0))
    return HandshakeFailed(f"it does not speak nexar: {error}")


def _explain_tls(error: ssl.SSLError) -> HandshakeFailed:
    name = error.reason or ""  # OpenSSL's name of the error; other texts decide nothing
    words = name.replace("_", " ").lower() or str(error)
    if "ALERT" in name:
        return HandshakeFailed(
            f"it rejected the handshake: {words}", verification=any(part in name for part in _REFUSALS)
        )
    if name == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return HandshakeFailed("it has no certificate", verification=True)
    return HandshakeFailed(f"the TLS handshake failed: {words}")


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """The TLS contexts of one (credentials, trust), and the checks of names, pins and clusters. Immutable."""

    cluster: str | None
    server: ssl.SSLContext | None
    named: ssl.SSLContext
    unnamed: ssl.SSLContext
    credentials: Credentials | None
    trust: Trust

    @classmethod
    def make(cls, credentials: Credentials | None, trust: Trust) -> TlsIdentity:
        return cls(
            cluster=credentials.cluster if credentials else None,
            server=server_context(credentials, trust) if credentials else None,
            named=client_context(credentials, trust),
            unnamed=client_context(credentials, trust, check_name=False),
            credentials=credentials,
            trust=trust,
        )

    @property
    def verifies(self) -> bool:
        """Whether dials check the chain; without authorities only a pinned key counts."""
        return bool(self.trust.authorities)

    def client(self, expected: Expected) -> tuple[ssl.SSLContext, str | None]:
        """Return context and server name (None if node id or cluster is unknown)."""
        if self.cluster is None or expected.node == UNKNOWN_NODE:
            return self._context(expected, named=False), None
        return self._context(expected, named=True), node_name(expected.node, self.cluster)

    def _context(self, expected: Expected, *, named: bool) -> ssl.SSLContext:
        if expected.anonymous:  # rare, so the context is not cached
            return client_context(None, self.trust, check_name=named)
        return self.named if named else self.unnamed

    def check_dialed(self, expected: Expected, certificate: bytes | None) -> None:
        """Raise HandshakeFailed unless the certificate is the expected one."""
        if certificate is None:
            raise HandshakeFailed("it showed no certificate", verification=True)
        try:
            if expected.fingerprint not in (None, certificate_fingerprint(certificate)):
                raise HandshakeFailed("its key is not the pinned one", verification=True)
            if self.verifies or expected.fingerprint:
                # A joining node knows no cluster yet: the pin decides.
                self._check_name(expected.node, certificate, self.cluster if self.verifies else None)
        except ForeignCertificate as error:
            raise HandshakeFailed(str(error), verification=True) from error

    def dialed_peer(self, expected: Expected, certificate: bytes | None, address: str) -> Peer:
        """A pinned key verifies like a name: the handshake proved its possession."""
        if certificate is None or not (self.verifies or expected.fingerprint):
            return Peer(expected.node, certificate, verified=False, address=address)
        return Peer(identify(certificate).node, certificate, verified=True, address=address)

    def accepted_peer(self, certificate: bytes | None, address: str) -> Peer:
        """Raises HandshakeFailed. TLS has verified the certificate, if any."""
        if certificate is None:
            return Peer(UNKNOWN_NODE, None, verified=False, address=address)
        try:
            node = self._check_name(UNKNOWN_NODE, certificate, self.cluster)
        except ForeignCertificate as error:
            raise HandshakeFailed(str(error), verification=True) from error
        return Peer(node, certificate, verified=True, address=address)

    def _check_name(self, node: NodeId, certificate: bytes, cluster: str | None) -> NodeId:
        identity = identify(certificate)
        if node not in (UNKNOWN_NODE, identity.node):
            raise ForeignCertificate(f"it names node {format_node(identity.node)}, expected {format_node(node)}")
        if cluster not in (None, identity.cluster):
            raise ForeignCertificate(f"it belongs to cluster {identity.cluster!r}, not to {cluster!r}")
        return identity.node
