"""`nexar status`: who is in a cluster, and what they do."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Final

import typer

from nexar.cli.ending import FAILED, GOOD, exit_code_of
from nexar.cli.watching import onlooker

FORMING: Final = 3
"""The exit status while members are still on their way."""

Ticket = Annotated[str | None, typer.Option(help="Of the cluster to look at.", show_default=False)]
TicketFile = Annotated[Path | None, typer.Option(help="Read the ticket from a file (0600).")]
SeedAt = Annotated[str | None, typer.Option("--seed", help="HOST:PORT of the seed; the token is NEXAR_CLUSTER_TOKEN.")]
Timeout = Annotated[
    float | None,
    typer.Option(help="Seconds to wait for the file, and for the seed; else only one that is there is waited for."),
]


def status(
    *,
    ticket: Ticket = None,
    ticket_file: TicketFile = None,
    seed: SeedAt = None,
    timeout: Timeout = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Show the members of a running cluster: where they are, what they do, whom they wait for, who is lost and why.

    Exit status: 0 if everybody is there, 1 if somebody is lost or stuck, or the seed does not answer, 2 if there is no
    ticket, 3 if the cluster is still forming.
    """

    def action() -> int:
        from nexar.observe.overview import Overseer  # noqa: PLC0415  # after the options made sense

        with onlooker(ticket, ticket_file, seed, timeout=timeout) as looking:
            overview = Overseer().see(looking.look(), time.monotonic())
        if as_json:
            print(json.dumps(overview.facts(), indent=2))
        elif sys.stdout.isatty():
            from rich.console import Console  # noqa: PLC0415 - slow to import, and only a terminal needs it

            from nexar.cli.overview_table import coloured  # noqa: PLC0415

            Console().print(coloured(overview, rates=False))
        else:
            from nexar.cli.overview_table import plain  # noqa: PLC0415

            print(plain(overview))
        if any(line.state in ("lost", "stuck") for line in overview.lines):
            return FAILED
        return GOOD if overview.epoch else FORMING

    raise typer.Exit(exit_code_of(action))
