"""`nexar status` and `nexar top`: show the members of a cluster, once or live."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from nexar.cli.cluster_options import observer_session
from nexar.cli.exit_codes import FAILED, GOOD, exit_code_of
from nexar.errors import ConfigError
from nexar.observe.overview import cells_of, straggler_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nexar.cluster.seed_session import ObserverSession
    from nexar.observe.overview import Overview


_COLOURS: Final = {"running": "green", "waiting": "yellow", "stuck": "magenta", "lost": "red", "left": "dim"}


def plain(overview: Overview, *, rates: bool = False) -> str:
    """Text for a pipe or a file."""
    lines = [overview.title]
    found = [cells_of(line, rates=rates) for line in overview.lines]
    if found:
        headings = list(found[0])
        rows = [dict(zip(headings, headings, strict=True)), *found]
        widths = {name: max(len(row[name]) for row in rows) for name in headings}
        lines += ["  ".join(f"{row[name]:<{widths[name]}}" for name in headings).rstrip() for row in rows]
    if overview.straggler is not None:
        lines.append(straggler_text(overview))
    return "\n".join(lines)


def coloured(overview: Overview, *, rates: bool) -> RenderableType:
    """Tables for a terminal. Members' texts are not interpreted as markup."""
    from rich.console import Group  # noqa: PLC0415 - slow to import, and only a terminal needs it
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(title=Text(overview.title), title_justify="left", expand=False)
    for number, line in enumerate(overview.lines):
        cells = cells_of(line, rates=rates)
        if not number:
            for heading in cells:
                table.add_column(heading, overflow="fold" if heading == "doing" else "ellipsis", no_wrap=False)
        colour = _COLOURS[line.state]
        shown = {name: Text(text) for name, text in cells.items()}
        shown["state"].stylize(f"bold {colour}")
        if line.rank == overview.straggler and line.gone is None:
            shown["late by"].stylize("bold yellow")
        table.add_row(*shown.values(), style="red" if line.state == "lost" else "")
    footer = "" if overview.straggler is None else straggler_text(overview)
    return Group(table, Text(footer, style="yellow"))


FORMING: Final = 3
"""The exit status while the cluster is forming."""

Ticket = Annotated[str | None, typer.Option(help="Ticket of the cluster to show.", show_default=False)]
TicketFile = Annotated[Path | None, typer.Option(help="Read the ticket from a file (0600).")]
SeedAt = Annotated[str | None, typer.Option("--seed", help="HOST:PORT of the seed; the token is NEXAR_CLUSTER_TOKEN.")]
Timeout = Annotated[
    float | None,
    typer.Option(help="Seconds to wait for the file and the seed; unset: wait only for a seed that listens."),
]


def status(
    *,
    ticket: Ticket = None,
    ticket_file: TicketFile = None,
    seed: SeedAt = None,
    timeout: Timeout = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the members of a running cluster: where they are, what they do, which rank they wait for, which are lost and
    why.

    Exit status: 0 if all members are there, 1 if one is lost or stuck, or if the seed does not answer, 2 if there is no
    ticket, 3 if the cluster is still forming.
    """

    def action() -> int:
        from nexar.observe.overview import OverviewBuilder  # noqa: PLC0415  # wrong options are rejected without loading it

        with observer_session(ticket, ticket_file, seed, timeout=timeout) as session:
            overview = OverviewBuilder().see(session.read_board(), time.monotonic())
        if as_json:
            print(json.dumps(overview.facts(), indent=2))
        elif sys.stdout.isatty():
            from rich.console import Console  # noqa: PLC0415 - slow to import, and only a terminal needs it

            Console().print(coloured(overview, rates=False))
        else:
            print(plain(overview))
        if any(line.state in ("lost", "stuck") for line in overview.lines):
            return FAILED
        return GOOD if overview.epoch else FORMING

    raise typer.Exit(exit_code_of(action))


def top(
    *,
    ticket: Ticket = None,
    ticket_file: TicketFile = None,
    seed: SeedAt = None,
    timeout: Timeout = None,
    interval: Annotated[float, typer.Option(help="Seconds between updates.")] = 1.0,
    count: Annotated[int | None, typer.Option(help="End after this many updates; unset: run until Ctrl-C.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per update.")] = False,
) -> None:
    """Show the members of a running cluster live: bytes per second, current operation, stragglers."""

    def action() -> int:
        _check(interval, count)
        with observer_session(ticket, ticket_file, seed, timeout=timeout) as session:
            if as_json or not sys.stdout.isatty():
                _print(session, interval, count, as_json=as_json)
            else:
                _live(session, interval, count)
        return GOOD

    raise typer.Exit(exit_code_of(action))


def _check(interval: float, count: int | None) -> None:
    if not 0.1 <= interval <= 3600:
        raise ConfigError(variable="--interval", value=interval, allowed="0.1 to 3600 seconds")
    if count is not None and count < 1:
        raise ConfigError(variable="--count", value=count, allowed="a whole number, 1 or more")


def _print(session: ObserverSession, interval: float, count: int | None, *, as_json: bool) -> None:
    from nexar.observe.overview import OverviewBuilder  # noqa: PLC0415

    overview_builder, updates = OverviewBuilder(), 0
    while True:
        overview = overview_builder.see(session.read_board(), time.monotonic())
        print(json.dumps(overview.facts()) if as_json else plain(overview, rates=True), flush=True)
        updates += 1
        if updates == count:
            return
        time.sleep(interval)


def _live(session: ObserverSession, interval: float, count: int | None) -> None:
    from rich.live import Live  # noqa: PLC0415 - slow to import, and only a terminal needs it

    from nexar.observe.overview import OverviewBuilder  # noqa: PLC0415

    overview_builder, updates = OverviewBuilder(), 0
    with Live(auto_refresh=False, screen=False) as live:
        while True:
            overview = overview_builder.see(session.read_board(), time.monotonic())
            live.update(coloured(overview, rates=True), refresh=True)
            updates += 1
            if updates == count:
                return
            time.sleep(interval)
