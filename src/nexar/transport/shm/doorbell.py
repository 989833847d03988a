"""The Unix socket beside the rings: it ends the peer's sleep, and its hang-up tells of the peer's death.

Sleeping words: each side has one in the segment, which only it writes. 0: awake. Otherwise asleep, and the number of
the nap; its lowest bit says that the sleeper waits for room as well as for news. Who changed something for a sleeper
writes one byte, once per nap (`_rung` remembers which), so bytes never pile up in the socket.

The race, and where it is closed. The sleeper stores "asleep", then looks at the rings a last time; the other side
stores its new head, then looks whether somebody sleeps. Total store order allows one exception, a load overtaking an
*earlier store to another word*: each could miss the other's store, and the sleeper would sleep on. So both sides
execute an atomic read-modify-write between their store and their load, which on x86 is a full fence: every acquire
and release of a threading.Lock contains one. The sender releases the lock of its FrameSender or PayloadSender there,
the receiver and the sleeper call `fence()`, and so does who changed other memory that the sleeper looks at before it
calls `nudge`. The timed re-check of ShmTransport.due stands behind that as a second
line.
"""

from __future__ import annotations

import socket
import threading
from typing import Final

_BYTE: Final = b"\x01"
_NOTE: Final = b"\x00"  # what follows is the reason of an abort
_NOTE_BYTES: Final = 200

_fence_lock: Final = threading.Lock()


def fence() -> None:
    """Everything stored before is visible to other processes before anything after is loaded."""
    _fence_lock.acquire()
    _fence_lock.release()


class Doorbell:
    """This side's end of the socket, and its sleeping word."""

    __slots__ = ("_lock", "_mine", "_note", "_rung", "_socket", "_theirs", "_words", "hung_up")

    def __init__(self, connection: socket.socket, words: memoryview, mine: int, theirs: int) -> None:
        """`mine` and `theirs`: where in `words` each side's sleeping word is."""
        self._socket = connection
        self._words = words
        self._mine = mine
        self._theirs = theirs
        self._lock = threading.Lock()  # for closing while another thread rings
        self._rung = 0  # the nap we last rang for; any thread writes it, and a race costs one needless byte
        self._note = b""  # what the peer said of its abort; the driving thread writes
        self.hung_up = False  # the peer is gone; the driving thread writes

    def fileno(self) -> int:
        """The descriptor to watch."""
        return self._socket.fileno()

    def fall_asleep(self, nap: int, wants_room: bool) -> None:
        """Ask for a byte. The caller fences and looks at the rings again before it sleeps. `nap` is even and new."""
        self._words[self._mine] = nap | wants_room

    def wake(self) -> None:
        """Ask for no more bytes."""
        self._words[self._mine] = 0

    def nudge(self) -> None:
        """Wake the peer if it sleeps: something changed in memory outside this segment. The caller has fenced. From any
        thread; without effect once the carrier has ended.
        """
        try:
            nap = self._words[self._theirs]
        except ValueError:
            return  # the segment is gone, and the peer hears of that
        if nap:
            self.ring(nap)

    def ring(self, nap: int) -> None:
        """Wake the peer from that nap, unless we have done so. From any thread."""
        if nap == self._rung:
            return
        self._rung = nap
        with self._lock:
            if self._socket.fileno() >= 0:
                self._send(_BYTE)

    def _send(self, data: bytes) -> None:
        try:
            self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return  # full of bytes unread: the peer's sleep ends anyway
        except OSError:
            return  # the peer is gone: its hang-up is readable here, and `drain` tells

    def drain(self) -> None:
        """Take the bytes out, notice a hang-up. By the driving thread."""
        with self._lock:
            data = _BYTE if self._socket.fileno() < 0 else self._receive()
        self.hung_up = self.hung_up or not data
        if self._note or _NOTE in data:
            self._note = (self._note + data[data.find(_NOTE) if not self._note else 0 :])[: _NOTE_BYTES + 1]

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return _BYTE  # nothing there: as good as a byte
        except OSError:
            return b""  # reset: the peer died with bytes of ours unread

    def farewell(self) -> str:
        """Why the peer is gone, as far as it said."""
        if not self._note:
            return "the peer's process ended or closed the connection"
        return "the peer ended it: " + self._note[1:].decode(errors="replace")

    def close(self, reason: str | None) -> None:
        """Hang up, with the reason of an abort if there is one. Idempotent."""
        with self._lock:
            if self._socket.fileno() < 0:
                return
            if reason is not None:
                self._send(_NOTE + reason.encode()[:_NOTE_BYTES])
            self._hang_up()
            self._socket.close()

    def _hang_up(self) -> None:
        # Closing alone would not do while a forked child holds a copy of the descriptor.
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer was first

    def abandon(self) -> None:
        """In a forked child: drop the descriptor, without a lock that some thread of the parent may hold for ever."""
        self._socket.close()
