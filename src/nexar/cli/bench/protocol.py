"""The measures, counted as in nccl-tests, and the JSON lines between the command and ranks. No I/O.

`count`: elements of one rank's share if the data is spread over the ranks, else all. `size`: bytes of the larger side.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Final

WINDOW_BYTES: Final = 64 << 20
MOST_IN_WINDOW: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One operation to measure."""

    name: str
    reduces: bool = False
    rooted: bool = False
    spread: bool = False
    """The size is that of all ranks' shares together."""
    pair: bool = False
    """Only ranks 0 and 1 take part."""
    sized: bool = True

    def count(self, size_bytes: int, itemsize: int, ranks: int) -> int:
        """Rounded down as in nccl-tests, at least 1."""
        if not self.sized:
            return 0
        return max(1, size_bytes // itemsize // (ranks if self.spread else 1))

    def size_bytes(self, count: int, itemsize: int, ranks: int) -> int:
        return count * itemsize * (ranks if self.spread else 1)

    def busbw_factor(self, ranks: int) -> float:
        """Factor from algbw to the bandwidth of each rank's wire."""
        if self.name == "all_reduce":
            return 2 * (ranks - 1) / ranks
        return (ranks - 1) / ranks if self.spread else 1.0

    def messages(self, count: int, itemsize: int) -> int:
        """One-way messages per timed call."""
        if self.name == "p2p-bandwidth":
            return window(count * itemsize)
        return 2 if self.name == "p2p-latency" else 1

    def counts(self, count: int, ranks: int) -> tuple[int, int]:
        """Elements of (source, target); in place there is only a target."""
        whole = count * ranks
        return {
            "all_reduce": (0, count),
            "broadcast": (0, count),
            "reduce": (count, count),
            "all_gather": (count, whole),
            "reduce_scatter": (whole, count),
            "all_to_all": (whole, whole),
            "gather": (count, whole),
            "scatter": (whole, count),
            "barrier": (0, 0),
            "p2p-latency": (count, count),
            "p2p-bandwidth": (count, count),
        }[self.name]


def window(size_bytes: int) -> int:
    """Return the number of messages in flight: at most 64, and bounded in bytes."""
    return max(1, min(MOST_IN_WINDOW, WINDOW_BYTES // max(1, size_bytes)))


MEASURES: Final[dict[str, Measure]] = {
    measure.name: measure
    for measure in (
        Measure(name="all_reduce", reduces=True),
        Measure(name="all_gather", spread=True),
        Measure(name="reduce_scatter", reduces=True, spread=True),
        Measure(name="broadcast", rooted=True),
        Measure(name="reduce", reduces=True, rooted=True),
        Measure(name="all_to_all", spread=True),
        Measure(name="gather", rooted=True, spread=True),
        Measure(name="scatter", rooted=True, spread=True),
        Measure(name="barrier", sized=False),
        Measure(name="p2p-latency", pair=True),
        Measure(name="p2p-bandwidth", pair=True),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOrder:
    """One block of calls."""

    measure: str
    count: int
    dtype: str
    op: str
    root: int
    algorithm: str | None
    warmups: int
    iterations: int
    check: bool
    """Also run it once with known values, and count wrong elements."""

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReply:
    """One rank's measurements."""

    nanoseconds: tuple[int, ...] = ()
    """Of each call; empty from a rank that took no part."""
    wrong: int = 0
    problem: str = ""
    """Why the system does not support the order."""

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHello:
    """The first line of a rank."""

    rank: int
    version: str

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def parse_order(line: bytes | str) -> BenchOrder:
    """Inverse of `BenchOrder.line`."""
    return BenchOrder(**json.loads(line))


def parse_reply(line: bytes | str) -> BenchReply:
    """Inverse of `BenchReply.line`."""
    facts: dict[str, Any] = json.loads(line)
    return BenchReply(nanoseconds=tuple(facts["nanoseconds"]), wrong=facts["wrong"], problem=facts["problem"])


def parse_hello(line: bytes | str) -> RankHello:
    """Inverse of `RankHello.line`."""
    return RankHello(**json.loads(line))
