"""Link: all communication with one peer. Also closes many links together.

Small messages are sent whole, within their flow's credit. For others only the envelope is sent; the payload follows the
peer's grant, directly from the caller's memory, and the send completes on delivery. Frames are received on the driver
thread, under the node's lock; answers go through the deferred I/O queue.

A broken carrier may have lost frames, so all flows end, and operations on the same generations raise. `adopt` connects
the link again for later generations.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from nexar.errors import LinkClosed, NexarError, OperationTimeout, PeerLost, UsageError
from nexar.links.bulk_channel import BulkChannel
from nexar.links.carrier_selection import wins_simultaneous_dial
from nexar.links.flow_control import admits
from nexar.links.link_state import LinkState, PostedSend
from nexar.links.matching import Matching
from nexar.links.operation import Operation
from nexar.links.progress import OF_THE_PARENT, Progress
from nexar.links.receiving import Misbehaviour, Receiving
from nexar.links.router import Router
from nexar.links.sending import Sending
from nexar.transport.base import Carrier, CarrierLost
from nexar.transport.registry import TransportFailed, capabilities_of, log_unhandled
from nexar.types import AwaitedPeer, NodeId, Rank, describe_peer, format_node
from nexar.wire.control import Message, MessageError, Unknown
from nexar.wire.control import decode as decode_message
from nexar.wire.control import encode as encode_message
from nexar.wire.frame import VERSION, Frame, FrameError, FrameKind, Lane, pack_header


class Closing(Operation):
    """Completes when the peer has received everything and finished too, or is gone."""

    __slots__ = ("_peer",)

    def __init__(self, lock: threading.Lock, peer: AwaitedPeer) -> None:
        super().__init__(lock)
        self._peer = peer

    @property
    def name(self) -> str:
        return "closing the link"

    def awaited(self) -> AwaitedPeer:
        return self._peer

    def cancel(self) -> None: ...


_MESSAGES: Final = frozenset((int(FrameKind.EAGER), int(FrameKind.ENVELOPE)))


class Link:
    """The connection to one peer, and the `Sink` of its carriers.

    `close` lets sent data arrive, `abort` does not; both end every operation.
    """

    def __init__(
        self,
        router: Router,
        peer: NodeId,
        *,
        rank: Rank | None = None,
        address: str | None = None,
        on_control: Callable[[Link, Message], None] | None = None,
        on_lost: Callable[[Link, NexarError], None] | None = None,
    ) -> None:
        """Both run without the lock and must not block: `on_control` on the driver thread, `on_lost` on any thread that
        loses the link.
        """
        self._state = LinkState(router, peer, rank, address)
        self._lock = router.lock
        self._deferred_io = router.deferred_io
        self._answers = router.deferred_io.calls  # checked before flushing: a small message adds none
        self._progress = router.progress
        self._sending = Sending(self._state)
        self._receiving = Receiving(self._state, self._misbehaved)
        self.sidecar: Final = BulkChannel(self._state, self._receiving)
        # Never blocks. A small message is copied, a large one borrowed until done. Raises why the link cannot be used.
        self.post_send: Final = self._sending.post
        self.send_relayed: Final = self._state.send_relayed
        self.return_relay_credit: Final = self._state.return_relay_credit
        self._on_control = on_control
        self._on_lost = on_lost
        self._closing: Closing | None = None  # under the lock
        self._handlers: Final[dict[int, Callable[[Frame, memoryview], None]]] = {
            FrameKind.GRANT: lambda frame, _: self._sending.granted(frame),
            FrameKind.DELIVERED: lambda frame, _: self._sending.delivered(frame),
            FrameKind.REFUSE: lambda frame, body: self._sending.refused(frame, bytes(body).decode(errors="replace")),
            FrameKind.CREDIT: self._credited,
            FrameKind.WITHDRAW: lambda frame, _: self._receiving.withdrawn(frame),
            FrameKind.TERMS: lambda frame, _: self._sending.allowed(frame),
        }
        self._closed = False  # by this side, permanently; under the lock
        self.process_ended = False  # the peer's, as the kernel says; written by the driver
        self._forget: Final = (
            self._progress.when_forked(self._forked),
            router.on_generation_end(self._generation_ended),
        )

    @property
    def peer(self) -> NodeId:
        return self._state.peer

    @property
    def schemes(self) -> tuple[str, ...]:
        return tuple(self._state.carriers)

    def __repr__(self) -> str:
        state = "open" if self.failure is None else "closed" if self._closed else "lost"
        return f"<Link to node {format_node(self.peer)} over {', '.join(self.schemes) or 'nothing'}, {state}>"

    @property
    def failure(self) -> NexarError | None:
        """Why nothing can be sent; None while connected."""
        return self._state.failure

    @property
    def wake_peer(self) -> Callable[[], None] | None:
        """None without shared memory."""
        carriers = tuple(self._state.carriers.values())  # another thread may change the dict
        return next((each.wake_peer for each in carriers if capabilities_of(each.scheme).shares_memory), None)

    def set_rank(self, rank: Rank) -> None:
        self._state.rank = rank

    # -- operations: any thread --------------------------------------------------------------------------

    def send_control(self, message: Message) -> bool:
        """Send ahead of all data. Return False if the lane's budget is exhausted because the peer does not read."""
        body = encode_message(message)
        with self._lock:
            carrier = self._state.connected()
        state = self._state
        header = pack_header(
            VERSION, FrameKind.CONTROL, Lane.CONTROL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, state.node, state.peer, 0, 0, 0,
            0, len(body), 0, len(body),
        )  # fmt: skip
        try:
            if not admits(Lane.CONTROL, carrier.queued_bytes(Lane.CONTROL), len(body)):
                return False
            carrier.send_frame(Lane.CONTROL, 0, header, body)
        except CarrierLost as loss:
            raise state.explain(loss) from loss
        return True

    def adopt(self, carrier: Carrier) -> None:
        """Use this carrier: the first, one of another scheme, or a new one after a loss.

        A second carrier of the same scheme replaces the first. That is a loss too, because frames may be lost. Of two
        simultaneous dials, both ends keep the one from the lower node id. A carrier that loses, or comes after closing,
        is aborted. While closing, a further carrier is finished: an abort would lose everything that the peer has not
        read.
        """
        replaced = PeerLost(
            **self._state.facts(), cause="it connected anew, so frames of the old connection may be lost"
        )
        with self._lock:
            old = self._state.carriers.get(carrier.scheme)
            closing = self._is_closing
            refused = self._closed and (old is not None or not closing)
            refused = refused or (old is not None and not self._replaces(carrier, old))
            dropped = self._drop(replaced) if old is not None and not refused else []
            if not refused:
                self._state.failure = self._state.failure if closing else None
                self._state.add(carrier)
        for lost in dropped:
            lost.abort("the link has a new connection")
        if refused:
            carrier.abort("the link is closed" if self._closed else "the link has a connection already")
            return
        carrier.attach(self)
        if closing:
            self._finish([carrier])
            return
        with self._lock:
            self._state.notice(FrameKind.TERMS, 0, 0, length=self._state.credit_bytes)
        self._deferred_io.flush()
        if dropped:
            self._report(replaced)

    @property
    def _is_closing(self) -> bool:
        """Whether this side closed and the peer has not finished yet. Under the lock."""
        return self._closing is not None and not self._closing.done

    def _replaces(self, new: Carrier, old: Carrier) -> bool:
        """Whether `new` follows a loss that only the peer noticed, or wins against a simultaneous dial."""
        simultaneous = new.dialed != old.dialed and not old.stats().get("frames_received", 0)
        return not simultaneous or wins_simultaneous_dial(self._state.dialer_of(new), self._state.dialer_of(old))

    def close(self, timeout: float = 5.0) -> None:
        """Let sent data arrive and wait until the peer finishes too. Abort at the timeout or on Ctrl-C. Idempotent.

        Unfinished large sends raise LinkClosed.
        """
        closing = self.begin_close()
        if closing is None:
            return
        try:
            self._progress.wait([closing], time.monotonic() + timeout)
        except BaseException as reason:
            self.abort(str(reason))
            if not isinstance(reason, OperationTimeout):
                raise

    def begin_close(self) -> Closing | None:
        """Start closing; never block. The caller waits for the result, and aborts if it does not complete. Return None
        if nothing is connected, or another thread closes.
        """
        with self._lock:
            self._closed = True
            carriers = list(self._state.carriers.values()) if self._closing is None else []
            closing = Closing(self._lock, self._state.awaited("its half of the closing")) if carriers else None
            self._end(LinkClosed(**self._state.facts()))
            self._closing = closing or self._closing
        self._unregister()
        self._deferred_io.flush()
        self._finish(carriers)
        self.sidecar.finish()
        return closing

    def abort(self, reason: str) -> None:
        """End now. Unread frames are lost, and operations raise LinkClosed. Idempotent."""
        with self._lock:
            self._closed = True
            carriers = self._drop(LinkClosed(**self._state.facts()))
        self._unregister()
        self._deferred_io.flush()
        for carrier in carriers:
            carrier.abort(reason)

    def lose(self, cause: str) -> None:
        """Treat the link as lost. Any thread. Idempotent."""
        error = PeerLost(**self._state.facts(), cause=cause)
        with self._lock:
            carriers = self._drop(error)
        self._after_loss(error, cause, carriers, report=bool(carriers))
        self._progress.wake()  # the waiting thread may be the driver, and asleep

    def _unregister(self) -> None:
        for forget in self._forget:
            forget()

    def stats(self) -> dict[str, float]:
        with self._lock:
            sending, arriving = self._sending, self._receiving
            facts: dict[str, float] = {
                "messages_sent": sending.messages,
                "bytes_sent": sending.bytes,
                "envelopes_sent": sending.envelopes,
                "sends_stalled": sending.stalls,
                "messages_received": arriving.messages,
                "bytes_received": arriving.bytes,
                "payloads_received": arriving.payloads,
                "frames_dropped": self._state.dropped_frames,
                **self.sidecar.stats(),
            }
            carriers = dict(self._state.carriers)
        for scheme, carrier in carriers.items():
            facts.update({f"{scheme}.{name}": value for name, value in carrier.stats().items()})
        return facts

    def unfinished_sends(self) -> list[PostedSend]:
        """Return user messages that the peer has not received."""
        with self._lock:
            return self._sending.unfinished()

    def heard_bytes(self) -> float:
        """Grows while the peer or its system sends anything."""
        return self._counted("bytes_received")

    def sent_bytes(self) -> float:
        return self._counted("bytes_sent")

    def _counted(self, what: str) -> float:
        with self._lock:
            carriers = list(self._state.carriers.values())
        return sum(carrier.stats().get(what, 0.0) for carrier in carriers)

    # -- Sink: the driver thread -------------------------------------------------------------------------

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        kind = frame.kind
        try:
            if kind in _MESSAGES:
                with self._lock:
                    self._receiving.message(frame, body)
            elif kind == FrameKind.CONTROL:
                self._control(body)
            elif kind == FrameKind.FALLBACK:
                self.sidecar.lost_by_peer(frame.transfer)
            else:
                self._protocol(frame, body)
        except (Misbehaviour, FrameError, MessageError) as fault:
            self._misbehaved(str(fault), carrier)
        except TransportFailed:
            raise  # not caused by this peer
        except MemoryError:  # nor is this, but its message is lost, so the link is over
            self.lose(f"this rank has no memory for a message of {frame.length} bytes from it")
        except Exception as fault:  # noqa: BLE001 - a peer's frame must not break more than its link
            self._misbehaved(log_unhandled(describe_peer(self._state.rank, self.peer), fault), carrier)
        if self._answers:
            self._deferred_io.flush()

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        with self._lock:
            self._receiving.payload_complete(transfer)
        self._deferred_io.flush()

    def carrier_finished(self, carrier: Carrier) -> None:
        """Finish too once the peer has finished every carrier: then all its frames have arrived."""
        with self._lock:
            if not self._state.finished_by_peer(carrier):
                return  # frames on the other carriers may still arrive
            error = PeerLost(**self._state.facts(), cause="it closed the link")
            sidecar = self._state.drop_sidecar()  # neither side relies on it now
            carriers = self._drop(error)
        if sidecar is not None:
            sidecar.abort("the link is closed")
        if not self._closed:
            self._finish(carriers)
            self._report(error)

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        """Ignore a replaced carrier."""
        explained = self._state.explain(error)
        with self._lock:
            mine = self._state.carriers.get(carrier.scheme) is carrier
            self.process_ended = self.process_ended or (mine and error.kind == "ended")
            others = self._drop(explained) if mine else []
        self._after_loss(explained, "the link was lost", others, report=mine)

    # -- internal --------------------------------------------------------------------------------------

    def _protocol(self, frame: Frame, body: memoryview) -> None:
        handler = self._handlers.get(frame.kind)
        if handler is None and self._state.router.relay(self, frame, body):
            return
        with self._lock:
            if handler is not None:
                handler(frame, body)
            else:
                self._state.dropped_frames += 1

    def _credited(self, frame: Frame, _: memoryview) -> None:
        if not self._sending.credited(frame):
            raise Misbehaviour("it returned more credit than it received")

    def _control(self, body: memoryview) -> None:
        message = decode_message(body)
        if isinstance(message, Unknown) or self._on_control is None:
            self._state.dropped_frames += 1
        else:
            self._on_control(self, message)

    def _generation_ended(self, matching: Matching, error: NexarError) -> None:
        self._sending.close(matching.communicator, matching.generation, error)
        self._receiving.close(matching, error)
        flow = self._state.flows.get(matching.communicator)
        if flow is not None and flow.matching is matching:
            del self._state.flows[matching.communicator]

    def _misbehaved(self, what: str, carrier: Carrier | None = None) -> None:
        """Ignore a carrier that is lost or replaced: frames of it that are read later say nothing about a new link."""
        error = self._state.explain(CarrierLost("misbehaved", what))
        with self._lock:
            current = self._state.carriers.values()
            carriers = self._drop(error) if current and (carrier is None or carrier in current) else []
        self._after_loss(error, f"you broke the protocol: {what}", carriers, report=bool(carriers))

    def _after_loss(self, error: NexarError, reason: str, carriers: list[Carrier], *, report: bool) -> None:
        """Without the lock: aborting may wait for a sink on another thread."""
        self._deferred_io.flush()
        for carrier in carriers:
            carrier.abort(reason)
        if report:
            self._report(error)

    def _drop(self, error: NexarError) -> list[Carrier]:
        """End everything in one step. Under the lock. The caller releases it, then ends the returned carriers."""
        self._end(error)
        carriers = self._state.drop_carriers()
        if self._closing is not None:
            self._closing.finish()
        return carriers

    def _end(self, error: NexarError) -> None:
        if not isinstance(self._state.failure, (LinkClosed, UsageError)):
            self._state.failure = error
        self._sending.fail(error)
        self._receiving.fail(error)
        self._state.flows.clear()

    def _finish(self, carriers: list[Carrier]) -> None:
        for carrier in carriers:
            try:
                carrier.finish()
            except CarrierLost:  # it has ended already
                with self._lock:
                    self._state.drop(carrier)
                    if self._closing is not None and not self._state.carriers:
                        self._closing.finish()

    def _report(self, error: NexarError) -> None:
        if self._on_lost is not None:
            self._on_lost(self, error)

    def _forked(self) -> None:
        self._state.failure = UsageError(f"this link {OF_THE_PARENT}")
        # they stay open in the parent; here even an abort may wait for a thread that does not exist
        self._state.drop_carriers()


