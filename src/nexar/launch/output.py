"""Where the output of ranks goes: to this terminal, line by line with the rank in front, to files, or both.

Two ranks never share a line: a line is written when it is complete, in one piece.
"""

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
    """This process's own standard output and error. It ends nothing: a reader that went away is told by `gone`."""

    def __init__(self, outputs: Mapping[Stream, BinaryIO]) -> None:
        self._outputs = outputs
        self._coloured = {stream: output.isatty() for stream, output in outputs.items()}
        self.gone = False
        """Nothing can be shown any more: nobody reads, as after `nexar run … | head`, or the disk is full."""

    def show(self, plan: RankPlan, stream: Stream, line: bytes) -> None:
        """One complete line of a rank."""
        self.write(stream, self._prefix(plan, stream) + line)

    def write(self, stream: Stream, text: bytes) -> None:
        """Text of our own; not lost in a buffer when this process is killed."""
        if self.gone:
            return
        try:
            _write_all(self._outputs[stream], text)
        except BrokenPipeError:
            self._give_up(stream)
        except OSError as error:
            self._give_up(stream)
            _log.warning("%s cannot be written (%s); stopping", stream, error.strerror or error)

    def _give_up(self, stream: Stream) -> None:
        """What is left in the buffer goes nowhere: written again when the interpreter ends, it would fail again, and
        the exit code would be 120 instead of ours.
        """
        self.gone = True
        with suppress(io.UnsupportedOperation):  # a stand-in without a descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._outputs[stream].fileno())
            finally:
                os.close(nowhere)

    def _prefix(self, plan: RankPlan, stream: Stream) -> bytes:
        if not self._coloured[stream]:
            return plan.prefix.encode()
        return f"\x1b[{_COLOURS[(plan.rank or plan.local_rank) % len(_COLOURS)]}m{plan.prefix}\x1b[0m".encode()


def _write_all(output: BinaryIO, text: bytes) -> None:
    """An unbuffered stream (PYTHONUNBUFFERED) may take a part, when a signal comes in between."""
    rest = memoryview(text)
    while rest:
        rest = rest[output.write(rest) :]
    output.flush()


class StreamOutput:
    """One stream of one rank: kept at its end, shown by the console, written to its file. Closed by its owner."""

    def __init__(self, plan: RankPlan, stream: Stream, console: Console | None, log_dir: Path | None) -> None:
        self._plan, self._stream, self._console = plan, stream, console
        self._lines = LineSplitter()
        self._hold = TracebackHold() if stream == "stderr" else None
        self._tail = Tail()
        self._log = None if log_dir is None else (log_dir / plan.log_name(stream)).open("wb", buffering=0)

    def feed(self, piece: bytes) -> None:
        """What the rank has just written."""
        self._tail.feed(piece)
        if self._log is not None:
            self._keep(self._log, piece)
        if self._console is not None:
            for line in self._lines.feed(piece):
                self._line(line)

    def _line(self, line: bytes) -> None:
        self.show([line] if self._hold is None else self._hold.feed(line, time.monotonic()))

    def show(self, lines: Iterable[bytes]) -> None:
        """Write these lines of the rank to the console, if it shows them."""
        if self._console is not None:
            for line in lines:
                self._console.show(self._plan, self._stream, line)

    @property
    def is_shown(self) -> bool:
        """Whether the console shows this stream."""
        return self._console is not None

    @property
    def due(self) -> float | None:
        """When `release` is needed (time.monotonic); None: not now."""
        return None if self._hold is None else self._hold.due

    def hold_longer(self, seconds: float) -> None:
        """The process said that it ends with the traceback that is kept back."""
        if self._hold is not None:
            self._hold.extend(seconds)

    def release(self) -> None:
        """The process goes on after a traceback that was kept back: show it."""
        if self._hold is not None:
            self.show(self._hold.release())

    def take_held(self) -> list[bytes]:
        """At the end of the process: the traceback that it ended with, as lines that were not shown. They are the
        caller's.
        """
        rest = self._lines.finish()
        if rest:
            self._line(rest)
        return [] if self._hold is None else self._hold.release()

    def _keep(self, log: BinaryIO, piece: bytes) -> None:
        """A file that takes no more, for a full disk, ends the file and not the work of days that it tells of."""
        try:
            log.write(piece)
        except OSError as error:
            _log.warning("%s ends here (%s); %s goes on", log.name, error.strerror or error, self._plan.name)
            self._end_log()

    def tail(self) -> str:
        """The last that came."""
        return self._tail.text()

    def close(self) -> None:
        """Show what has no end of line. Idempotent."""
        self.show(self.take_held())
        self._end_log()

    def _end_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


def standard_console(stdout: BinaryIO, stderr: BinaryIO) -> Console:
    """The console of a command."""
    return Console({"stdout": stdout, "stderr": stderr})
