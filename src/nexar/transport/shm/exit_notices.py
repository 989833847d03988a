"""Tells a carrier that its peer's process has ended, milliseconds before the kernel closes the peer's socket.

Needs nexar-native and Linux 5.16. Without them the carriers notice the closed socket.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nexar.native import exit_watch
    from nexar.transport.shm.carrier import ShmCarrier

_log = logging.getLogger(__name__)


class ExitNotices:
    """Watches the peers of one transport, from the first carrier on. Any thread."""

    def __init__(self, watch: Callable[[int, Callable[[], None]], None], unwatch: Callable[[int], None]) -> None:
        """`watch` makes the driver call a function when a descriptor is readable."""
        self.enabled = False  # while not, ends are ignored, and the carriers notice the closed socket
        self._watch_descriptor = watch
        self._unwatch_descriptor = unwatch
        self._lock = threading.Lock()  # guards everything below
        self._watch: exit_watch.ExitWatch | None = None
        self._supported = True
        self._carriers: dict[int, ShmCarrier] = {}  # by key
        self._keys: dict[ShmCarrier, int] = {}

    def add(self, carrier: ShmCarrier, words: memoryview, mine: int, theirs: int) -> None:
        """`mine` and `theirs` are indices of words of the first page."""
        with self._lock:
            watch = self._begun()
            if watch is None:
                return
            try:
                key = watch.add(words, mine * words.itemsize, theirs * words.itemsize)
            except OSError as error:  # for example too many mappings
                _log.debug("the end of %s shows late: %s", carrier.peer.address, error)
                return
            if key is not None:
                self._carriers[key], self._keys[carrier] = carrier, key

    def _begun(self) -> exit_watch.ExitWatch | None:
        if self._watch is None and self._supported:
            self._supported = False
            self._watch = _new_watch()
            if self._watch is not None:
                self._watch_descriptor(self._watch.fileno(), self._deliver)
        return self._watch

    def _deliver(self) -> None:
        with self._lock:
            keys = [] if self._watch is None else self._watch.ended()
            ended = [self._carriers[key] for key in keys if key in self._carriers and self.enabled]
        for carrier in ended:
            carrier.process_ended()

    def remove(self, carrier: ShmCarrier) -> None:
        """The peer is not told of a later end of this process. Idempotent."""
        with self._lock:
            key = self._keys.pop(carrier, None)
            if key is not None and self._watch is not None:
                del self._carriers[key]
                self._watch.remove(key)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            watch, self._watch, self._supported = self._watch, None, False
            self._carriers.clear()
            self._keys.clear()
            if watch is not None:
                self._unwatch_descriptor(watch.fileno())
                watch.close()

    def abandon(self) -> None:
        """In a forked child: the words are the parent's. Takes no lock."""
        self._watch, self._supported = None, False
        self._carriers, self._keys = {}, {}


def _new_watch() -> exit_watch.ExitWatch | None:
    try:
        from nexar.native import exit_watch  # noqa: PLC0415 - optional

        return exit_watch.ExitWatch()
    except (ImportError, OSError) as error:
        _log.debug("the end of a process on this host shows when its sockets close: %s", error)
        return None
