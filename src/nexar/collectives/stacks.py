"""Where every Python thread of this process is, and which line of it is the user's own."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec

_DEEPEST: Final = 64  # frames of a thread
_NOT_THE_USERS: Final = (
    str(Path(__file__).parents[1]),  # ours
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)


class Stack(msgspec.Struct, frozen=True):
    """Of one thread."""

    thread: str
    main: bool
    at: str
    """`train.py:88`: the innermost line that is neither ours nor a library's; empty if there is none."""
    frames: tuple[str, ...]
    """`/home/ann/train.py:88 in step: loss.backward()`, the outermost first."""


def stacks() -> tuple[Stack, ...]:
    """Of all threads, the main one first. Takes no lock but the interpreter's own."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = [
        _stack(names.get(ident, f"thread {ident}"), ident == main, frame)
        for ident, frame in sys._current_frames().items()
    ]
    return tuple(sorted(found, key=lambda stack: (not stack.main, stack.thread)))


def _stack(thread: str, main: bool, frame: FrameType) -> Stack:
    lines = traceback.extract_stack(frame, _DEEPEST)
    theirs = [line for line in lines if not line.filename.startswith(_NOT_THE_USERS)]
    at = f"{Path(theirs[-1].filename).name}:{theirs[-1].lineno}" if theirs else ""
    return Stack(
        thread, main, at, tuple(f"{line.filename}:{line.lineno} in {line.name}: {line.line}" for line in lines)
    )
