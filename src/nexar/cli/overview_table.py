"""An overview as a table: in a terminal with colours, elsewhere as plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nexar.observe.wording import cells_of, straggling

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nexar.observe.overview import Overview

_COLOURS: Final = {"running": "green", "waiting": "yellow", "stuck": "magenta", "lost": "red", "left": "dim"}


def plain(overview: Overview, *, rates: bool = False) -> str:
    """For whoever reads it from a pipe or a file."""
    lines = [overview.title]
    found = [cells_of(line, rates=rates) for line in overview.lines]
    if found:
        headings = list(found[0])
        rows = [dict(zip(headings, headings, strict=True)), *found]
        widths = {name: max(len(row[name]) for row in rows) for name in headings}
        lines += ["  ".join(f"{row[name]:<{widths[name]}}" for name in headings).rstrip() for row in rows]
    if overview.straggler is not None:
        lines.append(straggling(overview))
    return "\n".join(lines)


def coloured(overview: Overview, *, rates: bool) -> RenderableType:
    """For a terminal. What members say of themselves is text, never markup."""
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
    sentence = "" if overview.straggler is None else straggling(overview)
    return Group(table, Text(sentence, style="yellow"))
