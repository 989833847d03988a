"""What the transport suite gives its tests. `--run-slow`, or NEXAR_RUN_SLOW=1, makes the slow ones do all of it."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conformance.harness import Node, Pair, Side, dial
from tests.conformance.transports import CASES, LEFT, RIGHT, Case, World


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", default=False, help="transport suite: 5 GiB instead of 300 MiB")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "slow: does less than its name says, unless --run-slow or NEXAR_RUN_SLOW is given"
    )


@pytest.fixture
def run_slow(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--run-slow", default=False)) or os.environ.get("NEXAR_RUN_SLOW", "") not in (
        "",
        "0",
    )


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    chosen = CASES[request.param]
    reason = chosen.missing()
    if reason is not None:
        pytest.skip(f"{chosen.name}: {reason}")
    return chosen


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World.make(tmp_path)


MakeNode = Callable[[int], Node]


@pytest.fixture
def make_node(case: Case, world: World) -> Iterator[MakeNode]:
    """Makes a listening node, closed when the test ends."""
    with ExitStack() as stack:

        def make(number: int) -> Node:
            node = Node(number, *case.make(number, world))
            stack.callback(node.close)
            node.transport.listen(case.listen(world), node)
            return node

        yield make


@pytest.fixture
def pair(make_node: MakeNode) -> Iterator[Pair]:
    """Two connected nodes with sinks attached, which in the end must have been called by the rules."""
    left, right = make_node(LEFT), make_node(RIGHT)
    near, far = dial(left, right)
    pair = Pair(Side(left, near), Side(right, far))
    near.attach(pair.left.received)
    far.attach(pair.right.received)
    yield pair
    assert pair.left.received.faults + pair.right.received.faults == []
