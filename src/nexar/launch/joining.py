"""From an invitation to a communicator, with what the settings want others to see of this rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nexar.communicator.bootstrap import bootstrap
from nexar.config import Config
from nexar.security.invitation import Invitation
from nexar.types import UNKNOWN_NODE, NodeId, Rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from nexar.communicator.communicator import Communicator
    from nexar.communicator.presence import Presence


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
    taken is this process's trouble alone; they end with the communicator.
    """
    if config.metrics_port is None:
        return bootstrap(config, invitation, rank=rank, launcher=launcher, size=size)
    from nexar.observe.metrics import NodeSource, open_metrics  # noqa: PLC0415  # only who wants metrics pays for them

    metrics = open_metrics(config, config.metrics_port, local_rank or 0)

    def watch(presence: Presence) -> Callable[[], None]:
        metrics.collector.source = NodeSource(presence)
        return metrics.close

    try:
        return bootstrap(config, invitation, rank=rank, launcher=launcher, size=size, beside=watch)
    except BaseException:
        metrics.close()
        raise
