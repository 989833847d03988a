"""A TCP connection beside the mesh carrier of a link, for large payloads and nothing else.

Law: envelopes, grants and all other frames stay on the mesh carrier, so order and agreement never depend on the
sidecar. On the sidecar itself each side says its terms once, when it takes it; who has heard the other's knows that
both have it, and may announce payloads there. Any other frame is dropped: a plain connection is not protected from
what others write into it.

Loss      Nothing is lost with it. Whoever notices tells the peer on the mesh carrier, and each side grants anew, on the
          mesh carrier, what it was receiving here (see Arriving.fall_back); the sender still holds it.
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
    """The sidecar of one link, if it has one. It is the `Sink` of its carrier."""

    def __init__(self, state: LinkState, arriving: Receiving) -> None:
        self._state = state
        self._lock = state.router.lock
        self._deferred_io = state.router.deferred_io
        self._arriving = arriving
        self.failovers = 0  # sidecars lost while the link lived; under the lock
        self.failures = 0  # sidecars that could not be opened; under the lock
        self._name = 0  # how my terms call the one there is, or was; under the lock
        self._their_name = 0  # how the peer's do; 0: it has said none yet; under the lock
        self._past: Counter[str] = Counter()  # counters of those that were lost; under the lock

    # -- any thread ------------------------------------------------------------------------------------

    def adopt(self, carrier: Carrier) -> None:
        """Use this one from now on. Aborted if there is one already. If the link is over, or closes, it is closed
        politely: the peer may not have heard of that yet, and need not take it for a loss.
        """
        state = self._state
        with self._lock:
            over = state.failure is not None
            taken = not over and state.sidecar is None
            if taken:
                state.add_sidecar(carrier)
                self._name, self._their_name = self._name + 1, 0
            name = self._name
        if not taken and not over:
            carrier.abort("the link has a sidecar already")
            return
        carrier.attach(self)
        if over:
            _finish(carrier)
            return
        header = pack_header(
            VERSION, FrameKind.TERMS, Lane.CONTROL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, state.node, state.peer, 0, 0, 0,
            name, state.credit_bytes, 0, 0,
        )  # fmt: skip
        try:
            carrier.send_frame(Lane.CONTROL, 0, header)
        except CarrierLost:
            return  # it reports its end by itself

    def could_not_be_opened(self) -> None:
        """Count it; the link works without."""
        with self._lock:
            self.failures += 1

    def finish(self) -> None:
        """The link closes politely."""
        with self._lock:
            carrier = self._state.sidecar
        if carrier is not None:
            _finish(carrier)

    def stats(self) -> dict[str, float]:
        """Counters, by scheme those of the sidecar that is there and of those that were lost. Under the lock."""
        facts: Counter[str] = Counter(self._past)
        if self._state.sidecar is not None:
            facts.update(_counters(self._state.sidecar))
        return {"sidecar_failovers": self.failovers, "sidecar_failures": self.failures, **facts}

    # -- Sink: the driving thread ------------------------------------------------------------------------

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        """See Sink."""
        with self._lock:
            if frame.kind == FrameKind.TERMS and self._state.sidecar is carrier:
                self._their_name = frame.transfer
                self._state.confirm_sidecar(carrier)
            else:
                self._state.dropped_frames += 1

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """See Sink. What came on one that was given up meanwhile begins anew elsewhere."""
        with self._lock:
            if self._state.sidecar is carrier:
                self._arriving.landed(transfer)
        self._deferred_io.flush()

    def carrier_finished(self, carrier: Carrier) -> None:
        """See Sink. The peer closes the link; if it did not, its payloads would take the mesh carrier."""
        with self._lock:
            self._give_up(carrier)
        self._deferred_io.flush()
        _finish(carrier)

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        """See Sink."""
        self._fall_back(carrier, error.reason)

    def lost_by_peer(self, name: int = 0) -> None:
        """The peer says that it has lost it, which may not show here. The word may come late, when there is a new one;
        without a name it means whichever there is.
        """
        with self._lock:
            carrier = self._state.sidecar if name in (0, self._name) else None
        if carrier is not None:
            reason = "the peer has lost it"
            carrier.abort(reason)  # first: nothing may land any more where it is expected anew
            self._fall_back(carrier, reason)

    # -- inside ----------------------------------------------------------------------------------------

    def _fall_back(self, carrier: Carrier, reason: str) -> None:
        state = self._state
        with self._lock:
            failed_over = self._give_up(carrier)
            if failed_over:
                self.failovers += 1
                state.notice(FrameKind.FALLBACK, 0, 0, transfer=self._their_name)
        self._deferred_io.flush()
        if failed_over:
            peer = describe_peer(state.rank, state.peer)
            _log.warning("lost the bulk sidecar to %s, its payloads take the mesh connection: %s", peer, reason)

    def _give_up(self, carrier: Carrier) -> bool:
        """Under the lock: from now on there is none. False: there was none, or the link is over anyway."""
        state = self._state
        if state.drop_sidecar(carrier) is None:
            return False
        self._past.update(_counters(carrier))
        if state.failure is not None or state.carrier is None:
            return False
        self._arriving.fall_back(number_of(carrier.scheme))
        return True


def _counters(carrier: Carrier) -> dict[str, float]:
    return {f"{carrier.scheme}.{name}": value for name, value in carrier.stats().items()}


def _finish(carrier: Carrier) -> None:
    try:
        carrier.finish()
    except CarrierLost:
        return  # it ended by itself; for closing that is as good
