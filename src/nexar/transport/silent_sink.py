"""The sink of a carrier that has ended, or whose owner wants to hear no more.

An ended carrier that kept its sink would be a ring with it: neither would be freed before the collector finds both.
"""

from __future__ import annotations

from typing import Final

from nexar.transport.base import Carrier, CarrierLost, Sink
from nexar.wire.frame import Frame


class _Silent:
    """Hears everything and does nothing."""

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        """Dropped."""

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """Dropped."""

    def carrier_finished(self, carrier: Carrier) -> None:
        """Dropped."""

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        """Dropped."""


SILENT: Final[Sink] = _Silent()
