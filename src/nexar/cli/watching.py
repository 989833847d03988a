"""What the commands share that look at a running cluster: the way to its seed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nexar.cli.way_in import appears, way_in
from nexar.environment import effective
from nexar.errors import ConfigError, SeedUnreachable, UsageError
from nexar.launch.door import needed_token

if TYPE_CHECKING:
    from nexar.cluster.onlooker import Onlooker
    from nexar.config import Config
    from nexar.security.invitation import Invitation

_NO_WAY = (
    "nothing says which cluster to look at: give --ticket or --ticket-file, or set NEXAR_TICKET; `nexar seed` prints a "
    "ticket, and `nexar run --write-ticket FILE` writes one"
)


_USUAL: Final = 10.0
"""Seconds that a seed has which is there, and busy."""
_LONGEST: Final = 1e9  # seconds, as of settings


def onlooker(ticket: str | None, ticket_file: Path | None, seed: str | None, *, timeout: float | None) -> Onlooker:
    """A line to the seed of that cluster; the caller closes it. UsageError, ConfigError, JoinRefused, SeedUnreachable.

    `timeout`: so long the file and the seed are waited for. None: a seed that is there has some seconds to answer, but
    where there is no file, or nobody listens, that is said at once.
    """
    from nexar.cluster.onlooker import Onlooker  # noqa: PLC0415  # after the options made sense

    if timeout is not None and not 0 <= timeout <= _LONGEST:  # nor what is no number: it is in no order
        raise ConfigError(variable="--timeout", value=str(timeout), allowed=f"seconds, 0 to {_LONGEST:g}")
    if ticket_file is not None and not appears(ticket_file, timeout or 0.0):
        raise UsageError(
            f"there is no ticket in {ticket_file}: the run that wrote it has ended and taken it away, or is yet to "
            "write it; start it, or wait for it longer (--timeout)"
        )
    config = effective(way_in(ticket, ticket_file, seed)).config
    try:
        return Onlooker(_invitation(config), config, timeout=timeout or _USUAL, hurry=timeout is None)
    except SeedUnreachable as gone:
        if gone.timeout is None:
            raise  # somebody answers there
        raise SeedUnreachable(
            addresses=gone.addresses,
            attempts=gone.attempts,
            cause=gone.cause,
            timeout=gone.timeout,
            remedy=_remedy(ticket_file),
        ) from gone


def _invitation(config: Config) -> Invitation:
    from nexar.security.invitation import invitation_from_token  # noqa: PLC0415
    from nexar.security.join_ticket import parse_ticket  # noqa: PLC0415

    if config.ticket is not None:
        return parse_ticket(config.ticket)
    if config.seed is None:
        raise UsageError(_NO_WAY)
    return invitation_from_token(needed_token(config, "NEXAR_SEED"), [config.seed])


def _remedy(ticket_file: Path | None) -> str:
    written = "" if ticket_file is None else f" whose ticket was written to {ticket_file} at {_written(ticket_file)}"
    return (
        f"the cluster{written} has ended, or its members go on without the seed: start it again (`nexar seed "
        "--state-dir` with the directory of before), or give the ticket of one that runs; if it does run, its port "
        "must be open for TCP and UDP"
    )


def _written(path: Path) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
    except OSError:  # taken away since it was read
        return "a time that is gone with it"
