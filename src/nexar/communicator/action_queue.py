"""Ordered execution of actions, with a point where they may be held back."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

_log = logging.getLogger(__name__)

Action = TypeVar("Action")


class ActionQueue(Generic[Action]):
    """Performs actions in order, one at a time, in any thread that finds no other performing. Unlike SerialQueue it
    may be held back, and its owner may wait for it.
    """

    def __init__(
        self, changed: threading.Condition, do: Callable[[Action], None], is_held_back: Callable[[Action], bool]
    ) -> None:
        """`do` is called without the lock of `changed`, which is notified after each action; `is_held_back` with it."""
        self._changed = changed
        self._do = do
        self._is_held_back = is_held_back
        self._waiting: deque[Action] = deque()  # guarded by `changed`
        self._performer: int | None = None  # the thread that performs an action; guarded by `changed`

    def add(self, actions: Iterable[Action]) -> None:
        """Under the lock that orders the decisions; then `perform` without it."""
        self._waiting.extend(actions)

    def perform(self) -> None:
        """Returns at once if an action is being performed, also by this thread: that one performs the rest."""
        while (action := self._take()) is not None:
            try:
                self._do(action)
            except Exception:  # noqa: BLE001 - one action must not stop the others
                _log.exception("could not perform %s", type(action).__name__)
            finally:
                with self._changed:
                    self._performer = None
                    self._changed.notify_all()

    def wait(self) -> None:
        """Until all actions are performed. Inside an action it returns at once."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._performer == threading.get_ident() or not (self._waiting or self._performer)
            )

    def _take(self) -> Action | None:
        with self._changed:
            if self._performer is not None or not self._waiting or self._is_held_back(self._waiting[0]):
                return None
            self._performer = threading.get_ident()
            return self._waiting.popleft()
