"""`local()`: a whole cluster inside this process."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.launch.dump_signal import listen
from nexar.launch.init import choose_config


def local(n: int, config: Config | None = None, **settings: Any) -> AbstractContextManager[list[Communicator]]:
    """A context manager that gives n communicators, one for each rank, in this process and on its memory.

    Every verb blocks until the others have done their part, so give each communicator a thread of its own. For
    notebooks and tests: above the transport it is the code that a cluster of many hosts runs.
    """
    chosen = choose_config(config, settings)
    listen()
    return local_communicators(n, chosen)
