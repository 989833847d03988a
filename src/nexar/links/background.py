"""The waiter of last resort: a thread that drives a node while nobody who waits does.

It looks on every tick whether leadership was taken since the last one. Where it never changes hands for long
(one thread leads, and sleeps while it does), ticks would only burn power: the thread parks, and who gives leadership
up wakes it. Who leaves work behind and will not wait for it asks it to `step_in` at once.
"""

from __future__ import annotations

import threading
from typing import Final

from nexar.errors import InternalError
from nexar.links.drive import LONGEST_SLEEP, Drive
from nexar.links.leadership import Leadership
from nexar.transport.foreign import TransportBroke

_TICK: Final = 0.002  # how long nobody must have led before this thread does
_PATIENCE: Final = 10  # ticks under one and the same leader before it parks


class Background:
    """The progress thread of one node. Ends when the drive is stopped and `close` is called."""

    def __init__(self, leadership: Leadership, drive: Drive) -> None:
        self._leadership = leadership
        self._lead = leadership.lead
        self._drive = drive
        self.leads = False  # written by the thread
        self.parked = False  # written by the thread, cleared by who unparks it
        self._asked = False  # to lead at once, if nobody does; written by who asks, cleared by the thread
        self._unpark = threading.Lock()
        self._unpark.acquire()
        self._thread = threading.Thread(target=self._run, name="nexar-progress", daemon=True)
        self._thread.start()

    def step_in(self) -> None:
        """Lead now, if nobody does. From any thread."""
        if not self.leads:
            self._asked = True
            self.unpark()

    def unpark(self) -> None:
        """Leadership was given up: look again."""
        self.parked = False
        try:
            self._unpark.release()
        except RuntimeError:  # two leaders in a row saw it parked; one wake-up is enough
            return

    def close(self) -> None:
        """Returns when the thread has ended. The drive was stopped before."""
        self.unpark()
        self._thread.join()

    def _run(self) -> None:
        """Ends with the node, or with a bug, ours or of who made a transport: every wait raises it then."""
        try:
            self._take_over_when_idle()
        except TransportBroke as broke:
            self._leadership.end(broke)
        except BaseException as fault:
            self._leadership.end(InternalError(f"the progress thread ended: {fault!r}"))
            raise

    def _take_over_when_idle(self) -> None:
        seen = -1
        quiet = 0
        while not self._drive.stopped:
            turns = self._leadership.turns
            asked = self._asked
            if asked:
                self._asked = False
            if (asked or turns == seen) and self._lead.acquire(blocking=False):
                self._take_turn()
                seen, quiet = -1, 0
            elif turns == seen:
                quiet += 1
            else:
                seen, quiet = turns, 0
            self._rest(parked=quiet >= _PATIENCE)

    def _take_turn(self) -> None:
        self.leads = True
        try:
            self._drive.until_followed(self._leadership.followers)
        finally:
            self.leads = False
            self._lead.release()
            if self._leadership.followers:
                self._leadership.offer()

    def _rest(self, *, parked: bool) -> None:
        if self._drive.stopped:
            return
        self.parked = parked
        if parked and not self._lead.locked():
            self.parked = False  # it became free before its leader could see that we parked
            return
        self._unpark.acquire(timeout=LONGEST_SLEEP if parked else _TICK)
