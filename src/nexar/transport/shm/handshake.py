"""Mutual authentication of dialer and listener.

The address for node N contains key = HMAC(listener's secret, N) and is sent only over authenticated links, so only N
and the listener know the key.

    dialer → listener   HELLO      version, both node ids, the dialer's nonce
    listener → dialer   CHALLENGE  the listener's nonce, its proof
    dialer → listener   OFFER      a nonce that is also in the segment, the dialer's proof over it; the descriptor
    listener → dialer   ANSWER     a nonce that is also in the segment

A proof is an HMAC over role, HELLO and the listener's nonce, so it cannot be replayed or reflected. The listener proves
itself before it gets the descriptor. The nonces in the segment prove that both sides map the same memory.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from threading import Event
from typing import Final

from nexar.transport.shm.ring_frames import SegmentGeometry, ShmSegment, attach_segment, create_segment
from nexar.transport.shm.socket_directory import ShmAddress
from nexar.types import format_node

NONCE_BYTES: Final = 32
KEY_BYTES: Final = 32
_MAGIC: Final = b"nexarshm"
_VERSION: Final = 1
_HELLO: Final = struct.Struct("<8sQQQ32s")
_PAIR: Final = struct.Struct("<32s32s")

HELLO_BYTES: Final = _HELLO.size
CHALLENGE_BYTES: Final = _PAIR.size
OFFER_BYTES: Final = _PAIR.size
ANSWER_BYTES: Final = NONCE_BYTES

_AS_LISTENER: Final = b"listener"
_AS_DIALER: Final = b"dialer"


class HandshakeRefused(Exception):
    """The peer failed to prove its identity or violated the protocol."""


def new_nonce() -> bytes:
    """Return an unpredictable nonce."""
    return secrets.token_bytes(NONCE_BYTES)


def derive_key(secret: bytes, node: int) -> bytes:
    """Return the key with which `node` dials the listener that has this secret."""
    return hmac.digest(secret, node.to_bytes(8, "little"), "sha256")


def _proof(key: bytes, role: bytes, hello: bytes, challenge_nonce: bytes, more: bytes = b"") -> bytes:
    return hmac.digest(key, role + hello + challenge_nonce + more, "sha256")


def _verify(proof: bytes, expected: bytes, who: str) -> None:
    if not hmac.compare_digest(proof, expected):
        raise HandshakeRefused(f"the {who} does not know the key of this address")


@dataclass(frozen=True, slots=True)
class DialerSide:
    """The dialer's state between messages."""

    key: bytes
    hello: bytes

    @classmethod
    def start(cls, key: bytes, dialer: int, listener: int) -> DialerSide:
        return cls(key, _HELLO.pack(_MAGIC, _VERSION, dialer, listener, new_nonce()))

    def offer(self, challenge: bytes, segment_nonce: bytes) -> bytes:
        """Raises HandshakeRefused if the listener did not prove itself."""
        nonce, proof = _PAIR.unpack(challenge)
        _verify(proof, _proof(self.key, _AS_LISTENER, self.hello, nonce), "listener")
        return _PAIR.pack(segment_nonce, _proof(self.key, _AS_DIALER, self.hello, nonce, segment_nonce))


@dataclass(frozen=True, slots=True)
class ListenerSide:
    """The listener's state between messages. `dialer` is proven once `accept_offer` has returned."""

    key: bytes
    hello: bytes
    nonce: bytes
    dialer: int

    @classmethod
    def start(cls, secret: bytes, listener: int, hello: bytes) -> ListenerSide:
        """Raises HandshakeRefused for an invalid HELLO or one for another node."""
        magic, version, dialer, wanted, _ = _HELLO.unpack(hello)
        if magic != _MAGIC or version != _VERSION:
            raise HandshakeRefused(f"not version {_VERSION} of the shared-memory handshake")
        if wanted != listener:
            raise HandshakeRefused(f"it asked for node {format_node(wanted)}")
        return cls(derive_key(secret, dialer), hello, new_nonce(), dialer)

    def challenge(self) -> bytes:
        return _PAIR.pack(self.nonce, _proof(self.key, _AS_LISTENER, self.hello, self.nonce))

    def accept_offer(self, offer: bytes) -> bytes:
        """Return the nonce that the segment must hold. Raises HandshakeRefused."""
        segment_nonce, proof = _PAIR.unpack(offer)
        _verify(proof, _proof(self.key, _AS_DIALER, self.hello, self.nonce, segment_nonce), "dialer")
        return bytes(segment_nonce)


_CREDENTIALS_LAYOUT: Final = struct.Struct("3i")  # pid, uid, gid


