"""The open nodes of this process: closed when the interpreter ends, abandoned in a forked child."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Protocol

from nexar.links.interrupt import interrupts


class Node(Protocol):
    """What owns threads and connections (a Progress)."""

    def close(self) -> None:
        """Idempotent."""

    def abandon(self) -> None:
        """In a forked child, which has one thread: let go without waiting for anybody."""


_open: dict[int, Node] = {}  # written by their makers and closers
_before_exit: list[Callable[[], None]] = []  # written at import


def opened(node: Node) -> None:
    """At exit the hook registered last runs first: nodes must close before the packages that they stand on."""
    _open[id(node)] = node
    atexit.unregister(_close_all)
    atexit.register(_close_all)
    interrupts.enter()


def closed(node: Node) -> None:
    """It needs nothing any more; with the last one our signal handlers go."""
    _open.pop(id(node), None)
    if not _open:
        interrupts.leave()


def before_exit(action: Callable[[], None]) -> None:
    """At exit call this while the open nodes still work: a hook of its own may run too late."""
    _before_exit.append(action)


def _close_all() -> None:
    for action in _before_exit:
        action()
    for node in list(_open.values()):
        node.close()


def _abandon_all() -> None:
    for node in list(_open.values()):
        node.abandon()
    _open.clear()
    interrupts.forked()


os.register_at_fork(after_in_child=_abandon_all)
