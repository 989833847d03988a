"""Rings of nodes, for tests of relayed links."""

from collections.abc import Iterator

import pytest

from tests.unit.cluster.ring import Ring


@pytest.fixture
def four() -> Iterator[Ring]:
    made = Ring(4)
    yield made
    made.close()


@pytest.fixture
def six() -> Iterator[Ring]:
    made = Ring(6)
    yield made
    made.close()
