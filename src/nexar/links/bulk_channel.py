"""The bulk channel of a link: a TCP connection beside the mesh carrier, only for large payloads.

All other frames stay on the mesh carrier, so their order never depends on the bulk channel. Each side first sends TERMS
on the channel; the receiver may then announce payloads. Other frames are dropped, because a plain connection is not
protected from injection.

A lost channel loses no data: the sender still holds the payloads. Each side sends FALLBACK and grants them again on the
mesh carrier.
"""

from __future__ import annotations

import logging
from collections import Counter

from nexar.links.carrier_selection import number_of
from nexar.links.link_state import LinkState
from nexar.links.receiving import Receiving
from nexar.transport.base import Carrier, CarrierLost
from nexar.types import describe_peer
from nexar.wire.frame import VERSION, Frame, FrameKind, Lane, pack_header

_log = logging.getLogger(__name__)


class BulkChannel:
    """The `Sink` of the carrier of one link's bulk channel, if any."""

    def __init__(self, state: LinkState, receiving: Receiving) -> None:
        self._state = state
        self._lock = state.router.lock
        self._deferred_io = state.router.deferred_io
        self._receiving = receiving
        self.failovers = 0  # channels lost while the link lived; under the lock
        self.failures = 0  # channels that could not be opened; under the lock
        self._number = 0  # number of the current or last channel in my TERMS; under the lock
        self._peer_number = 0  # its number in the peer's TERMS, 0 before they come; under the lock
        self._past: Counter[str] = Counter()  # counters of lost channels; under the lock

    # -- any thread ------------------------------------------------------------------------------------

    def adopt(self, carrier: Carrier) -> None:
        """Abort a second carrier. If the link is over, finish the carrier: the peer may not know yet."""
        state = self._state
        with self._lock:
            over = state.failure is not None
            taken = not over and state.sidecar is None
            if taken:
                state.add_sidecar(carrier)
                self._number, self._peer_number = self._number + 1, 0
            number = self._number
        if not taken and not over:
            carrier.abort("the link has a sidecar already")
            return
        carrier.attach(self)
        if over:
            _finish(carrier)
            return
        header = pack_header(
            VERSION, FrameKind.TERMS, Lane.CONTROL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, state.node, state.peer, 0, 0, 0,
            number, state.credit_bytes, 0, 0,
        )  # fmt: skip
        try:
            carrier.send_frame(Lane.CONTROL, 0, header)
        except CarrierLost:
            return  # the carrier reports its loss itself

    def open_failed(self) -> None:
        with self._lock:
            self.failures += 1

    def finish(self) -> None:
        with self._lock:
            carrier = self._state.sidecar
        if carrier is not None:
            _finish(carrier)

    def stats(self) -> dict[str, float]:
        """Include lost channels. Under the lock."""
        facts: Counter[str] = Counter(self._past)
        if self._state.sidecar is not None:
            facts.update(_counters(self._state.sidecar))
        return {"sidecar_failovers": self.failovers, "sidecar_failures": self.failures, **facts}

    # -- Sink: the driver thread -----------------------------------------------------------------------

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        with self._lock:
            if frame.kind == FrameKind.TERMS and self._state.sidecar is carrier:
                self._peer_number = frame.transfer
                self._state.confirm_sidecar(carrier)
            else:
                self._state.dropped_frames += 1

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """Ignore a dropped channel: its payloads are granted again."""
        with self._lock:
            if self._state.sidecar is carrier:
                self._receiving.payload_complete(transfer)
        self._deferred_io.flush()

    def carrier_finished(self, carrier: Carrier) -> None:
        with self._lock:
            self._drop(carrier)
        self._deferred_io.flush()
        _finish(carrier)

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        self._fall_back(carrier, error.reason)

    def lost_by_peer(self, number: int = 0) -> None:
        """Handle FALLBACK, which may arrive after a new channel. Number 0 means any channel."""
        with self._lock:
            carrier = self._state.sidecar if number in (0, self._number) else None
        if carrier is not None:
            reason = "the peer has lost it"
            carrier.abort(reason)  # first, so that nothing is written where a new grant expects the payload
            self._fall_back(carrier, reason)

    # -- internal --------------------------------------------------------------------------------------

    def _fall_back(self, carrier: Carrier, reason: str) -> None:
        state = self._state
        with self._lock:
            failed_over = self._drop(carrier)
            if failed_over:
                self.failovers += 1
                state.notice(FrameKind.FALLBACK, 0, 0, transfer=self._peer_number)
        self._deferred_io.flush()
        if failed_over:
            peer = describe_peer(state.rank, state.peer)
            _log.warning("lost the bulk sidecar to %s; its payloads use the mesh connection: %s", peer, reason)

    def _drop(self, carrier: Carrier) -> bool:
        """Return False if already dropped, or the link is over. Under the lock."""
        state = self._state
        if state.drop_sidecar(carrier) is None:
            return False
        self._past.update(_counters(carrier))
        if state.failure is not None or state.carrier is None:
            return False
        self._receiving.fall_back(number_of(carrier.scheme))
        return True


def _counters(carrier: Carrier) -> dict[str, float]:
    return {f"{carrier.scheme}.{name}": value for name, value in carrier.stats().items()}


def _finish(carrier: Carrier) -> None:
    try:
        carrier.finish()
    except CarrierLost:
        return  # the carrier has ended already
