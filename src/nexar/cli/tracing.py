"""`nexar run --trace FILE`: a place for the parts of all ranks of this host, and the trace they make at the end."""

from __future__ import annotations

import errno
import os
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
    problem = _problem(path)
    if problem:
        raise UsageError(
            f"--trace {path} cannot be written: {problem}; name a file in a directory that you can write to"
        )
    with tempfile.TemporaryDirectory(prefix="nexar-trace-") as folder:
        try:
            yield {"trace_dir": folder}
        finally:
            merge([Path(folder)], path)


def _problem(path: Path) -> str:
    """Why there will be no file of that name at the end, so far as that can be known now: nothing is touched."""
    if path.is_dir():
        return "it is a directory"
    if not path.parent.is_dir():
        return "there is no such directory"
    if path.exists() and not path.is_file():
        return "" if os.access(path, os.W_OK) else os.strerror(errno.EACCES)
    return "" if os.access(path.resolve().parent, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)


def merge(directories: list[Path], path: Path) -> int:
    """Make one trace of what is there, and say so. Returns of how many ranks; 0: there is nothing to make it of, and
    the file is not touched.
    """
    from nexar.observe.trace_files import read_parts, write_trace  # noqa: PLC0415  # arrays and all: only who wants it

    found = read_parts(directories)
    for name, reason in found.unreadable.items():
        complain(f"{name} is left out of the trace: {reason}")
    if found.earlier:
        complain(f"{found.earlier} parts are of other runs, and left out: this is the last one that wrote any")
    if not found.parts:
        places = ", ".join(map(str, directories))
        complain(
            f"no rank has left its part of a trace in {places}, so {path} is not written: ranks do so when they end, "
            "if NEXAR_TRACE_DIR names the directory"
        )
        return 0
    written = write_trace(path, found.parts)
    missing = f"; {written.missed} calls came before those, and were not kept" if written.missed else ""
    complain(
        f"{written.calls} calls of {written.ranks} ranks are in {path}{missing}; open it at https://ui.perfetto.dev"
    )
    return written.ranks
