"""What a line of an overview says in words: the same in a terminal and on the page. Pure."""

from __future__ import annotations

from typing import Final, TypeAlias

from nexar.observe.overview import Line, Overview
from nexar.types import format_seconds

Cells: TypeAlias = dict[str, str]
"""By heading."""
_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")


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
        "rank": f"was {line.rank}" if line.former else str(line.rank),
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


def straggling(overview: Overview) -> str:
    """One sentence on who keeps the others waiting."""
    found = next((line for line in overview.lines if line.rank == overview.straggler and line.gone is None), None)
    if found is None:
        return f"rank {overview.straggler} kept the others waiting"
    return (
        f"rank {found.rank} keeps the others waiting: {format_seconds(found.lateness)} a call, "
        f"{found.share:.0%} of all lateness"
    )
