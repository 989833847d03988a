"""The dumps of a directory, as the flight recorders of all ranks left them there."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from nexar.collectives.dump import Dump, decode
from nexar.errors import UsageError
from nexar.observe.folder import read_folder

_LARGEST_BYTES: Final = 1 << 28  # of one file: a dump of hundreds of communicators; more is something else


class Dumps(NamedTuple):
    """What was found."""

    dumps: tuple[Dump, ...]
    """The oldest first."""
    unreadable: dict[str, str]
    """Files that are none, and why."""


def read_dumps(directory: Path) -> Dumps:
    """Of this directory, but not of those in it. UsageError if there is none, or nothing in it."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory; give the one that NEXAR_DUMP_DIR named, with all ranks' dumps")
    dumps, unreadable = read_folder(directory, ".json", decode, _LARGEST_BYTES)
    if not dumps:
        others = f"; {len(unreadable)} files there are none" if unreadable else ""
        raise UsageError(
            f"no dumps in {directory}{others}: set NEXAR_DUMP_DIR before the start, or send SIGUSR1 to every rank, and "
            "copy what the ranks of all hosts wrote into one directory"
        )
    return Dumps(tuple(sorted(dumps, key=lambda dump: dump.written_at)), unreadable)
