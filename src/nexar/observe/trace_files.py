"""Parts of a trace in a directory, and the trace they make in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from nexar.collectives.trace_part import SUFFIX, Part, decode_part
from nexar.errors import UsageError
from nexar.observe.folder import read_folder
from nexar.observe.trace_export import Event, events
from nexar.security.storage import private_file

_LARGEST_BYTES: Final = 1 << 30  # of one part


class Parts(NamedTuple):
    """What was found."""

    parts: tuple[Part, ...]
    """Of the last run that wrote any."""
    unreadable: dict[str, str]
    """Files that are none, and why."""
    earlier: int = 0
    """Parts of other runs, which are left out: their ranks and calls have the same numbers, and are others."""


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
        found = read_folder(directory, SUFFIX, decode_part, _LARGEST_BYTES)
        parts += found.read
        unreadable |= {str(directory / name): reason for name, reason in found.unreadable.items()}
    last = max(parts, key=lambda part: part.wall, default=None)
    ours = tuple(part for part in parts if last is not None and part.cluster == last.cluster)
    return Parts(ours, unreadable, len(parts) - len(ours))


def write_trace(path: Path, parts: Sequence[Part]) -> Written:
    """As JSON: event by event, so that a long one needs no memory of its size. What the file held stays until all is
    written; what is no file, as a pipe, gets it as it comes. The file is its owner's alone, as the parts are.
    UsageError if it cannot be written.
    """
    calls = sum(len(part.calls) for part in parts)
    missed = sum(part.missed for part in parts)
    ranks = len({part.node for part in parts})
    about = {"program": "nexar", "ranks": ranks, "calls": calls, "calls_missed": missed}
    try:
        with _opened(path) as file:
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n'.encode())
            file.writelines(_lines(events(parts)))
            file.write(b"\n]}\n")
    except OSError as error:
        raise UsageError(f"the trace cannot be written to {path}: {error.strerror or error}") from error
    return Written(ranks, calls, missed)


def _opened(path: Path) -> AbstractContextManager[BinaryIO]:
    if path.exists() and not path.is_file():
        return path.open("wb")
    place = path.resolve()  # a link to a file stays one
    place.parent.stat()  # it is not made here: a directory that is missing is a slip of the pen
    return private_file(place)


def _lines(found: Iterable[Event]) -> Iterable[bytes]:
    for number, event in enumerate(found):
        text = json.dumps(event, allow_nan=False)
        yield f",\n{text}".encode() if number else text.encode()
