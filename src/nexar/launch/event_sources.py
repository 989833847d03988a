"""Hands items from other threads to a loop that waits for descriptors.

Signals as something that can be waited for together with pipes.
"""

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
    """Any thread puts; one takes. Context manager: items that are put after its end are dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[_Item] = deque()  # this and `_closed` under the lock
        self._closed = False
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)

    def put(self, item: _Item) -> None:
        """Never blocks."""
        with self._lock:
            if not self._closed:
                self._items.append(item)
                with suppress(BlockingIOError):  # full of wake-ups: one is enough
                    os.write(self._write, b"\0")

    def fileno(self) -> int:
        """Readable when there may be items."""
        return self._read

    def take(self) -> list[_Item]:
        """All that were put since, in order."""
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


STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask the launcher to stop."""
CONTINUED = signal.SIGCONT
"""The launcher runs again after it was stopped (Ctrl-Z), or was put in the foreground."""
ASKING = signal.SIGUSR1
"""Asks the ranks where they are: the launcher passes it on."""

_Former: TypeAlias = Callable[[int, FrameType | None], Any] | int | None


class SignalInbox:
    """Collects the stopping signals, ASKING, CONTINUED and SIGCHLD while it is entered; in the main thread only.

    The kernel's handler writes the number to a pipe, so no signal is lost between looking and sleeping. One that was
    ignored before (`nohup`) stays ignored. Leaving restores what was.
    """

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._former_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._former: dict[int, _Former] = {}
        for number in (*STOPPING, ASKING, CONTINUED, signal.SIGCHLD):
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
                self._former[number] = signal.signal(number, _noted)
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
        """Readable when a signal has come."""
        return self._read

    def take(self) -> list[int]:
        """The signals that came since the last call, in order."""
        try:
            return list(os.read(self._read, 4096))
        except BlockingIOError:
            return []


def _noted(number: int, frame: FrameType | None) -> None:
    """The number is in the pipe already; this handler only keeps the default from happening."""
