"""What tests of collectives in flight ask for again and again."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nexar.communicator.communicator import Communicator
from nexar.communicator.request import Request
from nexar.errors import Cancelled
from tests.ranks import on_every

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


async def awaited(request: Request) -> Any:
    return await request
