"""Takes dials: accepts, leads each candidate through the handshake, hands over what is proven."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from typing import Final

from nexar.transport.base import Acceptor
from nexar.transport.shm.address import ShmAddress
from nexar.transport.shm.candidate import Candidate, require_same_user
from nexar.transport.shm.descriptors import Descriptors
from nexar.transport.shm.handshake import KEY_BYTES, Refused, derive_key
from nexar.transport.shm.place import Place
from nexar.transport.shm.ring import Corrupt
from nexar.transport.shm.segment import Segment

HANDSHAKE_TIMEOUT: Final = 10.0
MAX_CANDIDATES: Final = 64
_BACKLOG: Final = 256
_PAUSE: Final = 0.1  # seconds without accepting after the system refused (no descriptors left)

Proven = Callable[[socket.socket, Segment, int, str], None]
"""Called with a connection, its segment, the node that has proven itself, and which process that is."""


class Listener:
    """Driven by the driving thread through `descriptors`; only `address_for` is for any thread."""

    def __init__(self, node: int, place: Place, descriptors: Descriptors, acceptor: Acceptor, proven: Proven) -> None:
        self._node = node
        self._place = place
        self._descriptors = descriptors
        self._acceptor = acceptor
        self._proven = proven
        self._secret = secrets.token_bytes(KEY_BYTES)
        self._candidates: dict[int, Candidate] = {}  # by descriptor, the oldest first
        self._paused_until = 0.0
        self._socket = self._bind()
        descriptors.add(self._socket.fileno(), self._accept)

    def _bind(self) -> socket.socket:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.setblocking(False)
            listening.bind(self._place.socket_path)
            listening.listen(_BACKLOG)
        except BaseException:
            listening.close()
            raise
        return listening

    def address_for(self, node: int | None) -> ShmAddress:
        """What `node` needs to dial us; None: the address without a key, to show."""
        key = None if node is None else derive_key(self._secret, node)
        return ShmAddress(self._node, self._place.socket_path, key)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause(error)
            return
        connection.setblocking(False)
        self._admit(Candidate(connection, time.monotonic() + HANDSHAKE_TIMEOUT))

    def _pause(self, error: OSError) -> None:
        # The socket stays readable, so going on would spin.
        self._descriptors.remove(self._socket.fileno())
        self._paused_until = time.monotonic() + _PAUSE
        self._acceptor.candidate_refused(self.address_for(None).shown, f"cannot accept: {error}")

    def _admit(self, candidate: Candidate) -> None:
        if len(self._candidates) >= MAX_CANDIDATES:
            self._refuse(
                next(iter(self._candidates.values())), "too many others knock and this one was the longest silent"
            )
        descriptor = candidate.connection.fileno()
        self._candidates[descriptor] = candidate
        self._descriptors.add(descriptor, lambda: self._advance(candidate))
        try:
            require_same_user(candidate.connection)
        except Refused as error:
            self._refuse(candidate, str(error))

    def _advance(self, candidate: Candidate) -> None:
        if self._candidates.get(candidate.connection.fileno()) is not candidate:
            return  # refused since it became readable
        try:
            segment = candidate.advance(self._secret, self._node)
        except (Refused, Corrupt, OSError) as error:
            self._refuse(candidate, str(error))
            return
        if segment is not None:
            self._release(candidate)
            self._proven(candidate.connection, segment, candidate.node, candidate.name)

    def _release(self, candidate: Candidate) -> None:
        descriptor = candidate.connection.fileno()
        self._descriptors.remove(descriptor)
        del self._candidates[descriptor]
        candidate.drop_descriptors()

    def _refuse(self, candidate: Candidate, reason: str) -> None:
        self._release(candidate)
        candidate.connection.close()
        self._acceptor.candidate_refused(candidate.name, reason)

    def due(self) -> float | None:
        """When `expire` has something to do."""
        times = [candidate.deadline for candidate in self._candidates.values()]
        if self._paused_until:
            times.append(self._paused_until)
        return min(times, default=None)

    def expire(self, now: float) -> None:
        """Refuse those who took too long; accept again after a pause."""
        for candidate in [each for each in self._candidates.values() if each.deadline <= now]:
            self._refuse(candidate, f"no proof within {HANDSHAKE_TIMEOUT:g} s")
        if 0 < self._paused_until <= now:
            self._paused_until = 0.0
            self._descriptors.add(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Stop listening, drop the candidates, remove the directory."""
        self._descriptors.remove(self._socket.fileno())
        for candidate in list(self._candidates.values()):
            self._release(candidate)
            candidate.connection.close()
        self._socket.close()
        self._place.remove()

    def abandon(self) -> None:
        """In a forked child: close the descriptors; socket and directory are the parent's."""
        for candidate in self._candidates.values():
            candidate.connection.close()
        self._socket.close()
        self._place.abandon()
