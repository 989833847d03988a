"""What tests of one room share: lineages that end with the test, closed twice, since closing is idempotent."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.communicator.lineages import Story


@pytest.fixture
def tell() -> Iterator[Callable[..., Story]]:
    made: list[Story] = []

    def make(**settings: Any) -> Story:
        made.append(Story(**settings))
        return made[-1]

    yield make
    for story in made:
        story.lineage.close()
        story.lineage.close()


@pytest.fixture
def story(tell: Callable[..., Story]) -> Story:
    return tell()
