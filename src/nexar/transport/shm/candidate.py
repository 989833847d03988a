"""An inbound connection that has proven nothing yet: the listener's half of the handshake, fed as bytes arrive."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

from nexar.transport.shm.handshake import HELLO_BYTES, OFFER_BYTES, ListenerSide, Refused, new_nonce
from nexar.transport.shm.segment import Segment, attach

_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid


def credentials_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel recorded them when it connected."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(data)
    return process, user


def require_same_user(connection: socket.socket) -> None:
    """Refused unless the process at the other end runs as our user."""
    _, user = credentials_of(connection)
    if user != os.geteuid():
        raise Refused(f"it runs as user {user}, we as {os.geteuid()}")


class Candidate:
    """Used by the driving thread only. Never reads more than the handshake has to say."""

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
        """Who it is; proven once `advance` has returned a segment."""
        assert self._side is not None
        return self._side.dialer

    def advance(self, secret: bytes, listener: int) -> Segment | None:
        """Take in what arrived; the segment when all is proven. Refused, Corrupt, OSError."""
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
            raise Refused("it hung up during the handshake")
        self._received += data
        return len(self._received) == wanted

    def _accept(self, side: ListenerSide, offer: bytes) -> Segment:
        nonce = side.accept_offer(offer)
        if len(self._descriptors) != 1:
            raise Refused(f"it passed {len(self._descriptors)} descriptors, one is needed")
        segment = attach(self._descriptors[0])
        try:
            self._answer(segment, nonce)
        except BaseException:
            segment.release()
            raise
        return segment

    def _answer(self, segment: Segment, nonce: bytes) -> None:
        if segment.read_nonce() != nonce:
            raise Refused("its segment does not hold the nonce it announced")
        answer = new_nonce()
        segment.write_nonce(answer)
        self.connection.send(answer, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def drop_descriptors(self) -> None:
        """The mapping, if there is one, needs none."""
        while self._descriptors:
            os.close(self._descriptors.pop())
