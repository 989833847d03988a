"""The worlds that devices are tried in."""

from collections.abc import Iterator

import pytest

from nexar.communicator.communicator import Communicator
from tests.conformance.worlds import ranks_over
from tests.devices.operations import SIZE
from tests.ranks import EVENT_TIMEOUT


@pytest.fixture(params=["memory", "shm"])
def world(request: pytest.FixtureRequest) -> Iterator[list[Communicator]]:
    with ranks_over(request.param, SIZE, collective_timeout=EVENT_TIMEOUT) as made:
        yield made


@pytest.fixture
def pair() -> Iterator[list[Communicator]]:
    with ranks_over("memory", 2, collective_timeout=EVENT_TIMEOUT) as made:
        yield made
