"""Calls that come to nothing because a rank has left them, or will never make them. Pure."""

from __future__ import annotations

from typing import Final

from nexar.wire.messages import GaveUp

GIVEN_UP: Final = 1024
"""Calls given up that are remembered."""


class GivenUp(dict[int, GaveUp]):
    """What was said of calls, by sequence, also of calls to come. Empty: nothing was. Under the lock of who has it."""

    def __init__(self) -> None:
        super().__init__()
        self._last: GaveUp | None = None  # from that call on a rank takes no part any more: the lowest of them

    def add(self, notice: GaveUp) -> bool:
        """One more. False: nothing new."""
        if notice.closed:
            if self._last is not None and self._last.sequence <= notice.sequence:
                return False
            self._last = notice
        elif self.find(notice.sequence) is not None:
            return False
        if len(self) >= GIVEN_UP:
            del self[min(self)]
        self.setdefault(notice.sequence, notice)
        return True

    def find(self, sequence: int) -> GaveUp | None:
        """What ends this call; None: nothing that is known."""
        found = self.get(sequence)
        if found is None and self._last is not None and sequence >= self._last.sequence:
            return self._last
        return found
