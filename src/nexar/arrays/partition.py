"""How a row of elements is cut: into shares for ranks, and into segments for a pipeline."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """The elements `start` up to, not including, `stop`."""

    start: int
    stop: int

    @property
    def count(self) -> int:  # type: ignore[override]  # a span has no use for a tuple's count()
        """How many elements."""
        return self.stop - self.start


def split(count: int, parts: int) -> tuple[Span, ...]:
    """`parts` spans that tile `count` elements in order, as np.array_split cuts them.

    The first `count % parts` of them have one element more; with fewer elements than parts the rest are empty.
    ValueError for a negative count and for less than one part.
    """
    if count < 0 or parts < 1:
        raise ValueError(f"{count} elements cannot be cut into {parts} parts")
    size, longer = divmod(count, parts)
    starts = [part * size + min(part, longer) for part in range(parts + 1)]
    return tuple(map(Span, starts[:-1], starts[1:]))


def segments(span: Span, limit: int) -> tuple[Span, ...]:
    """Tiles of `span` in order, each of `limit` elements but the last, which has what is left; none of an empty span.

    ValueError for a limit below one.
    """
    if limit < 1:
        raise ValueError(f"segments of {limit} elements never reach the end")
    return tuple(Span(start, min(start + limit, span.stop)) for start in range(span.start, span.stop, limit))