def credentials_of(connection: socket.socket) -> tuple[int, int]:
    """Return the peer's pid and uid, as the kernel recorded them at connect."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS_LAYOUT.size)
    process, user, _ = _CREDENTIALS_LAYOUT.unpack(data)
    return process, user


def require_same_user(connection: socket.socket) -> None:
    """Raise HandshakeRefused unless the peer runs as our user."""
    _, user = credentials_of(connection)
    if user != os.geteuid():
        raise HandshakeRefused(f"it runs as user {user}, we as {os.geteuid()}")


class UnverifiedPeer:
    """An inbound connection. Driver only. Reads nothing beyond the handshake."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        process, user = credentials_of(connection)
        self.name = f"shm process {process} of user {user}"
        self.connection = connection
        self.deadline = deadline
        self._received = b""
        self._descriptors: list[int] = []
        self._side: ListenerSide | None = None

    @property
    def node(self) -> int:
        """Proven once `advance` has returned a segment."""
        assert self._side is not None
        return self._side.dialer

    def advance(self, secret: bytes, listener: int) -> ShmSegment | None:
        """Return the segment once the peer is authenticated. Raises HandshakeRefused, RingCorrupt, OSError."""
        wanted = HELLO_BYTES if self._side is None else OFFER_BYTES
        if not self._receive(wanted):
            return None
        message, self._received = self._received, b""
        if self._side is not None:
            return self._accept(self._side, message)
        self._side = ListenerSide.start(secret, listener, message)
        self.connection.send(self._side.challenge(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        return None

    def _receive(self, wanted: int) -> bool:
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self.connection, wanted - len(self._received), 1, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        self._descriptors += descriptors
        if not data:
            raise HandshakeRefused("it hung up during the handshake")
        self._received += data
        return len(self._received) == wanted

    def _accept(self, side: ListenerSide, offer: bytes) -> ShmSegment:
        nonce = side.accept_offer(offer)
        if len(self._descriptors) != 1:
            raise HandshakeRefused(f"it passed {len(self._descriptors)} descriptors, one is needed")
        segment = attach_segment(self._descriptors[0])
        try:
            self._answer(segment, nonce)
        except BaseException:
            segment.release()
            raise
        return segment

    def _answer(self, segment: ShmSegment, nonce: bytes) -> None:
        if segment.read_nonce() != nonce:
            raise HandshakeRefused("its segment does not hold the nonce it announced")
        answer = new_nonce()
        segment.write_nonce(answer)
        self.connection.send(answer, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def drop_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


_RETRY: Final = 0.005  # seconds between attempts while the backlog is full: a Unix socket gives no other signal


class ShmDial:
    """One blocking dial. The caller owns its connection."""

    def __init__(self, deadline: float) -> None:
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._deadline = deadline
        self._cancelled = Event()

    def run(self, address: ShmAddress, node: int, geometry: SegmentGeometry) -> ShmSegment:
        """Return the authenticated segment. Raises HandshakeRefused, OSError, TimeoutError."""
        assert address.key is not None
        self._connect(address.path)
        require_same_user(self.connection)
        segment = self._prove(DialerSide.start(address.key, node, address.node), geometry)
        self.connection.setblocking(False)
        return segment

    def cancel(self) -> None:
        """Make `run` raise ConnectionAbortedError. Any thread, while the connection is open."""
        self._cancelled.set()
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # not connected yet: `run` checks the flag before it waits

    def _connect(self, path: str) -> None:
        while True:
            self._go_on()
            try:
                return self.connection.connect(path)
            except BlockingIOError:
                self._cancelled.wait(_RETRY)

    def _prove(self, side: DialerSide, geometry: SegmentGeometry) -> ShmSegment:
        self._go_on()
        self.connection.sendall(side.hello)
        challenge = self._receive(CHALLENGE_BYTES)
        nonce = new_nonce()
        offer = side.offer(challenge, nonce)
        segment, descriptor = create_segment(geometry)
        try:
            segment.write_nonce(nonce)
            socket.send_fds(self.connection, [offer], [descriptor], socket.MSG_NOSIGNAL)
            if self._receive(ANSWER_BYTES) != segment.read_nonce():
                raise HandshakeRefused("the listener does not have the segment it was given")
        except BaseException:
            segment.release()
            raise
        finally:
            os.close(descriptor)
        return segment

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self._go_on()
            piece = self.connection.recv(size - len(data))
            if not piece:
                self._go_on()
                raise HandshakeRefused("the listener hung up during the handshake")
            data += piece
        return data

    def _go_on(self) -> None:
        if self._cancelled.is_set():
            raise ConnectionAbortedError("this side's transport is closed")
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the listener did not answer in time")
        self.connection.settimeout(remaining)
