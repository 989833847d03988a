"""`nexar run --trace FILE`: a place for the parts of all ranks of this host, and the trace they make at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from nexar.cli.ending import complain
from nexar.errors import UsageError

TraceTo = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Write a trace of the run, for ui.perfetto.dev.")
]


@contextmanager
def traced(path: Path | None) -> Iterator[dict[str, object]]:
    """The settings that make ranks write their parts; the trace is in the file when the block has ended, however it
    did. UsageError if nothing can be written there.
    """
    if path is None:
        yield {}
        return
    try:
        path.open("a").close()  # as it will be opened at the end: a touch would take a directory for a file
    except OSError as error:
        raise UsageError(
            f"--trace {path} cannot be written: {error.strerror}; name a file in a directory that you can write to"
        ) from error
    with tempfile.TemporaryDirectory(prefix="nexar-trace-") as folder:
        try:
            yield {"trace_dir": folder}
        finally:
            merge([Path(folder)], path)


def merge(directories: list[Path], path: Path) -> int:
    """Make one trace of what is there, and say so. Returns of how many ranks."""
    from nexar.observe.trace_files import read_parts, write_trace  # noqa: PLC0415  # arrays and all: only who wants it

    found = read_parts(directories)
    for name, reason in found.unreadable.items():
        complain(f"{name} is left out of the trace: {reason}")
    written = write_trace(path, found.parts)
    missing = f"; {written.missed} calls came before those, and were not kept" if written.missed else ""
    complain(
        f"{written.calls} calls of {written.ranks} ranks are in {path}{missing}; open it at https://ui.perfetto.dev"
    )
    return written.ranks