_ABORTED = "this side closed the link, and the peer did not answer"


def close_all(progress: Progress, links: Sequence[Link], *, close_timeout: float, longest: float) -> None:
    """Close all links together: in sequence, a slow peer would use up the others' time. Abort unfinished links when no
    peer sent anything for `close_timeout` seconds, after `longest` seconds, or on Ctrl-C.
    """
    closings = {link: closing for link in links if (closing := link.begin_close()) is not None}
    try:
        _await(progress, closings, close_timeout, time.monotonic() + longest)
    finally:
        for link, closing in closings.items():
            if not closing.done:
                link.abort(_ABORTED)


def _await(progress: Progress, closings: dict[Link, Closing], close_timeout: float, deadline: float) -> None:
    heard = -1.0
    while (now := time.monotonic()) < deadline:
        before, heard = heard, _activity(closings)
        if heard == before:
            return
        try:
            progress.wait(list(closings.values()), min(deadline, now + close_timeout))
        except OperationTimeout:
            continue
        except TransportFailed:  # reported already; no thread drives, so waiting is pointless
            return
        return


def _activity(closings: dict[Link, Closing]) -> float:
    pending = [link for link, closing in closings.items() if not closing.done]
    return len(closings) - len(pending) + sum(link.heard_bytes() for link in pending)
