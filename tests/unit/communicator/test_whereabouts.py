"""A rank that is missing in a collective because it is in another call of nexar's is said to be in that call."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from nexar.communicator.communicator import Communicator
from nexar.errors import CollectiveTimeout
from tests.ranks import PATIENCE, on_every
from tests.unit.cluster.memory_mesh import eventually
from tests.unit.communicator.worlds import World, raised


def said_of(waiting: Communicator, missing: Communicator, call: Callable[[], Any], end: Callable[[], Any]) -> str:
    """What a rank that waits in a barrier in vain is told about another one, which is in `call` until `end`."""
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(call)
        eventually(lambda: bool(missing._presence.node.progress.waits()), "it waits")
        error = raised(lambda: waiting.barrier(timeout=0.1))
        end()
        late.result(PATIENCE)
    assert isinstance(error, CollectiveTimeout)
    return str(error)


@pytest.mark.parametrize("started", [False, True])
def test_a_rank_that_waits_for_a_message_is_not_in_user_code(world: World, started: bool) -> None:
    ranks = world(2)
    said = said_of(
        ranks[0],
        ranks[1],
        (lambda: ranks[1].start.recv(source=0, tag=5).wait(PATIENCE))
        if started
        else (lambda: ranks[1].recv(source=0, tag=5, timeout=PATIENCE)),
        lambda: ranks[0].send(np.ones(1), dest=1, tag=5),
    )
    assert "it is in the receive with tag 5 for" in said
    assert "user code" not in said


@pytest.mark.parametrize("in_part", [True, False])
def test_a_rank_in_a_call_of_another_communicator_is_not_in_user_code(world: World, in_part: bool) -> None:
    ranks = world(2)
    parts = on_every(ranks, lambda comm: comm.split(0))
    here, there = (ranks, parts) if in_part else (parts, ranks)
    said = said_of(
        here[0],
        there[1],
        lambda: there[1].barrier(timeout=PATIENCE),
        lambda: there[0].barrier(timeout=PATIENCE),
    )
    assert re.search(rf"it is in barrier #\d+ of communicator {there[1]._branch.communicator} for ", said)
    assert "user code" not in said


def test_a_rank_that_computes_is_in_user_code(world: World) -> None:
    ranks = world(2)
    error = raised(lambda: ranks[0].barrier(timeout=0.1))
    assert "it is in user code" in str(error)
