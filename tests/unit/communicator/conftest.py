"""Fixtures: worlds and successors that end with the test.

Successors are closed twice, since closing is idempotent.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.config import Config
from tests.unit.communicator.successor_worlds import Story
from tests.unit.communicator.worlds import World


@pytest.fixture
def make_story() -> Iterator[Callable[..., Story]]:
    made: list[Story] = []

    def make(**settings: Any) -> Story:
        made.append(Story(**settings))
        return made[-1]

    yield make
    for story in made:
        story.runner.stop()
        story.successors.close()
        story.successors.close()
        story.loop.close()


@pytest.fixture
def story(make_story: Callable[..., Story]) -> Story:
    return make_story()


@pytest.fixture
def world() -> Iterator[World]:
    """Worlds that end with the test."""
    with ExitStack() as undo:

        def make(size: int, **settings: Any) -> list[Communicator]:
            return undo.enter_context(local_communicators(size, Config(**settings)))

        yield make
