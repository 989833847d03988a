"""Hands items from other threads to a loop that waits for descriptors."""

import os
import threading
from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import Generic, Self, TypeVar

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
