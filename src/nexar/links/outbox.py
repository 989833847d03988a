"""I/O that a change of state asks for. Filled under the node's lock, done after it was released, by whoever comes
first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from nexar.transport.base import CarrierLost


class Outbox:
    """Calls to make, in order. A deque's append and popleft are atomic, so no lock is needed to empty it."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()

    def add(self, call: Callable[..., Any], *arguments: Any) -> None:
        """`call` must not block."""
        self.calls.append((call, arguments))

    def flush(self) -> None:
        """Make the calls.

        A carrier that is lost reports that to its link by itself, once; what it was to send is void.
        """
        calls = self.calls
        while calls:
            try:
                call, arguments = calls.popleft()
            except IndexError:  # another thread was quicker
                return
            try:
                call(*arguments)
            except CarrierLost:
                continue
