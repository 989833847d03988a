"""What tests of collectives in flight ask for again and again."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from nexar.communicator.communicator import Communicator
from nexar.communicator.request import Request
from nexar.errors import Cancelled
from tests.ranks import EVENT_TIMEOUT, on_every

LARGE = 300_000
"""Elements: far more than travels whole."""


def works(world: list[Communicator]) -> bool:
    """Does the next collective give what it should?"""
    total = sum(range(1, len(world) + 1))
    return on_every(world, lambda comm: comm.all_reduce(comm.rank + 1)) == [total] * len(world)


@contextmanager
def raises_naming(rank: int) -> Iterator[None]:
    with pytest.raises(Cancelled) as raised:
        yield
    assert raised.value.rank == rank


def await_news(world: Sequence[Communicator], sequence: int) -> None:
    """Until these know that this call was given up. Before, they may have all they need of a small one: then they
    get its result.
    """
    deadline = time.monotonic() + EVENT_TIMEOUT
    while not all(sequence in comm._context.call_log._aborted for comm in world):
        assert time.monotonic() < deadline, f"not everybody has heard that #{sequence} was given up"
        time.sleep(0.001)


async def awaited(request: Request) -> Any:
    return await request
