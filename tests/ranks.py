"""Every rank in a thread of its own."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

Given = TypeVar("Given")
Result = TypeVar("Result")

EVENT_TIMEOUT = 60.0
"""Seconds until a test that waits for an event gives up. Long, because the machine may be busy."""


def on_every(ranks: Sequence[Given], task: Callable[[Given], Result]) -> list[Result]:
    """The results, by rank. Raises the first failure, when all have ended: the others often follow from it."""
    with ThreadPoolExecutor(max_workers=len(ranks)) as pool:
        running = [pool.submit(task, each) for each in ranks]
        ended = list(as_completed(running))
    for each in ended:
        each.result()
    return [each.result() for each in running]
