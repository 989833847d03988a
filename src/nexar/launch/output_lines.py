"""Splits the output of ranks into lines and finds tracebacks. Pure."""

import re
from collections.abc import Iterator

LONGEST_LINE = 64 << 20
"""Bytes after which an incomplete line is shown: bounds the memory of the launcher."""

KEPT_BYTES = 131_072
"""Kept of a rank's last output: enough for a long traceback, and bounded."""

TRACEBACK_SECONDS = 2.0
"""How long a traceback is held: by then a process that ends with it has ended."""

_END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a \r at the very end may be half of \r\n, so it waits
_HEADER_LINE = re.compile(rb"\s*(?:\+ Exception Group )?Traceback \(most recent call last\):\s*\Z")
_HEADER = re.compile(r"^\s*(?:\+ Exception Group )?Traceback \(most recent call last\):$", re.MULTILINE)
_FRAME = re.compile(r"Traceback \(most recent call last\):$|  File \"")
_LINKED = ("The above exception was the direct cause of", "During handling of the above exception, another")
_LAST_LINES = 20


class LineSplitter:
    """Splits output into lines. A carriage return ends one too: progress bars use it."""

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self._longest = longest
        self._rest = bytearray()  # contains no line end, except perhaps a trailing \r

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Each byte is searched once."""
        searched = max(0, len(self._rest) - 1)
        self._rest += piece
        ends = [end.end() for end in _END.finditer(self._rest, searched)]
        for begin, end in zip([0, *ends], ends, strict=False):
            yield bytes(self._rest[begin:end])
        if ends:
            del self._rest[: ends[-1]]
        while len(self._rest) > self._longest:
            yield bytes(self._rest[: self._longest]) + b"\n"
            del self._rest[: self._longest]

    def finish(self) -> bytes:
        rest, self._rest = bytes(self._rest), bytearray()
        return rest if not rest or rest.endswith(b"\r") else rest + b"\n"


class TracebackHold:
    """Holds a traceback and what follows: the process may end with it."""

    def __init__(self, seconds: float = TRACEBACK_SECONDS) -> None:
        self._seconds = seconds
        self._lines: list[bytes] = []
        self._bytes = 0
        self.due: float | None = None
        """When to show the lines (the caller's clock); None: no lines are held."""

    def feed(self, line: bytes, now: float) -> list[bytes]:
        if self.due is None:
            if not _HEADER_LINE.match(line):
                return [line]
            self.due = now + self._seconds
        self._lines.append(line)
        self._bytes += len(line)
        return self.release() if self._bytes > KEPT_BYTES else []

    def extend(self, seconds: float) -> None:
        if self.due is not None:
            self.due += seconds

    def release(self) -> list[bytes]:
        lines, self._lines, self._bytes, self.due = self._lines, [], 0, None
        return lines


class Tail:
    """The last part of a stream."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> None:
        self._bytes += piece
        if len(self._bytes) > 2 * self._kept_bytes:  # seldom, so that each byte is moved once on average
            del self._bytes[: -self._kept_bytes]

    def text(self) -> str:
        return bytes(self._bytes[-self._kept_bytes :]).decode(errors="replace")


def last_traceback(errors: str) -> str:
    """The last traceback, with linked ones before it and all text after it; else the last lines."""
    headers = [found.start() for found in _HEADER.finditer(errors)]
    if not headers:
        return "\n".join(errors.rstrip().splitlines()[-_LAST_LINES:])
    first = headers[-1]
    for before in reversed(headers[:-1]):
        if not any(words in errors[before:first] for words in _LINKED):
            break
        first = before
    return errors[first:].rstrip()


def exception_name(traceback: str) -> str:
    """Without its module."""
    return _raised(traceback).partition(":")[0].rpartition(".")[2].strip()


def _raised(traceback: str) -> str:
    """Python 3.11 may write an empty line before it."""
    lines = traceback.splitlines()
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    behind = lines[frames[-1] + 1 :] if frames else lines
    return next((line for line in behind if line and not line.startswith(" ")), "")
