"""Memory for benchmarks, written before use and reused.

Untouched memory costs a page fault per 4 KiB when written and nothing when read; neither should be measured.
"""

from __future__ import annotations

from functools import cache


@cache
def touched(size: int, number: int = 0) -> memoryview:
    """The same memory for the same arguments."""
    return memoryview(bytearray([number + 1]) * size)
