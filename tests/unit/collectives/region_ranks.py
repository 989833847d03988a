"""Ranks of one shared region in one process: a node each, which a wake-up kicks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.shared_region import SharedRegion
from nexar.collectives.shared_region_layout import SLOT_BYTES, PublishedCall, create_memory, open_memory
from nexar.links.operation import Operation
from nexar.links.progress import Progress
from nexar.transport.sleeper import PollSleeper
from nexar.types import AwaitedPeer

LONG = 30.0
"""Seconds that nothing here should ever take."""


class GivenUp(Exception):
    """By that rank."""


class Different(Exception):
    """That rank, and what it has instead."""


class Members:
    """Says who by numbers."""

    def awaited(self, index: int) -> AwaitedPeer:
        return AwaitedPeer(rank=index)

    def aborted(self, index: int, operation: str) -> BaseException:
        return GivenUp(index, operation)

    def differs(self, index: int, theirs: Fingerprint, mine: PublishedCall) -> BaseException:
        return Different(index, theirs, mine)


class Rank:
    """One of them."""

    def __init__(self, number: int, shared_region: SharedRegion, progress: Progress) -> None:
        self.number = number
        self.region = shared_region
        self.progress = progress

    def wait(self, *operations: Operation, timeout: float = LONG) -> None:
        """Until all are done."""
        self.progress.wait(operations, time.monotonic() + timeout)


@contextmanager
def ranks(size: int, *, slot_bytes: int = SLOT_BYTES, spin: float = 200e-6) -> Iterator[list[Rank]]:
    """All of them; `with` closes everything."""
    made = create_memory(size, slot_bytes)
    memories = [made, *(open_memory(made.offer, size) for _ in range(size - 1))]
    made.close_descriptor()
    sleepers = [PollSleeper() for _ in range(size)]
    nodes = [Progress(sleeper, [], spin=spin) for sleeper in sleepers]
    wakes = [node.wake for node in nodes]
    regions = [SharedRegion(node, memories[number], number, Members(), wakes) for number, node in enumerate(nodes)]
    try:
        yield [Rank(number, regions[number], node) for number, node in enumerate(nodes)]
    finally:
        for shared_region in regions:
            shared_region.close()
        for node, sleeper in zip(nodes, sleepers, strict=True):
            node.close()
            sleeper.close()


def together(members: Sequence[Rank], what: Callable[[Rank], Any]) -> list[Any]:
    """Each in a thread of its own; what each gave, or raised."""
    results: list[Any] = [None] * len(members)

    def run(at: int) -> None:
        try:
            results[at] = what(members[at])
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            results[at] = error

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive(), "a rank still waits"
    return results


def all_well(results: Sequence[Any]) -> Sequence[Any]:
    """Raises the first error among them."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
