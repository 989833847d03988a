"""The dialer's half of the handshake: blocking, in the thread of whoever called connect."""

from __future__ import annotations

import os
import socket
import time
from typing import Final

from nexar.transport.shm.address import ShmAddress
from nexar.transport.shm.candidate import require_same_user
from nexar.transport.shm.handshake import ANSWER_BYTES, CHALLENGE_BYTES, DialerSide, Refused, new_nonce
from nexar.transport.shm.segment import Geometry, Segment, create

_RETRY: Final = 0.005  # seconds until a full backlog is tried again: such a Unix socket gives no other sign


def dial(address: ShmAddress, node: int, geometry: Geometry, deadline: float) -> tuple[socket.socket, Segment]:
    """An authenticated connection and the segment both share. Refused, OSError (TimeoutError at the deadline)."""
    assert address.key is not None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _connect(connection, address.path, deadline)
        require_same_user(connection)
        segment = _prove(connection, DialerSide.start(address.key, node, address.node), geometry, deadline)
        connection.setblocking(False)
    except BaseException:
        connection.close()
        raise
    return connection, segment


def _connect(connection: socket.socket, path: str, deadline: float) -> None:
    while True:
        _allow_until(connection, deadline)
        try:
            return connection.connect(path)
        except BlockingIOError:
            time.sleep(_RETRY)


def _prove(connection: socket.socket, side: DialerSide, geometry: Geometry, deadline: float) -> Segment:
    _allow_until(connection, deadline)
    connection.sendall(side.hello)
    challenge = _receive(connection, CHALLENGE_BYTES, deadline)
    nonce = new_nonce()
    offer = side.offer(challenge, nonce)
    segment, descriptor = create(geometry)
    try:
        segment.write_nonce(nonce)
        socket.send_fds(connection, [offer], [descriptor], socket.MSG_NOSIGNAL)
        if _receive(connection, ANSWER_BYTES, deadline) != segment.read_nonce():
            raise Refused("the listener has not the segment it was given")
    except BaseException:
        segment.release()
        raise
    finally:
        os.close(descriptor)
    return segment


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        _allow_until(connection, deadline)
        piece = connection.recv(size - len(data))
        if not piece:
            raise Refused("the listener hung up during the handshake")
        data += piece
    return data


def _allow_until(connection: socket.socket, deadline: float) -> None:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("the listener did not answer in time")
    connection.settimeout(remaining)
