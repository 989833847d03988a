"""Times of calls → what the table shows. Pure.

A block's time is the median over its calls, of the rank where that is longest: a root that has handed its data over
may be done long before the others have them. The figure is the median over blocks, so one that was disturbed counts
for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from nexar.cli.bench.measures import Measure
from nexar.cli.bench.order import Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What one system did at one size. Times in microseconds, bandwidths in 10⁹ bytes per second."""

    system: str
    time_us: float
    p10_us: float
    p99_us: float
    mean_us: float
    algbw: float
    busbw: float
    wrong: int
    calls: int


def figure(system: str, measure: Measure, count: int, itemsize: int, blocks: Sequence[Sequence[Reply]]) -> Figure:
    """From every block's replies, by rank."""
    ranks = len(blocks[0])
    messages = measure.messages(count, itemsize)
    slowest = [max((reply.nanoseconds for reply in block if reply.nanoseconds), key=median) for block in blocks]
    microseconds = sorted(time / messages / 1e3 for times in slowest for time in times)
    time_us = median(median(times) for times in slowest) / messages / 1e3
    algbw = measure.size_bytes(count, itemsize, ranks) / time_us / 1e3
    return Figure(
        system=system,
        time_us=time_us,
        p10_us=quantile(microseconds, 0.10),
        p99_us=quantile(microseconds, 0.99),
        mean_us=mean(microseconds),
        algbw=algbw,
        busbw=algbw * measure.busbw_factor(ranks),
        wrong=sum(reply.wrong for block in blocks for reply in block),
        calls=len(microseconds),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def iterations_for(call_seconds: float, seconds: float, least: int, most: int = 20_000) -> int:
    """Calls that fill so much time, within bounds."""
    return max(least, min(most, round(seconds / max(call_seconds, 1e-9))))
