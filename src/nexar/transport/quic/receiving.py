"""What a stream that is being read needs of the connection it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from nexar_quic import Completions, QuicError

from nexar.transport.base import Carrier, Sink
from nexar.wire.codec import Decode


class Receiver(Protocol):
    """The receiving half of a carrier, as its streams see it. They call it in the driving thread only."""

    completions: Completions
    frames_received: int
    sink: Sink
    """Looked up at every call, never kept: abort() puts the silent one in its place, a sink its successor."""
    decode: Decode
    """Judges headers; looked up for every frame, because a stranger may be admitted between two."""
    inside: bool
    """Set before the sink is looked up, and lowered by leave(): see abort()."""

    @property
    def carrier(self) -> Carrier | None:
        """None once it has ended and nobody holds it: then nobody hears what arrives."""

    def leave(self) -> None:
        """The call of the sink has returned."""

    def tell(self, call: Callable[[Sink], None]) -> None:
        """Call the sink: `inside`, the look, the call, and leave()."""

    def finish_announced(self, streams: int) -> None:
        """The peer sends no more; it opened this many streams, all types together."""

    def farewell_arrived(self) -> None:
        """The peer has everything we announced."""

    def stream_over(self) -> None:
        """One stream has ended, whichever way; all in it was delivered or dropped. Callable from any thread."""

    def misbehaved(self, reason: str) -> None:
        """The peer broke the protocol: give up the connection."""

    def read_failed(self, error: QuicError) -> None:
        """A stream that must not break did."""

    def interrupted(self, error: BaseException) -> None:
        """See Handler."""
