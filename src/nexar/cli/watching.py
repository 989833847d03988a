"""What the commands share that look at a running cluster: the way to its seed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nexar.cli.way_in import way_in
from nexar.environment import effective
from nexar.errors import UsageError
from nexar.launch.door import needed_token

if TYPE_CHECKING:
    from nexar.cluster.onlooker import Onlooker

_NO_WAY = (
    "nothing says which cluster to look at: give --ticket or --ticket-file, or set NEXAR_TICKET; `nexar seed` prints a "
    "ticket, and `nexar run --write-ticket FILE` writes one"
)


def onlooker(ticket: str | None, ticket_file: Path | None, seed: str | None, *, timeout: float) -> Onlooker:
    """A line to the seed of that cluster; the caller closes it. UsageError, JoinRefused, SeedUnreachable."""
    from nexar.cluster.onlooker import Onlooker  # noqa: PLC0415  # after the options made sense
    from nexar.security.invitation import invitation_from_token  # noqa: PLC0415
    from nexar.security.join_ticket import parse_ticket  # noqa: PLC0415

    config = effective(way_in(ticket, ticket_file, seed, patience=timeout)).config
    if config.ticket is not None:
        return Onlooker(parse_ticket(config.ticket), config, timeout=timeout)
    if config.seed is None:
        raise UsageError(_NO_WAY)
    token = needed_token(config, "NEXAR_SEED")
    return Onlooker(invitation_from_token(token, [config.seed]), config, timeout=timeout)
