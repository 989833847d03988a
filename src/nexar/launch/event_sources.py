"""Event sources with a file descriptor: items from other threads, and signals."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Generic, Self, TypeAlias, TypeVar

_Item = TypeVar("_Item")


class Mailbox(Generic[_Item]):
    """Any thread puts, one thread takes. Items put after the block are dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[_Item] = deque()  # the lock guards this and `_closed`
        self._closed = False
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)

    def put(self, item: _Item) -> None:
        """Never blocks."""
        with self._lock:
            if not self._closed:
                self._items.append(item)
                with suppress(BlockingIOError):  # the pipe is full of wake-ups: one is enough
                    os.write(self._write, b"\0")

    def fileno(self) -> int:
        return self._read

    def take(self) -> list[_Item]:
        with self._lock:
            with suppress(BlockingIOError):
                os.read(self._read, 65_536)
            items = list(self._items)
            self._items.clear()
            return items

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
            os.close(self._read)
            os.close(self._write)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask the launcher to stop."""
CONTINUE_SIGNAL = signal.SIGCONT
"""The launcher resumes after Ctrl-Z, or moves to the foreground."""
DUMP_SIGNAL = signal.SIGUSR1
"""Makes the ranks dump their flight recorders: the launcher forwards it."""

_Handler: TypeAlias = Callable[[int, FrameType | None], Any] | int | None


class SignalInbox:
    """Collects signals inside its block; main thread only. The C-level handler writes to a pipe, so no signal is lost
    before a sleep. Signals ignored before (`nohup`) stay ignored.
    """

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._former_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._former: dict[int, _Handler] = {}
        for number in (*STOP_SIGNALS, DUMP_SIGNAL, CONTINUE_SIGNAL, signal.SIGCHLD):
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
                self._former[number] = signal.signal(number, _do_nothing)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._former_wakeup)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        return self._read

    def take(self) -> list[int]:
        try:
            return list(os.read(self._read, 4096))
        except BlockingIOError:
            return []


def _do_nothing(number: int, frame: FrameType | None) -> None: ...
