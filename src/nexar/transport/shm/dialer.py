"""The dialer's half of the handshake: blocking, in the thread of whoever called connect."""

from __future__ import annotations

import os
import socket
import time
from threading import Event
from typing import Final

from nexar.transport.shm.address import ShmAddress
from nexar.transport.shm.candidate import require_same_user
from nexar.transport.shm.handshake import ANSWER_BYTES, CHALLENGE_BYTES, DialerSide, Refused, new_nonce
from nexar.transport.shm.segment import Geometry, Segment, create

_RETRY: Final = 0.005  # seconds until a full backlog is tried again: such a Unix socket gives no other sign


class Dial:
    """One dial. Its connection belongs to whoever made the object, who closes it or hands it on."""

    def __init__(self, deadline: float) -> None:
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._deadline = deadline
        self._hung_up = Event()

    def run(self, address: ShmAddress, node: int, geometry: Geometry) -> Segment:
        """Authenticate: the segment both share. Refused, OSError (TimeoutError at the deadline)."""
        assert address.key is not None
        self._connect(address.path)
        require_same_user(self.connection)
        segment = self._prove(DialerSide.start(address.key, node, address.node), geometry)
        self.connection.setblocking(False)
        return segment

    def hang_up(self) -> None:
        """By another thread, while the connection is open: let `run` end with ConnectionAbortedError."""
        self._hung_up.set()
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # not connected yet: before it waits it looks at the flag

    def _connect(self, path: str) -> None:
        while True:
            self._go_on()
            try:
                return self.connection.connect(path)
            except BlockingIOError:
                self._hung_up.wait(_RETRY)

    def _prove(self, side: DialerSide, geometry: Geometry) -> Segment:
        self._go_on()
        self.connection.sendall(side.hello)
        challenge = self._receive(CHALLENGE_BYTES)
        nonce = new_nonce()
        offer = side.offer(challenge, nonce)
        segment, descriptor = create(geometry)
        try:
            segment.write_nonce(nonce)
            socket.send_fds(self.connection, [offer], [descriptor], socket.MSG_NOSIGNAL)
            if self._receive(ANSWER_BYTES) != segment.read_nonce():
                raise Refused("the listener has not the segment it was given")
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
                raise Refused("the listener hung up during the handshake")
            data += piece
        return data

    def _go_on(self) -> None:
        """Allow the next step the time that is left."""
        if self._hung_up.is_set():
            raise ConnectionAbortedError("this side's transport is closed")
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the listener did not answer in time")
        self.connection.settimeout(remaining)
