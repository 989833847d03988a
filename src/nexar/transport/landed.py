"""Which payloads of a carrier landed lately: a redirect that comes too late must hear that it did.

Only so many are remembered, because a carrier moves payloads without end. It is enough: who asks does not know yet that
the payload landed, so its `payload_arrived` has not returned, and few can be in that state at a time. One that was
forgotten counts as unknown, which no one takes for a whole payload.
"""

from __future__ import annotations

from typing import Final

REMEMBERED: Final = 4096


class Landed:
    """Numbers of transfers, the newest ones. Guarded by its owner's lock."""

    __slots__ = ("_transfers",)

    def __init__(self) -> None:
        self._transfers: dict[int, None] = {}  # oldest first

    def add(self, transfer: int) -> None:
        """Every byte of it is in its place."""
        self._transfers[transfer] = None
        if len(self._transfers) > REMEMBERED:
            del self._transfers[next(iter(self._transfers))]

    def forget(self, transfer: int) -> None:
        """Its number is used again."""
        self._transfers.pop(transfer, None)

    def clear(self) -> None:
        """The carrier has ended."""
        self._transfers.clear()

    def __contains__(self, transfer: int) -> bool:
        return transfer in self._transfers
