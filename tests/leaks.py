"""What a test may leave behind: nothing. Takes stock of the process, compares, and names what is new."""

import asyncio
import gc
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

SETTLE_SECONDS = 2.0
"""Threads and sockets end a moment after they are closed; this is how long they get, and never fewer than LOOKS looks:
on a loaded machine one look, or one collection, may take longer than that.
"""
LOOKS = 5

_SHARED_MEMORY = Path("/dev/shm")
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Stock:
    """Everything alive in this process that a test could have made, each with the words that name it."""

    things: dict[tuple[str, object], str]

    @classmethod
    def take(cls) -> "Stock":
        """Look around now."""
        return cls({key: words for look in _LOOKS for key, words in look()})

    def new_since(self, before: "Stock") -> list[str]:
        """Words for what was not there before."""
        return [words for key, words in self.things.items() if key not in before.things]


def leaked_since(before: Stock) -> list[str]:
    """What stays new although it got time to go. Polls until nothing is left or the time is over."""
    deadline = time.monotonic() + SETTLE_SECONDS
    leaked, looks = _left_over(before), 1
    while leaked and (looks < LOOKS or time.monotonic() < deadline):
        gc.collect()  # an object that only waits to be collected is a ResourceWarning, not a leak
        time.sleep(0.01)
        leaked, looks = _left_over(before), looks + 1
    return leaked


def _left_over(before: Stock) -> list[str]:
    return [words for words in Stock.take().new_since(before) if not _belongs_to_others(words)]


Found = Iterator[tuple[tuple[str, object], str]]


def _threads() -> Found:
    for thread in threading.enumerate():
        yield ("thread", thread), f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''}"


def _descriptors() -> Found:
    ignored = getattr(resource_tracker._resource_tracker, "_fd", None)
    for name in os.listdir("/proc/self/fd") if _PROC.exists() else ():
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of the listing itself
            continue
        if int(name) != ignored:
            yield ("descriptor", (name, target)), f"descriptor {name} -> {target}"


def _segments() -> Found:
    for name in os.listdir(_SHARED_MEMORY) if _SHARED_MEMORY.exists() else ():
        yield ("segment", name), f"shared memory {_SHARED_MEMORY / name}"


def _children() -> Found:
    for pid in _child_pids(os.getpid()):
        command = _command(pid)
        if command and "resource_tracker" not in command:
            yield ("child", pid), f"child process {pid}: {command[:80]}"


def _tasks() -> Found:
    # asyncio keeps this set for all loops; all_tasks() would need the loop, which a leak has lost.
    known = getattr(asyncio.tasks, "_scheduled_tasks", None) or getattr(asyncio.tasks, "_all_tasks", ())
    for task in list(known):
        if not task.done():
            yield ("task", task), f"pending task {task!r}"


def _child_pids(pid: int) -> list[int]:
    try:
        return [int(c) for t in (_PROC / str(pid) / "task").iterdir() for c in (t / "children").read_text().split()]
    except OSError:
        return []


def _command(pid: int) -> str:
    """The command line; empty for a process that is gone or only waits to be reaped. A process that is just being
    started has none for a moment.
    """
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return words or ("" if _is_zombie(pid) else "(starting)")
    except OSError:
        return ""


def _is_zombie(pid: int) -> bool:
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"


def _belongs_to_others(words: str) -> bool:
    """Whether a shared-memory entry is held by a process that is neither this one nor its child, or has gone meanwhile:
    another test run's.
    """
    prefix = "shared memory "
    if not words.startswith(prefix):
        return False
    ours = {os.getpid(), *_child_pids(os.getpid())}
    others = (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit() and int(entry.name) not in ours)
    path = words.removeprefix(prefix)
    return any(path in _maps(pid) for pid in others) or not os.path.exists(path)


def _maps(pid: int) -> str:
    try:
        return (_PROC / str(pid) / "maps").read_text()
    except OSError:
        return ""


_LOOKS = (_threads, _descriptors, _segments, _children, _tasks)
