"""One idle connection whose end is the news."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from nexar.transport.base import Carrier, CarrierLost
from nexar.types import NodeId
from nexar.wire.frame import Frame


class DeathLine:
    """The sink of its carrier from the moment it is made: inside a call of the sink that the carrier had before.

    `over` is called once, on the driving thread: with how it ended, or None if the peer closed it politely. After an
    `abort` it is not called.
    """

    def __init__(self, carrier: Carrier, over: Callable[[DeathLine, str | None], None]) -> None:
        self._carrier = carrier
        self._over = over
        self._told = False  # the driving thread writes
        self.peer: Final[NodeId] = carrier.peer.node
        carrier.attach(self)

    def finish(self) -> None:
        """Close it politely; `over` is called when the peer has agreed. Any thread."""
        try:
            self._carrier.finish()
        except CarrierLost:
            return  # it ended by itself meanwhile, and `over` is or was called

    def abort(self, reason: str) -> None:
        """End it now. Any thread."""
        self._carrier.abort(reason)

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        """See Sink. Who speaks here has a use for it that we do not know."""
        carrier.abort("nothing is said on a death line")
        self._tell("it spoke on a line where nothing is said")

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """See Sink. None is expected."""

    def carrier_finished(self, carrier: Carrier) -> None:
        """See Sink."""
        self.finish()
        self._tell(None)

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        """See Sink."""
        self._tell(f"its connection ended: {error.reason}")

    def _tell(self, cause: str | None) -> None:
        if not self._told:
            self._told = True
            self._over(self, cause)
