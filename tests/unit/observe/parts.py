"""Parts of a trace, as ranks would write them."""

from collections.abc import Sequence

from nexar.collectives.operations import OperationCode
from nexar.collectives.trace_writer import TRACE_FORMAT, Called, TracePart


def call(
    sequence: int, began: float, ended: float, operation: int = OperationCode.ALL_REDUCE, outcome: str = ""
) -> Called:
    return sequence, (int(operation), 0, 8, 0, 0, 0), began, ended, 64, outcome


def part(
    rank: int,
    calls: Sequence[Called],
    *,
    host: str = "a",
    communicator: int = 0,
    generation: int = 1,
    ahead: float = 0.0,
    node: int | None = None,
) -> TracePart:
    """`ahead`: what the clock of its host is ahead of the others'."""
    moved = tuple((s, f, b + ahead, e + ahead, size, outcome) for s, f, b, e, size, outcome in calls)
    return TracePart(
        format=TRACE_FORMAT,
        cluster="c",
        node=node or rank + 1,
        rank=rank,
        size=4,
        host=host,
        host_name=f"host-{host}",
        pid=100 + rank,
        communicator=communicator,
        generation=generation,
        monotonic=1000.0 + ahead,
        wall=5000.0,
        missed=0,
        calls=moved,
    )
