"""Blocks of elements, one per rank, and their messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from nexar.arrays.views import Span, segments
from nexar.collectives.schedule import Combine, Range, RecvStep, SendStep


def equal(count: int, size: int) -> tuple[Span, ...]:
    """`size` consecutive blocks of `count` elements."""
    return tuple(Span(rank * count, (rank + 1) * count) for rank in range(size))


def part(span: Span, buffer: int = 0) -> Range:
    """The span as a range."""
    return Range(buffer, span.start, span.stop)


def whole(count: int, buffer: int = 0) -> Range:
    """The whole buffer."""
    return Range(buffer, 0, count)


def tiles(span: Span, segment: int) -> tuple[Span, ...]:
    """Segments of at most `segment` elements; 0: no limit."""
    if not segment or span.count <= segment:
        return (span,)
    return segments(span, segment)


def most_tiles(spans: Iterable[Span], segment: int) -> int:
    """Number of tags per round."""
    return max(len(tiles(span, segment)) for span in spans)


def runs(spans: Sequence[Span], ranks: Iterable[int]) -> tuple[Range, ...]:
    """Joins adjacent blocks: fewer, longer messages."""
    joined: list[Span] = []
    for span in (spans[rank] for rank in ranks if spans[rank].count):
        if joined and joined[-1].stop == span.start:
            joined[-1] = Span(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return tuple(map(part, joined))


def sends(peer: int, parts: Iterable[Range], tag: int) -> Iterator[SendStep]:
    """One message per part; `receives` is the other end."""
    return (SendStep(peer, each, tag + index) for index, each in enumerate(parts))


def receives(peer: int, parts: Iterable[Range], how: Combine, tag: int) -> Iterator[RecvStep]:
    """One message per part; `sends` is the other end."""
    return (RecvStep(peer, each, tag + index, how) for index, each in enumerate(parts))
