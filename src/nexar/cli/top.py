"""`nexar top`: what `nexar status` shows, live."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from nexar.cli.ending import GOOD, exit_code_of
from nexar.cli.status import SeedAt, Ticket, TicketFile, Timeout
from nexar.cli.watching import onlooker
from nexar.errors import ConfigError

if TYPE_CHECKING:
    from nexar.cluster.onlooker import Onlooker


def top(
    *,
    ticket: Ticket = None,
    ticket_file: TicketFile = None,
    seed: SeedAt = None,
    timeout: Timeout = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    count: Annotated[int | None, typer.Option(help="End after so many looks; else with Ctrl-C.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line and look, for programs.")] = False,
) -> None:
    """Show the members of a running cluster, again and again: bytes per second, current operation, stragglers."""

    def action() -> int:
        _check(interval, count)
        with onlooker(ticket, ticket_file, seed, timeout=timeout) as looking:
            if as_json or not sys.stdout.isatty():
                _print(looking, interval, count, as_json=as_json)
            else:
                _live(looking, interval, count)
        return GOOD

    raise typer.Exit(exit_code_of(action))


def _check(interval: float, count: int | None) -> None:
    if not 0.1 <= interval <= 3600:
        raise ConfigError(variable="--interval", value=interval, allowed="0.1 to 3600 seconds")
    if count is not None and count < 1:
        raise ConfigError(variable="--count", value=count, allowed="a whole number, 1 or more")


def _print(looking: Onlooker, interval: float, count: int | None, *, as_json: bool) -> None:
    from nexar.cli.overview_table import plain  # noqa: PLC0415
    from nexar.observe.overview import Overseer  # noqa: PLC0415

    overseer, looks = Overseer(), 0
    while True:
        overview = overseer.see(looking.look(), time.monotonic())
        print(json.dumps(overview.facts()) if as_json else plain(overview, rates=True), flush=True)
        looks += 1
        if looks == count:
            return
        time.sleep(interval)


def _live(looking: Onlooker, interval: float, count: int | None) -> None:
    from rich.live import Live  # noqa: PLC0415 - slow to import, and only a terminal needs it

    from nexar.cli.overview_table import coloured  # noqa: PLC0415
    from nexar.observe.overview import Overseer  # noqa: PLC0415

    overseer, looks = Overseer(), 0
    with Live(auto_refresh=False, screen=False) as live:
        while True:
            overview = overseer.see(looking.look(), time.monotonic())
            live.update(coloured(overview, rates=True), refresh=True)
            looks += 1
            if looks == count:
                return
            time.sleep(interval)
