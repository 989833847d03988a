"""How a carrier ends: once, for one reason, told to its sink at most once.

    open ──── send failed ────▶ broken ── the rest was taken in ──▶ lost ── told ──▶ over
      ├────── stream ended, garbage ──────────────────────────────▶ lost ── told ──▶ over
      └────── aborted, or both sides finished ───────────────────────── silently ──▶ over

*Broken* exists because a peer may have sent something before it went: the thread that noticed only leaves the reason,
the driving thread takes in what has arrived, and then the carrier is lost for that reason.
"""

from __future__ import annotations

from threading import Lock

from nexar.transport.base import CarrierLost


class Ending:
    """Written by any thread, under its lock; each step happens once."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._broken: CarrierLost | None = None
        self._told = False
        self.lost: CarrierLost | None = None
        """Set: nothing more is delivered."""

    def lose(self, why: CarrierLost | None = None) -> CarrierLost:
        """It is lost; whoever noticed first has said why."""
        with self._lock:
            if self.lost is None:
                self.lost = self._broken or why or CarrierLost("closed", "the carrier has ended")
            return self.lost

    def lose_silently(self, why: CarrierLost) -> CarrierLost:
        """It is over, and the sink is not to be told."""
        with self._lock:
            self._told = True
        return self.lose(why)

    def break_off(self, why: CarrierLost) -> tuple[CarrierLost, bool]:
        """Nothing can be sent any more: the reason, and whether this is news."""
        with self._lock:
            if self._broken is not None:
                return self._broken, False
            self._broken = self.lost or why
            return self._broken, True

    @property
    def is_broken(self) -> bool:
        """Nothing can be sent any more."""
        return self._broken is not None

    def take_news(self) -> CarrierLost | None:
        """What the sink must be told now, if anything; the next call says None."""
        with self._lock:
            if self.lost is None or self._told:
                return None
            self._told = True
            return self.lost
