"""From an invitation to a communicator, with what the settings want others to see of this rank."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from nexar.cluster.wait_notice import tell_on_stderr
from nexar.communicator.bootstrap import bootstrap
from nexar.config import Config
from nexar.launch.leave_at_exit import ExitLeaver
from nexar.security.invitation import Invitation
from nexar.types import UNKNOWN_NODE, NodeId, Rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from nexar.communicator.communicator import Communicator
    from nexar.communicator.presence import Presence


def tells_for_host(local_rank: int | None) -> bool:
    """Whether this rank tells the user what every rank of its host waits for: the first two do, one of which may be
    what the others wait for.
    """
    return local_rank is None or local_rank <= 1


def join(
    config: Config,
    invitation: Invitation,
    *,
    rank: Rank | None = None,
    launcher: NodeId = UNKNOWN_NODE,
    size: int | None = None,
    local_rank: int | None = None,
) -> Communicator:
    """As `bootstrap`, whose errors it raises. The metrics listen before the others are met, so that a port that is
    taken is this process's trouble alone; they end with the communicator. A communicator that is still open when the
    interpreter exits is left then.
    """
    ends = ExitStack()
    adopt = _serve_metrics(config, local_rank or 0, ends)

    def watch(presence: Presence) -> Callable[[], None]:
        adopt(presence)
        ends.callback(ExitLeaver(lambda error: _leave(communicator, error)).cancel)
        return ends.close

    try:
        communicator = bootstrap(
            config,
            invitation,
            rank=rank,
            launcher=launcher,
            size=size,
            beside=watch,
            tell=tell_on_stderr,
            tells_for_host=tells_for_host(local_rank),
        )
    except BaseException:
        ends.close()
        raise
    return communicator


def _serve_metrics(config: Config, local_rank: int, ends: ExitStack) -> Callable[[Presence], None]:
    """Open the metrics if the settings want them; `ends` closes them. What it returns is told whose they are."""
    if config.metrics_port is None:
        return lambda _: None
    from nexar.observe.metrics import NodeSource, open_metrics  # noqa: PLC0415  # only who wants metrics pays for them

    metrics = open_metrics(config, config.metrics_port, local_rank)
    ends.callback(metrics.close)

    def adopt(presence: Presence) -> None:
        metrics.collector.source = NodeSource(presence)

    return adopt


def _leave(communicator: Communicator, error: BaseException | None) -> None:
    communicator.__exit__(None if error is None else type(error), error, getattr(error, "__traceback__", None))
