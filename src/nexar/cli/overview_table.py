"""An overview as a table: in a terminal with colours, elsewhere as plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nexar.types import format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nexar.observe.overview import Line, Overview

_COLOURS: Final = {"running": "green", "waiting": "yellow", "stuck": "magenta", "lost": "red", "left": "dim"}
_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")
Cells = dict[str, str]


def size_of(count: float) -> str:
    """`1.5 MB`."""
    for unit in _UNITS:
        if count < 999.5 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("the last unit takes all")


def cells_of(line: Line, *, rates: bool) -> Cells:
    """One rank, as text: by heading. `rates`: per second, else since the start."""
    out, back = (line.sent_rate, line.received_rate) if rates else (line.bytes_sent, line.bytes_received)
    reduced = line.call_bytes_rate if rates else line.call_bytes
    per = "/s" if rates else ""
    return {
        "rank": str(line.rank),
        "state": line.state,
        "host": line.host,
        "pid": str(line.pid or ""),
        "doing": _doing(line),
        "waits for": ", ".join(map(str, line.waiting_for)),
        f"sent{per}": size_of(out),
        f"received{per}": size_of(back),
        f"collectives{per}": f"{line.calls_rate if rates else line.calls:.0f}, {size_of(reduced)}",
        "carriers": _carriers(line),
        "late by": format_seconds(line.lateness) if line.lateness >= 1e-6 else "",
    }


def _doing(line: Line) -> str:
    if line.state in ("lost", "left"):
        ago = "" if line.gone is None else f" ({format_seconds(line.gone)} ago)"
        return f"{line.cause}{ago}"
    if line.state == "stuck" and line.heard is not None:
        return f"silent for {format_seconds(line.heard)}; last in {line.operation or 'its own code'}"
    if line.operation:
        return f"{line.operation} for {format_seconds(line.seconds)}"
    return f"its own code; last {line.finished}" if line.finished else "its own code"


def _carriers(line: Line) -> str:
    """The ranks only where there is more than one kind."""
    if len(line.carriers) == 1:
        return next(iter(line.carriers))
    return ", ".join(f"{kind}: {_ranks(ranks)}" for kind, ranks in sorted(line.carriers.items()))


def _ranks(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks)) if len(ranks) <= 4 else f"{len(ranks)} ranks"


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


def straggling(overview: Overview) -> str:
    """One sentence on who keeps the others waiting."""
    found = next((line for line in overview.lines if line.rank == overview.straggler and line.gone is None), None)
    if found is None:
        return f"rank {overview.straggler} kept the others waiting"
    return (
        f"rank {found.rank} keeps the others waiting: {format_seconds(found.lateness)} a call, "
        f"{found.share:.0%} of all lateness"
    )


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
