"""How a connection is authenticated, told as two stories: the dialer's and the listener's.

Each story is a generator. It never blocks: where it has to wait it yields the events it waits for, and whoever runs it
(a loop with a deadline for a dial, the driving thread for an inbound connection) resumes it when the socket has them.
It returns the channel over which the carrier goes on, or raises HandshakeFailed.

Without encryption the TLS engine is shut down after the hellos: each side sends TLS's own "nothing follows" and goes on
in plain on the same socket. The engine reads no byte beyond the peer's.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from nexar.transport.tls.channel import Channel, PlainChannel, TlsChannel
from nexar.transport.tls.hello import MAX_HELLO_BYTES, Hello, HelloError, Verdict, decode_hello, encode_hello
from nexar.transport.tls.reactor import READABLE, WRITABLE
from nexar.transport.tls.sockets import pending_error
from nexar.wire.frame import HEADER_BYTES, FrameError, decode

Result = TypeVar("Result")
Story: TypeAlias = Generator[int, None, Result]


class HandshakeFailed(Exception):
    """The connection is not to be used. `verification`: because of what a certificate says, or says not."""

    def __init__(self, reason: str, *, verification: bool = False) -> None:
        """`reason`: a clause that fits behind a colon."""
        super().__init__(reason)
        self.reason = reason
        self.verification = verification


def dial(channel: TlsChannel, hello: Hello, check_certificate: Callable[[bytes | None], None]) -> Story[Channel]:
    """The dialer's story, from a socket that is still connecting."""
    try:
        yield from _connected(channel)
        yield from _secured(channel)
        check_certificate(channel.engine.getpeercert(True))
        yield from _send(channel, hello)
        answer = yield from _receive_hello(channel)
        _heed(hello, answer)
        return (yield from _settled(channel, plain=hello.plain))
    except (EOFError, OSError, FrameError, HelloError) as error:
        raise explain(error) from error


def answer(channel: TlsChannel, judge: Callable[[Hello, bytes | None], Hello | None]) -> Story[tuple[Hello, Channel]]:
    """The listener's story. `judge` looks at hello and certificate and says what to answer; None: it cannot yet, and
    is asked again when the story is resumed.
    """
    try:
        yield from _secured(channel)
        hello = yield from _receive_hello(channel)
        while (verdict := judge(hello, channel.engine.getpeercert(True))) is None:
            yield READABLE
            if channel.receive():
                raise HandshakeFailed("it went on before it was answered")
        yield from _send(channel, verdict)
        if verdict.verdict != Verdict.WELCOME:
            raise HandshakeFailed(verdict.reason, verification=verdict.verdict == Verdict.NOT_BELIEVED)
        return hello, (yield from _settled(channel, plain=hello.plain))
    except (EOFError, OSError, FrameError, HelloError) as error:
        raise explain(error) from error


def _connected(channel: TlsChannel) -> Story[None]:
    yield WRITABLE
    reason = pending_error(channel.socket)
    if reason:
        raise HandshakeFailed(reason)


def _secured(channel: TlsChannel) -> Story[None]:
    try:
        yield from _engine_done(channel, channel.engine.do_handshake)
    except ssl.SSLError:
        channel.flush()  # the engine left an alert that tells the peer why
        raise


def _engine_done(channel: TlsChannel, step: Callable[[], object]) -> Story[None]:
    while True:
        try:
            step()
        except ssl.SSLWantReadError:
            yield from _more(channel)
        else:
            yield from _flushed(channel)
            return


def _more(channel: TlsChannel) -> Story[None]:
    channel.flush()
    while not channel.receive():
        yield READABLE | (WRITABLE if channel.holds_output else 0)
        channel.flush()


def _flushed(channel: TlsChannel) -> Story[None]:
    while not channel.flush():
        yield WRITABLE


def _send(channel: TlsChannel, hello: Hello) -> Story[None]:
    channel.write(memoryview(encode_hello(hello)))
    yield from _flushed(channel)


def _receive_hello(channel: TlsChannel) -> Story[Hello]:
    header = yield from _exactly(channel, HEADER_BYTES)
    frame = decode(header)
    if frame.body > MAX_HELLO_BYTES:
        raise HelloError(f"the first frame has {frame.body} bytes, a hello at most {MAX_HELLO_BYTES}")
    body = yield from _exactly(channel, frame.body)
    return decode_hello(frame, body)


def _exactly(channel: TlsChannel, size: int) -> Story[memoryview]:
    view, got = memoryview(bytearray(size)), 0
    while got < size:
        count = channel.read_into(view[got:])
        if not count:
            yield READABLE
        got += count
    return view


def _heed(hello: Hello, answer: Hello) -> None:
    if answer.verdict != Verdict.WELCOME:
        raise HandshakeFailed(answer.reason, verification=answer.verdict == Verdict.NOT_BELIEVED)
    if (answer.half, answer.token, answer.plain) != (hello.half, hello.token, hello.plain):
        raise HandshakeFailed("the answer belongs to another connection")


def _settled(channel: TlsChannel, *, plain: bool) -> Story[Channel]:
    if not plain:
        return channel
    yield from _engine_done(channel, channel.engine.unwrap)
    return PlainChannel(channel.socket, channel.remainder())


_REFUSALS = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED", "DECRYPT_ERROR")
"""Parts of the names of TLS alerts by which the other side says that it does not believe our certificate."""


def explain(error: EOFError | OSError | FrameError | HelloError) -> HandshakeFailed:
    """What went wrong, in words, and whether it is about certificates."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return HandshakeFailed(f"its certificate is not believed: {error.verify_message}", verification=True)
    if isinstance(error, ssl.SSLError):
        return _explain_tls(error)
    if isinstance(error, EOFError):
        return HandshakeFailed("it closed the connection during the handshake")
    if isinstance(error, OSError):
        return HandshakeFailed(error.strerror or os.strerror(error.errno or 0))
    return HandshakeFailed(f"it does not speak nexar: {error}")


def _explain_tls(error: ssl.SSLError) -> HandshakeFailed:
    name = error.reason or str(error)
    words = name.replace("_", " ").lower()
    if "ALERT" in name:
        return HandshakeFailed(f"it refused us: {words}", verification=any(part in name for part in _REFUSALS))
    if name == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return HandshakeFailed("it has no certificate", verification=True)
    return HandshakeFailed(f"it does not speak TLS as we do: {words}")
