"""Memory that is measured with: written to beforehand, and used again and again.

Untouched memory costs a page fault for every 4 KiB when written, and nothing at all when read.
Neither is a carrier's doing.
"""

from __future__ import annotations

from functools import cache


@cache
def touched(size: int, number: int = 0) -> memoryview:
    """The same memory for the same question."""
    return memoryview(bytearray([number + 1]) * size)
