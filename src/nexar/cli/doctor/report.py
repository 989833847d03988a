"""Prints a doctor's observations: rich tables on a terminal, else plain ones, or JSON."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from nexar.cli.doctor.observations import DoctorFinding, DoctorReport, Machine, Reach, RoundTrip
from nexar.cli.doctor.reachability import PROTOCOLS, skews
from nexar.types import Rank, format_seconds

Rows = Sequence[tuple[str, ...]]


def machine_rows(machine: Machine) -> list[tuple[str, ...]]:
    """Two columns: name and value."""
    rows: list[tuple[str, ...]] = [("host", f"{machine.name} (host id {machine.host})")]
    rows += [
        (version.name, version.number or f"missing: {version.problem}".removesuffix(": "))
        for version in machine.versions
    ]
    for each in machine.interfaces:
        state = "" if each.up else ", down"
        rows.append((f"interface {each.name}", f"{', '.join(each.addresses) or '-'}  MTU {each.mtu_bytes}{state}"))
    door = machine.door
    rows.append(("listens, UDP and TCP", door.problem or door.address))
    rows.append(("would advertise", ", ".join(door.advertised) or "-"))
    rows += [(f"round trip, {trip.scheme}", _trip(trip)) for trip in machine.trips]
    return rows + _limit_rows(machine)


def _limit_rows(machine: Machine) -> list[tuple[str, ...]]:
    limits, room = machine.limits, machine.memory
    memory = (
        "-" if room is None else f"{_size(room.size_bytes)}, {_size(room.free_bytes)} free (nexar needs none of it)"
    )
    buffers = f"receive {_size(limits.receive_buffer_bytes)}, send {_size(limits.send_buffer_bytes)}"
    return [
        ("/dev/shm", memory),
        ("open files", f"{_count(limits.open_files)} (may be raised to {_count(limits.most_open_files)})"),
        ("locked memory", "unlimited" if limits.locked_bytes is None else _size(limits.locked_bytes)),
        ("largest socket buffers", buffers),
        ("CPUs", f"{machine.cpus}, load {machine.load:.1f}"),
        ("clock", datetime.fromtimestamp(machine.clock, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")),
    ]


def rank_rows(reports: Mapping[Rank, DoctorReport]) -> list[tuple[str, ...]]:
    """One row per rank."""
    ahead = skews(reports)
    rows: list[tuple[str, ...]] = [("rank", "host", "address", "clock")]
    for rank, report in sorted(reports.items()):
        machine, skew = report.machine, ahead.get(rank)
        rows.append((str(rank), f"{machine.name} ({machine.host})", report.address, _ahead(rank, skew)))
    return rows


def matrix_rows(reports: Mapping[Rank, DoctorReport], size: int, scheme: str) -> list[tuple[str, ...]]:
    """Round trips over one transport; rows dial columns."""
    reached = {(reach.source, reach.dest): reach for report in reports.values() for reach in report.reaches
               if reach.scheme == scheme}  # fmt: skip
    rows: list[tuple[str, ...]] = [("from \\ to", *(str(rank) for rank in range(size)))]
    for source in range(size):
        cells = (_cell(source, dest, reached.get((source, dest))) for dest in range(size))
        rows.append((str(source), *cells))
    return rows


def _cell(source: Rank, dest: Rank, reach: Reach | None) -> str:
    if source == dest:
        return "·"
    if reach is None:
        return "?"
    if reach.round_trip is None:
        return "NO" if reach.offered else "-"
    mtu = f", MTU {reach.mtu_bytes}" if reach.mtu_bytes else ""
    return f"{_time(reach.round_trip)}{mtu}"


def show_machine(machine: Machine) -> None:
    """Print the machine's table."""
    _show("this machine", machine_rows(machine))


def show_cluster(reports: Mapping[Rank, DoctorReport], size: int) -> None:
    """Print the ranks, and a matrix per transport."""
    _show("ranks", rank_rows(reports), heading=True)
    tried = {reach.scheme for report in reports.values() for reach in report.reaches if reach.offered}
    for scheme, protocol in PROTOCOLS.items():
        if scheme in tried:
            title = f"who reaches whom over {protocol} ({scheme}): round trip"
            _show(title, matrix_rows(reports, size, scheme), heading=True)


def show_findings(findings: Sequence[DoctorFinding]) -> None:
    """Print needed changes, numbered, then helpful ones."""
    needed = [finding.text for finding in findings if finding.needed]
    helpful = [finding.text for finding in findings if not finding.needed]
    print("to change:" if needed else "nothing to change")
    _number(needed, 1)
    if helpful:
        print("would help:")
        _number(helpful, len(needed) + 1)


def report_json(machine: Machine, reports: Mapping[Rank, DoctorReport], findings: Sequence[DoctorFinding]) -> str:
    """All observations and findings."""
    page = {
        "machine": machine,
        "ranks": [report for _, report in sorted(reports.items())],
        "clock_skew": {str(rank): skew for rank, skew in skews(reports).items()} if reports else {},
        "findings": findings,
    }
    return msgspec.json.format(msgspec.json.encode(page), indent=2).decode()


def _show(title: str, rows: Rows, *, heading: bool = False) -> None:
    if sys.stdout.isatty():
        _show_rich(title, rows, heading=heading)
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print(f"{title}:")
    for row in rows:
        print("  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    print()


def _show_rich(title: str, rows: Rows, *, heading: bool) -> None:
    from rich.console import Console  # noqa: PLC0415 - slow to import, and only a terminal needs it
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(*rows[0], title=title, title_justify="left") if heading else Table(title=title, show_header=False)
    for row in rows[1:] if heading else rows:
        table.add_row(*(f"[red]{cell}[/]" if cell == "NO" else escape(cell) for cell in row))
    Console().print(table)


def _number(texts: Sequence[str], first: int) -> None:
    for number, text in enumerate(texts, first):
        print(f"  {number}. {text}")


def _trip(trip: RoundTrip) -> str:
    return trip.problem or "not here" if trip.round_trip is None else _time(trip.round_trip)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else format_seconds(seconds)


def _ahead(rank: Rank, skew: float | None) -> str:
    if rank == 0:
        return "is compared with"
    return "?" if skew is None else f"{skew:+.3f} s"


def _count(number: int | None) -> str:
    return "any number" if number is None else str(number)


def _size(count: int | None) -> str:
    if count is None:
        return "?"
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count} bytes"
