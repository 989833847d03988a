"""Runs NodeMachine: orders the events of a node and performs the actions.

Invariants:
- The lock orders the events. Actions are performed in that order, one at a time, without the lock, by any thread that
  finds no other performing: usually the thread that received the decision.
- No action blocks: it sends without waiting, starts long work elsewhere, and takes only briefly held locks. So an
  interruption waits only for the short actions before it, and links close only after it.
- An action may put events; their actions follow those already waiting.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from nexar.cluster.control_loop import ControlLoop
from nexar.cluster.decisions.membership_events import MembershipInput, OwnDelayChanged, Tick
from nexar.cluster.decisions.node_machine import NodeAction, NodeInput, NodeMachine

_log = logging.getLogger(__name__)

_MIN_DELAY_CHANGE: Final = 0.25  # seconds; smaller changes of the own delay are not reported to the machine


class MachineRunner:
    """Events, actions and timer of one node's machine. Any thread. In a forked child it does nothing."""

    def __init__(
        self,
        machine: NodeMachine,
        control_loop: ControlLoop,
        perform: Callable[[NodeAction], None],
        *,
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`perform` must not block. `own_delay` extends deadlines."""
        self._perform = perform
        self.own_delay: Final = own_delay
        self._owner = os.getpid()
        self._deferred: deque[NodeInput] = deque()  # filled by the garbage collector, under any lock
        self.changed: Final = threading.Condition()
        """Guards the machine and everything below. Notified after each event and each action."""
        self.machine: Final = machine  # for queries, under the lock
        self._reported_delay = 0.0  # the last OwnDelayChanged
        self._waiting: deque[NodeAction] = deque()
        self._performer: int | None = None  # the thread that performs an action
        self._stopped = False
        self._timer = control_loop.call_at(None, self._on_timer)

    def put(self, event: NodeInput) -> list[NodeAction]:
        """Returns the actions, which another thread may still be performing. Not under the node's lock. Never blocks.
        After `stop`, membership events have no effect.
        """
        if os.getpid() != self._owner:
            return []
        actions, due = self._decide(event)
        self._timer.wake_by(due)  # first: an interrupt in the main thread may end the performing
        self._perform_waiting()
        return actions

    def put_later(self, event: NodeInput) -> None:
        """Handle the event with the next one. Takes no lock, so a finaliser may call it."""
        self._deferred.append(event)

    def wait(self) -> None:
        """Wait until all actions are performed. Returns at once inside an action."""
        with self.changed:
            self.changed.wait_for(
                lambda: self._performer == threading.get_ident() or not (self._waiting or self._performer)
            )

    def stop(self) -> None:
        """Ignore further membership events. Waits until a tick has been handled. Idempotent."""
        with self.changed:
            self._stopped = True
        self._timer.close()

    def _on_timer(self, _: float) -> None:
        self.put(Tick())  # which sets the timer again

    def _decide(self, event: NodeInput) -> tuple[list[NodeAction], float | None]:
        with self.changed:
            if self._stopped and isinstance(event, MembershipInput):
                return [], None
            now = time.monotonic()
            for earlier in self._earlier_events():
                self._waiting.extend(self.machine.step(earlier, now))
            actions = self.machine.step(event, now)
            self._waiting.extend(actions)
            self.changed.notify_all()
            return actions, self.machine.due(now)

    def _earlier_events(self) -> Iterator[NodeInput]:
        """Under the lock."""
        seconds = self.own_delay()
        if abs(seconds - self._reported_delay) >= _MIN_DELAY_CHANGE:
            self._reported_delay = seconds
            yield OwnDelayChanged(seconds)
        while self._deferred:
            yield self._deferred.popleft()

    def _perform_waiting(self) -> None:
        """Returns at once if any thread, even this one, is performing an action: that thread performs the rest."""
        while (action := self._take()) is not None:
            try:
                self._perform(action)
            except Exception:  # noqa: BLE001 - one action must not stop the others
                _log.exception("could not perform %s", type(action).__name__)
            finally:
                with self.changed:
                    self._performer = None
                    self.changed.notify_all()

    def _take(self) -> NodeAction | None:
        with self.changed:
            if self._performer is not None or not self._waiting:
                return None
            self._performer = threading.get_ident()
            return self._waiting.popleft()
