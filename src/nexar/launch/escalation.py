"""How ranks are made to stop: asked, asked again, killed. Pure: time comes in."""

import signal

GRACE = 5.0
"""Seconds a rank has to clean up after the first request."""

SHORT_GRACE = 1.0
"""Seconds after the second: whoever presses Ctrl-C twice means it."""


class Escalation:
    """One stop. Nothing happens before the first `ask`; after the last step nothing is due any more."""

    def __init__(self, grace: float = GRACE, short_grace: float = SHORT_GRACE) -> None:
        self._grace, self._short_grace = grace, short_grace
        self._kill_at: float | None = None
        self.asked = False

    def ask(self, number: int, now: float) -> int:
        """Somebody wants the ranks to stop, by this signal. The signal to send them now."""
        if not self.asked:
            self.asked, self._kill_at = True, now + self._grace
            return number
        if self._kill_at is not None:
            self._kill_at = min(self._kill_at, now + self._short_grace)
        return signal.SIGTERM

    def due(self, now: float) -> float | None:
        """Seconds until the next step; None: none is coming."""
        return None if self._kill_at is None else max(0.0, self._kill_at - now)

    def tick(self, now: float) -> int | None:
        """The signal that is due by now."""
        if self._kill_at is None or now < self._kill_at:
            return None
        self._kill_at = None
        return signal.SIGKILL
