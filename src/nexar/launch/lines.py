"""What ranks write, cut into lines and searched for the traceback that matters. Pure."""

import re
from collections.abc import Iterator

LONGEST_LINE = 65_536
"""Bytes after which a line is shown although its end has not come."""

KEPT_BYTES = 131_072
"""Of what a rank wrote last: enough for a long traceback, bounded whatever the rank writes."""

_END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a \r at the very end may be half of \r\n: it waits
_HEADER = re.compile(r"^\s*(?:\+ Exception Group )?Traceback \(most recent call last\):$", re.MULTILINE)
_FRAME = re.compile(r"Traceback \(most recent call last\):$|  File \"")
_LINKED = ("The above exception was the direct cause of", "During handling of the above exception, another")
_LAST_LINES = 20
_CONSEQUENCE = re.compile(r"nexar\.errors\.\w+\.(?:PeerLost|MembershipChanged): ")

_TOO_LATE = re.compile(r"nexar\.errors\.\w+\.JoinRefused: .*every member has left or died")


class LineSplitter:
    """Turns pieces of output, cut anywhere, into lines. A carriage return ends a line too: progress bars use it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The lines that are complete now, each with its end."""
        text, begin = self._rest + piece, 0
        for end in _END.finditer(text):
            yield text[begin : end.end()]
            begin = end.end()
        self._rest = text[begin:]
        while len(self._rest) > LONGEST_LINE:
            yield self._rest[:LONGEST_LINE] + b"\n"
            self._rest = self._rest[LONGEST_LINE:]

    def finish(self) -> bytes:
        """What was left without an end, with one; empty if nothing was."""
        rest, self._rest = self._rest, b""
        return rest if not rest or rest.endswith(b"\r") else rest + b"\n"


class Tail:
    """The last part of a stream."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> None:
        """Add what came."""
        self._bytes += piece
        if len(self._bytes) > 2 * self._kept_bytes:  # seldom, so that each byte is moved once on average
            del self._bytes[: -self._kept_bytes]

    def text(self) -> str:
        """What is kept."""
        return bytes(self._bytes[-self._kept_bytes :]).decode(errors="replace")


def last_traceback(errors: str) -> str:
    """The last traceback in what a rank wrote to standard error, whole: with those it was linked to and what followed.

    A text without a traceback (a syntax error, a program that is not Python) gives its last lines.
    """
    headers = [found.start() for found in _HEADER.finditer(errors)]
    if not headers:
        return "\n".join(errors.rstrip().splitlines()[-_LAST_LINES:])
    first = headers[-1]
    for before in reversed(headers[:-1]):
        if not any(words in errors[before:first] for words in _LINKED):
            break
        first = before
    return errors[first:].rstrip()


def blames_another(traceback: str) -> bool:
    """Whether a rank failed only because another one was gone: that one has the reason."""
    return _CONSEQUENCE.match(_raised(traceback)) is not None


def came_too_late(traceback: str) -> bool:
    """Whether a joiner failed only because nobody was left who could have let it in."""
    return _TOO_LATE.match(_raised(traceback)) is not None


def _raised(traceback: str) -> str:
    """The line behind the last frame: what was raised. Further lines of its message, and notes, come after it."""
    lines = traceback.splitlines()
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    behind = lines[frames[-1] + 1 :] if frames else lines
    return next((line for line in behind if not line.startswith(" ")), "")
