"""Writes the output of ranks to the terminal, files, or both. Two ranks never share a line."""

import io
import logging
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

from nexar.launch.output_lines import LineSplitter, Tail, TracebackHold
from nexar.launch.plan import RankPlan

Stream: TypeAlias = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, ...] = ("stdout", "stderr")

_log = logging.getLogger(__name__)
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)  # red is for errors


class Console:
    """A failed write sets `gone` and raises nothing."""

    def __init__(self, outputs: Mapping[Stream, BinaryIO]) -> None:
        self._outputs = outputs
        self._coloured = {stream: output.isatty() for stream, output in outputs.items()}
        self.gone = False
        """Nothing can be shown: no process reads (`nexar run … | head`), or the disk is full."""

    def show(self, plan: RankPlan, stream: Stream, line: bytes) -> None:
        self.write(stream, self._prefix(plan, stream) + line)

    def write(self, stream: Stream, text: bytes) -> None:
        if self.gone:
            return
        try:
            _write_all(self._outputs[stream], text)
        except BrokenPipeError:
            self._redirect_to_null(stream)
        except OSError as error:
            self._redirect_to_null(stream)
            _log.warning("%s cannot be written (%s); stopping", stream, error.strerror or error)

    def _redirect_to_null(self, stream: Stream) -> None:
        """Otherwise the interpreter would write its buffer again at exit, fail, and exit with code 120."""
        self.gone = True
        with suppress(io.UnsupportedOperation):  # a replacement stream without a descriptor
            null = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(null, self._outputs[stream].fileno())
            finally:
                os.close(null)

    def _prefix(self, plan: RankPlan, stream: Stream) -> bytes:
        if not self._coloured[stream]:
            return plan.prefix.encode()
        return f"\x1b[{_COLOURS[(plan.rank or plan.local_rank) % len(_COLOURS)]}m{plan.prefix}\x1b[0m".encode()


def _write_all(output: BinaryIO, text: bytes) -> None:
    """Unbuffered streams may write only a part."""
    rest = memoryview(text)
    while rest:
        rest = rest[output.write(rest) :]
    output.flush()


class StreamOutput:
    """One stream of one rank: to the console and its file, its end kept."""

    def __init__(self, plan: RankPlan, stream: Stream, console: Console | None, log_dir: Path | None) -> None:
        self._plan, self._stream, self._console = plan, stream, console
        self._lines = LineSplitter()
        self._hold = TracebackHold() if stream == "stderr" else None
        self._tail = Tail()
        self._log = None if log_dir is None else (log_dir / plan.log_name(stream)).open("wb", buffering=0)

    def feed(self, piece: bytes) -> None:
        self._tail.feed(piece)
        if self._log is not None:
            self._write_log(self._log, piece)
        if self._console is not None:
            for line in self._lines.feed(piece):
                self._show_line(line)

    def _show_line(self, line: bytes) -> None:
        self.show([line] if self._hold is None else self._hold.feed(line, time.monotonic()))

    def show(self, lines: Iterable[bytes]) -> None:
        if self._console is not None:
            for line in lines:
                self._console.show(self._plan, self._stream, line)

    @property
    def is_shown(self) -> bool:
        return self._console is not None

    @property
    def due(self) -> float | None:
        """When to `release` (time.monotonic)."""
        return None if self._hold is None else self._hold.due

    def hold_longer(self, seconds: float) -> None:
        if self._hold is not None:
            self._hold.extend(seconds)

    def release(self) -> None:
        if self._hold is not None:
            self.show(self._hold.release())

    def take_held(self) -> list[bytes]:
        rest = self._lines.finish()
        if rest:
            self._show_line(rest)
        return [] if self._hold is None else self._hold.release()

    def _write_log(self, log: BinaryIO, piece: bytes) -> None:
        """A full disk ends the log file, not the run."""
        try:
            log.write(piece)
        except OSError as error:
            _log.warning(
                "cannot write %s (%s); %s continues without it", log.name, error.strerror or error, self._plan.name
            )
            self._end_log()

    def tail(self) -> str:
        return self._tail.text()

    def close(self) -> None:
        self.show(self.take_held())
        self._end_log()

    def _end_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


def standard_console(stdout: BinaryIO, stderr: BinaryIO) -> Console:
    """The console of a command."""
    return Console({"stdout": stdout, "stderr": stderr})
