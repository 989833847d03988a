"""Parts of a trace in a directory, and the trace they make in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from nexar.collectives.trace_part import SUFFIX, Part, decode_part
from nexar.errors import UsageError
from nexar.observe.trace_export import Event, events

_LARGEST_BYTES: Final = 1 << 30  # of one part


class Parts(NamedTuple):
    """What was found."""

    parts: tuple[Part, ...]
    unreadable: dict[str, str]
    """Files that are none, and why."""


class Written(NamedTuple):
    """What a trace has."""

    ranks: int
    calls: int
    missed: int
    """Calls for which there was no room while the program ran."""


def read_parts(directories: Iterable[Path]) -> Parts:
    """Of these directories, but not of those in them. UsageError if one of them is none."""
    parts: list[Part] = []
    unreadable: dict[str, str] = {}
    for directory in directories:
        if not directory.is_dir():
            raise UsageError(f"{directory} is no directory; give those that NEXAR_TRACE_DIR named")
        for path in sorted(directory.glob(f"*{SUFFIX}")):
            try:
                parts.append(_read(path))
            except (OSError, ValueError) as error:
                unreadable[path.name] = str(error)
    return Parts(tuple(parts), unreadable)


def _read(path: Path) -> Part:
    if path.stat().st_size > _LARGEST_BYTES:
        raise ValueError(f"it is larger than {_LARGEST_BYTES} bytes")
    return decode_part(path.read_bytes())


def write_trace(path: Path, parts: Sequence[Part]) -> Written:
    """As JSON: event by event, so that a long one needs no memory of its size. UsageError if it cannot be written."""
    calls = sum(len(part.calls) for part in parts)
    missed = sum(part.missed for part in parts)
    ranks = len({part.node for part in parts})
    about = {"program": "nexar", "ranks": ranks, "calls": calls, "calls_missed": missed}
    try:
        with path.open("w") as file:
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n')
            file.writelines(_lines(events(parts)))
            file.write("\n]}\n")
    except OSError as error:
        raise UsageError(f"the trace cannot be written to {path}: {error.strerror or error}") from error
    return Written(ranks, calls, missed)


def _lines(found: Iterable[Event]) -> Iterable[str]:
    for number, event in enumerate(found):
        yield f",\n{json.dumps(event)}" if number else json.dumps(event)
