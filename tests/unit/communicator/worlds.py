"""Worlds of threads, and what their calls raise."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from nexar.communicator.communicator import Communicator
from nexar.errors import NexarError
from tests.ranks import EVENT_TIMEOUT

World = Callable[..., list[Communicator]]
"""Makes the communicators of so many ranks, with these settings."""


def raised(call: Callable[..., Any], *args: Any) -> NexarError:
    with pytest.raises(NexarError) as found:
        call(*args)
    return found.value


def waiting(comm: Communicator) -> Callable[[], NexarError]:
    """Let it wait for a message of rank 0 that never comes; gives what it raised."""
    raised_there: list[NexarError] = []
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        raised_there.append(raised(lambda: comm.recv(source=0, tag=99, timeout=EVENT_TIMEOUT)))

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait(EVENT_TIMEOUT)

    def end() -> NexarError:
        thread.join(EVENT_TIMEOUT)
        return raised_there[0]

    return end
