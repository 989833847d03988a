"""From an invitation to a communicator, with what the settings want others to see of this rank."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from nexar.cluster.wait_notice import tell_on_stderr
from nexar.communicator.bootstrap import bootstrap
from nexar.communicator.unfinished_sends import deliver_sends
from nexar.config import Config
from nexar.errors.base import list_ranks
from nexar.launch.leave_at_exit import EXIT_TIMEOUT, ExitLeaver
from nexar.security.invitation import Invitation
from nexar.types import UNKNOWN_NODE, NodeId, Rank, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nexar.cluster.membership import Membership
    from nexar.communicator.communicator import Communicator
    from nexar.communicator.presence import Presence

_log = logging.getLogger(__name__)

SEND_TIMEOUT: Final = EXIT_TIMEOUT - 1.0
"""Seconds at exit for messages that were started; the rest is for leaving."""


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

    def watch(presence: Presence, communicator: Communicator) -> Callable[[], None]:
        adopt(presence)
        ends.callback(ExitLeaver(lambda error: _leave(communicator, presence, error)).cancel)
        return ends.close

    try:
        return bootstrap(
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


def _leave(communicator: Communicator, presence: Presence, error: BaseException | None) -> None:
    """At exit. A rank that raised leaves at once: the others wait to be told."""
    if error is None:
        _deliver_sends(presence)
    communicator.__exit__(None if error is None else type(error), error, getattr(error, "__traceback__", None))


def _deliver_sends(presence: Presence) -> None:
    """Wait for sends that were started and not waited for, and warn about those that nobody has received."""
    mesh, node = presence.mesh, presence.node
    undelivered = deliver_sends(mesh.links, node.progress, time.monotonic() + SEND_TIMEOUT)
    if undelivered:
        _log.warning("%s", _warning(presence.recovery.membership, node.id, undelivered))


def _warning(membership: Membership, me: NodeId, undelivered: Mapping[NodeId, int]) -> str:
    count = sum(undelivered.values())
    ranks = sorted(rank for node in undelivered if (rank := membership.rank_of(node)) is not None)
    return (
        f"rank {membership.rank_of(me)} exits: {count} {'message' if count == 1 else 'messages'} to "
        f"{list_ranks(ranks)} {'was' if count == 1 else 'were'} not delivered within {format_seconds(SEND_TIMEOUT)}; "
        "receive them, or wait for the requests before the program ends"
    )
