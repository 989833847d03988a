"""`local()`: a whole cluster inside this process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.launch.init import choose_config, install_dump_handler
from nexar.types import Rank

if TYPE_CHECKING:
    from nexar.communicator.runtime import NodeRuntime


def local(n: int, config: Config | None = None, **settings: Any) -> AbstractContextManager[list[Communicator]]:
    """A context manager that gives n communicators, one for each rank, in this process and on its memory.

    Every verb blocks until the others have done their part, so give each communicator a thread of its own. For
    notebooks and tests: above the transport it is the code that a cluster of many hosts runs. Where the settings want
    metrics, each rank serves its own, as in a process of its own.
    """
    chosen = choose_config(config, settings)
    install_dump_handler()
    return local_communicators(n, chosen, None if chosen.metrics_port is None else partial(_serve_metrics, chosen))


def _serve_metrics(config: Config, runtime: NodeRuntime, rank: Rank) -> Callable[[], None]:
    from nexar.observe.metrics import NodeSource, open_metrics  # noqa: PLC0415  # only who wants metrics pays for them

    metrics = open_metrics(config, config.metrics_port or 0, rank)
    metrics.collector.source = NodeSource(runtime)
    return metrics.close
