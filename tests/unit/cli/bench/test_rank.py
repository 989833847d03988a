from dataclasses import replace

import pytest

import nexar
from nexar.cli.bench.measuring import measure
from nexar.cli.bench.protocol import MEASURES
from nexar.cli.bench.rank import NexarSystem
from tests.ranks import on_every
from tests.unit.cli.bench.orders import ORDER


@pytest.mark.parametrize("name", MEASURES)
def test_everything_that_is_measured_is_right(name):
    order = replace(ORDER, measure=name, count=MEASURES[name].count(400, 4, 3))
    with nexar.local(3) as comms:
        replies = on_every(comms, lambda comm: measure(NexarSystem(comm), order))
    assert [reply.wrong for reply in replies] == [0, 0, 0]
    assert len(replies[0].nanoseconds) == order.iterations


@pytest.mark.parametrize("name", ["broadcast", "reduce", "gather", "scatter"])
def test_any_rank_may_be_the_root(name):
    order = replace(ORDER, measure=name, root=2)
    with nexar.local(3) as comms:
        replies = on_every(comms, lambda comm: measure(NexarSystem(comm), order))
    assert [(reply.wrong, reply.problem) for reply in replies] == [(0, "")] * 3


def test_an_algorithm_can_be_forced():
    order = replace(ORDER, algorithm="ring")
    with nexar.local(3) as comms:
        replies = on_every(comms, lambda comm: measure(NexarSystem(comm), order))
    assert [reply.wrong for reply in replies] == [0, 0, 0]


def test_what_has_one_algorithm_says_so():
    order = replace(ORDER, measure="scatter", algorithm="ring")
    with nexar.local(2) as comms:
        replies = on_every(comms, lambda comm: measure(NexarSystem(comm), order))
    assert [reply.problem for reply in replies] == ["scatter has one algorithm"] * 2
