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
    """A context manager that gives n communicators, one per rank, inside this process.

    Operations block until the other ranks have done their part, so give each communicator a thread. For notebooks and
    tests: above the transport it runs the code of a real cluster. If metrics are enabled, each rank serves its own.
    """
    chosen = choose_config(config, settings)
    install_dump_handler()
    return local_communicators(n, chosen, None if chosen.metrics_port is None else partial(_serve_metrics, chosen))


def _serve_metrics(config: Config, runtime: NodeRuntime, rank: Rank) -> Callable[[], None]:
    from nexar.observe.metrics import NodeSource, open_metrics  # noqa: PLC0415  # loaded only if metrics are enabled

    metrics = open_metrics(config, config.metrics_port or 0, rank)
    metrics.collector.source = NodeSource(runtime)
    return metrics.close
