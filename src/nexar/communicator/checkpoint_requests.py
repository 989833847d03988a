"""What one node asks for at the next checkpoint: joiners that wait, its own leave, removals of others."""

from __future__ import annotations

import threading
from collections.abc import Callable

from nexar.cluster.decisions.resize import ResizeRequest
from nexar.cluster.membership import Member
from nexar.types import NodeId


class CheckpointRequests:
    """This node's requests for the next checkpoint. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # over everything below
        self._waiting: tuple[Member, ...] = ()
        self._leaving = False
        self._departure_reported = False
        self._removals: dict[NodeId, str] = {}

    def set_waiting(self, members: tuple[Member, ...]) -> None:
        with self._changed:
            self._waiting = members
            self._changed.notify_all()

    def leave(self) -> None:
        with self._changed:
            self._leaving = True

    def report_departure(self) -> bool:
        """True for the first checkpoint of a node that has left: it returns that, and later ones raise Expelled."""
        with self._changed:
            is_first, self._departure_reported = not self._departure_reported, True
            return is_first

    def remove(self, node: NodeId, reason: str) -> None:
        with self._changed:
            self._removals[node] = reason[:1000]

    def settle(self, gone: frozenset[NodeId]) -> None:
        with self._changed:
            for node in gone:
                self._removals.pop(node, None)

    def wait(self, count: int, timeout: float, is_over: Callable[[], bool]) -> bool:
        """Block until `count` joiners wait. False: timeout, or `is_over`; call `recheck` after `is_over` changes."""
        with self._changed:
            seconds = min(timeout, threading.TIMEOUT_MAX)
            self._changed.wait_for(lambda: len(self._waiting) >= count or is_over(), seconds)
            return len(self._waiting) >= count

    def recheck(self) -> None:
        """Make waiters check `is_over`. Never blocks."""
        with self._changed:
            self._changed.notify_all()

    def mine(self) -> ResizeRequest:
        with self._changed:
            return ResizeRequest(self._waiting, self._leaving, dict(self._removals))
