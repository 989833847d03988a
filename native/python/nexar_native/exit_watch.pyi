"""Detects the end of processes that share memory with this one, before the system closes their sockets.

Two processes share a page and use one word of it each, 8 bytes, initially 0. Each passes the offset of its own word and
that of the other's. The kernel marks a process's words as soon as it ends, however it ends, or when `exec` replaces it.
A process that removes a word first is not reported. Needs Linux 5.16; one native thread waits for all words.

Every object may be used from several threads. In a forked child every call raises RuntimeError: its words are the
parent's.
"""

from typing import final

from typing_extensions import Buffer

__all__ = ["ExitWatch"]

@final
class ExitWatch:
    def __new__(cls) -> ExitWatch:
        """Starts the thread. Raises OSError if the kernel does not support it."""

    def fileno(self) -> int:
        """A descriptor that is readable while `ended` has news."""

    def add(self, memory: Buffer, mine: int, theirs: int) -> int | None:
        """Own the word at offset `mine` of this shared mapping's first page, and watch the one at `theirs`, now or as
        soon as the other process has added it. Returns a key; None after `close`, or if 127 are watched. Keeps no
        reference to `memory`. Raises OSError if it is not shared or cannot be mapped once more.
        """

    def remove(self, key: int) -> None:
        """Give up the word. Unknown keys are ignored."""

    def ended(self) -> list[int]:
        """The keys of processes that have ended, each once."""

    def close(self) -> None:
        """Give up all words and end the thread. Idempotent."""
