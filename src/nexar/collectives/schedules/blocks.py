"""Where the elements of a rank lie: blocks, one per rank, in rank order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from nexar.arrays.views import Span, segments
from nexar.collectives.schedule import Combine, Range, RecvStep, SendStep


def equal(count: int, size: int) -> tuple[Span, ...]:
    """`size` blocks of `count` elements, one after the other."""
    return tuple(Span(rank * count, (rank + 1) * count) for rank in range(size))


def part(span: Span, buffer: int = 0) -> Range:
    """The span, in that buffer."""
    return Range(buffer, span.start, span.stop)


def whole(count: int, buffer: int = 0) -> Range:
    """All elements of a buffer."""
    return Range(buffer, 0, count)


def tiles(span: Span, segment: int) -> tuple[Span, ...]:
    """Segments of at most that many elements, at least one; 0: no limit, so there is one."""
    if not segment or span.count <= segment:
        return (span,)
    return segments(span, segment)


def most_tiles(spans: Iterable[Span], segment: int) -> int:
    """How many tiles the longest span has: tags of one round that stay clear of the next."""
    return max(len(tiles(span, segment)) for span in spans)


def runs(spans: Sequence[Span], ranks: Iterable[int]) -> tuple[Range, ...]:
    """The blocks of those ranks in buffer 0, joined where one ends as the next begins: fewer, longer messages."""
    joined: list[Span] = []
    for span in (spans[rank] for rank in ranks if spans[rank].count):
        if joined and joined[-1].stop == span.start:
            joined[-1] = Span(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return tuple(map(part, joined))


def sends(peer: int, parts: Iterable[Range], tag: int) -> Iterator[SendStep]:
    """One message per part, with tags from `tag` on; `receives` is the other end."""
    return (SendStep(peer, each, tag + index) for index, each in enumerate(parts))


def receives(peer: int, parts: Iterable[Range], how: Combine, tag: int) -> Iterator[RecvStep]:
    """One message per part, with tags from `tag` on; `sends` is the other end."""
    return (RecvStep(peer, each, tag + index, how) for index, each in enumerate(parts))
