"""The wait for a peer to agree that a link is over.

My line to one peer: everything I can say to it, on whatever carriers connect us.

Sending   A small message travels whole, within the credit of its flow. Of any other only the envelope travels; its
          payload follows when the peer grants it, straight out of the caller's memory, and the send is done when
          the peer says it was delivered. Sends without credit even for an envelope wait in their flow.
Arriving  Frames come in on the driving thread. Each changes state under the node's lock; what must be sent in
          answer goes through the outbox, after the lock was released.
Loss      A carrier that breaks may have swallowed frames: every flow of the link is over, every operation on it
          raises at once, and so does every later one on the same generations. `adopt` gives the link a new carrier,
          on which communicators go on with their next generation.

Closing many links at once, politely: every peer hears of it first, then all are waited for together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from nexar.errors import LinkClosed, NexarError, OperationTimeout, PeerLost, UsageError
from nexar.links.bulk_channel import BulkChannel
from nexar.links.carrier_selection import stays
from nexar.links.flow_control import admits
from nexar.links.link_state import LinkState, PostedSend
from nexar.links.matching import Matching
from nexar.links.operation import Operation
from nexar.links.progress import Progress
from nexar.links.receiving import Misbehaviour, Receiving
from nexar.links.router import Router
from nexar.links.sending import Sending
from nexar.transport.base import Carrier, CarrierLost
from nexar.transport.registry import TransportFailed, log_unhandled
from nexar.types import AwaitedPeer, NodeId, Rank, describe_peer, format_node
from nexar.wire.control import Message, MessageError, Unknown
from nexar.wire.control import decode as decode_message
from nexar.wire.control import encode as encode_message
from nexar.wire.frame import VERSION, Frame, FrameError, FrameKind, Lane, pack_header


class Closing(Operation):
    """Done when the peer has taken everything and finished too, or is gone."""

    __slots__ = ("_peer",)

    def __init__(self, lock: threading.Lock, peer: AwaitedPeer) -> None:
        super().__init__(lock)
        self._peer = peer

    @property
    def name(self) -> str:
        """As errors call it."""
        return "closing the link"

    def awaited(self) -> AwaitedPeer:
        """The peer."""
        return self._peer

    def cancel(self) -> None:
        """Nothing is borrowed."""


_MESSAGES: Final = frozenset((int(FrameKind.EAGER), int(FrameKind.ENVELOPE)))


class Link:
    """One peer.

    Close it politely with `close`, at once with `abort`; both end every operation on it. A `Sink` of its carriers.
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
        """`on_control` and `on_lost` run on the driving thread, without the lock, and must not block."""
        self._state = LinkState(router, peer, rank, address)
        self._lock = router.lock
        self._deferred_io = router.deferred_io
        self._answers = router.deferred_io.calls  # looked at before flushing: a small message asks for none
        self._progress = router.progress
        self._sending = Sending(self._state)
        self._arriving = Receiving(self._state, self._misbehaved)
        self.sidecar: Final = BulkChannel(self._state, self._arriving)
        """For large payloads, where there is one."""
        self.post_send: Final = self._sending.post
        """Send contiguous bytes. A small message is copied and done; a large one is borrowed until the operation is
        done.

        Never blocks. Raises why the link or the communicator cannot be used.
        """
        self.pass_on: Final = self._state.pass_on
        self.make_room: Final = self._state.make_room
        self._on_control = on_control
        self._on_lost = on_lost
        self._closing: Closing | None = None  # under the lock
        self._handlers: Final[dict[int, Callable[[Frame, memoryview], None]]] = {
            FrameKind.GRANT: lambda frame, _: self._sending.granted(frame),
            FrameKind.DELIVERED: lambda frame, _: self._sending.delivered(frame),
            FrameKind.REFUSE: lambda frame, body: self._sending.refused(frame, bytes(body).decode(errors="replace")),
            FrameKind.CREDIT: self._credited,
            FrameKind.WITHDRAW: lambda frame, _: self._arriving.withdrawn(frame),
            FrameKind.TERMS: lambda frame, _: self._sending.allowed(frame),
        }
        self._closed = False  # by this side, for good; under the lock
        self._forget: Final = (self._progress.when_forked(self._forked), router.tell_of_ends(self._generation_ended))

    @property
    def peer(self) -> NodeId:
        """The peer's node id."""
        return self._state.peer

    @property
    def schemes(self) -> tuple[str, ...]:
        """What connects us now."""
        return tuple(self._state.carriers)

    def __repr__(self) -> str:
        state = "open" if self.failure is None else "closed" if self._closed else "lost"
        return f"<Link to node {format_node(self.peer)} over {', '.join(self.schemes) or 'nothing'}, {state}>"

    @property
    def failure(self) -> NexarError | None:
        """Why nothing can be sent now; None while connected."""
        return self._state.failure

    @property
    def wake_peer(self) -> Callable[[], None] | None:
        """Wakes the peer if it sleeps: see Carrier.nudge. None where no memory is shared."""
        carrier = self._state.carriers.get("shm")
        return None if carrier is None else carrier.wake_peer

    def rerank(self, rank: Rank) -> None:
        """The peer has this rank from now on, as far as errors say."""
        self._state.rank = rank

    # -- verbs: any thread -------------------------------------------------------------------------------

    def send_control(self, message: Message) -> bool:
        """Send a control message ahead of all data. False: the lane's budget is used up by a silent peer."""
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
        """Use this carrier from now on: the first, one more of another scheme, or a new one after a loss.

        A second carrier of the same scheme replaces the first, whose frames may be lost: that is a loss too. But of two
        that were dialed from both ends at the same moment, the one of the lower node id stays, here and there. A link
        that was closed takes no carrier any more; one that does not stay is aborted. But while it closes, one more is
        taken and closed politely with the others: to abort it would be a loss to the peer, whose link has it already,
        of all that is still to be read on the others.
        """
        anew = PeerLost(**self._state.facts(), cause="it connected anew, so frames of the old connection may be lost")
        with self._lock:
            old = self._state.carriers.get(carrier.scheme)
            closing = self._is_closing
            refused = self._closed and (old is not None or not closing)
            refused = refused or (old is not None and not self._replaces(carrier, old))
            dropped = self._drop(anew) if old is not None and not refused else []
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
            self._report(anew)

    @property
    def _is_closing(self) -> bool:
        """Under the lock: closed by this side, politely, and the peer has not agreed yet."""
        return self._closing is not None and not self._closing.done

    def _replaces(self, new: Carrier, old: Carrier) -> bool:
        """A dial after a loss that only the peer has noticed yet, or one that won against a simultaneous one?"""
        simultaneous = new.dialed != old.dialed and not old.stats().get("frames_received", 0)
        return not simultaneous or stays(self._state.dialer_of(new), self._state.dialer_of(old))

    def close(self, timeout: float = 5.0) -> None:
        """Let what was sent arrive, tell the peer, wait until it has finished too; at the timeout, or Ctrl-C: abort.

        A large send that is not done yet raises LinkClosed: wait for it before closing. Idempotent.
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
        """The first half of `close`, which never blocks. Wait for what it returns, and abort the link if that does
        not come; None: nothing connects us, or somebody else closes it already.
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
        """End it now; frames that were not taken yet are lost. Every operation raises LinkClosed. Idempotent."""
        with self._lock:
            self._closed = True
            carriers = self._drop(LinkClosed(**self._state.facts()))
        self._unregister()
        self._deferred_io.flush()
        for carrier in carriers:
            carrier.abort(reason)

    def lose(self, cause: str) -> None:
        """The peer is known to have given it up: as if its carriers had broken. Any thread. Idempotent."""
        error = PeerLost(**self._state.facts(), cause=cause)
        with self._lock:
            carriers = self._drop(error)
        self._after_loss(error, cause, carriers, report=bool(carriers))
        self._progress.wake()  # who waits may lead, and sleep

    def _unregister(self) -> None:
        for forget in self._forget:
            forget()

    def stats(self) -> dict[str, float]:
        """Counters of this link and, by scheme, of its carriers."""
        with self._lock:
            sending, arriving = self._sending, self._arriving
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
        """Messages of users, not of collectives or remote calls, that the peer has not taken. Any thread."""
        with self._lock:
            return self._sending.unfinished()

    def heard_bytes(self) -> float:
        """What has come in on the carriers there are now: it grows while the peer, or its system, says anything."""
        return self._counted("bytes_received")

    def sent_bytes(self) -> float:
        """What has gone out on the carriers there are now."""
        return self._counted("bytes_sent")

    def _counted(self, what: str) -> float:
        with self._lock:
            carriers = list(self._state.carriers.values())
        return sum(carrier.stats().get(what, 0.0) for carrier in carriers)

    # -- Sink: the driving thread ------------------------------------------------------------------------

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        """See Sink."""
        kind = frame.kind
        try:
            if kind in _MESSAGES:
                with self._lock:
                    self._arriving.message(frame, body)
            elif kind == FrameKind.CONTROL:
                self._control(body)
            elif kind == FrameKind.FALLBACK:
                self.sidecar.lost_by_peer(frame.transfer)
            else:
                self._protocol(frame, body)
        except (Misbehaviour, FrameError, MessageError) as fault:
            self._misbehaved(str(fault))
        except TransportFailed:
            raise  # not the fault of this peer
        except MemoryError:  # nor is this, but its message is gone, so the link is over
            self.lose(f"this rank has no memory for a message of {frame.length} bytes from it")
        except Exception as fault:  # noqa: BLE001 - the boundary of what a peer's frame can do here
            self._misbehaved(log_unhandled(describe_peer(self._state.rank, self.peer), fault))
        if self._answers:
            self._deferred_io.flush()

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """See Sink."""
        with self._lock:
            self._arriving.landed(transfer)
        self._deferred_io.flush()

    def carrier_finished(self, carrier: Carrier) -> None:
        """See Sink. The peer leaves. Once it has finished on every carrier, all it ever said is here: finish too, so
        that it knows.
        """
        with self._lock:
            if not self._state.finished_by_peer(carrier):
                return  # what it said on the others may still be on its way
            error = PeerLost(**self._state.facts(), cause="it closed the link")
            sidecar = self._state.drop_sidecar()  # nothing is promised of it any more, on either side
            carriers = self._drop(error)
        if sidecar is not None:
            sidecar.abort("the link is closed")
        if not self._closed:
            self._finish(carriers)
            self._report(error)

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        """See Sink. A carrier that was replaced already says nothing new."""
        explained = self._state.explain(error)
        with self._lock:
            mine = self._state.carriers.get(carrier.scheme) is carrier
            others = self._drop(explained) if mine else []
        self._after_loss(explained, "the link was lost", others, report=mine)

    # -- inside ----------------------------------------------------------------------------------------

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
            raise Misbehaviour("it gave back more credit than it was owed")

    def _control(self, body: memoryview) -> None:
        message = decode_message(body)
        if isinstance(message, Unknown) or self._on_control is None:
            self._state.dropped_frames += 1
        else:
            self._on_control(self, message)

    def _generation_ended(self, matching: Matching, error: NexarError) -> None:
        """See Router.tell_of_ends."""
        self._sending.close(matching.communicator, matching.generation, error)
        self._arriving.close(matching, error)
        flow = self._state.flows.get(matching.communicator)
        if flow is not None and flow.matching is matching:
            del self._state.flows[matching.communicator]

    def _misbehaved(self, what: str) -> None:
        error = self._state.explain(CarrierLost("misbehaved", what))
        with self._lock:
            carriers = self._drop(error)
        self._after_loss(error, f"you broke the protocol: {what}", carriers, report=bool(carriers))

    def _after_loss(self, error: NexarError, word: str, carriers: list[Carrier], *, report: bool) -> None:
        """The I/O of a loss. Aborting may wait for a sink that runs in another thread, so never under the lock."""
        self._deferred_io.flush()
        for carrier in carriers:
            carrier.abort(word)
        if report:
            self._report(error)

    def _drop(self, error: NexarError) -> list[Carrier]:
        """Under the lock, in one step, so that nothing new can come between: everything on the link is over.

        Returns the carriers, to be ended without the lock. They have let go of all memory by then.
        """
        self._end(error)
        carriers = self._state.drop_carriers()
        if self._closing is not None:
            self._closing.finish()
        return carriers

    def _end(self, error: NexarError) -> None:
        """Under the lock: fail what is pending, and what will be tried."""
        if not isinstance(self._state.failure, (LinkClosed, UsageError)):
            self._state.failure = error
        self._sending.fail(error)
        self._arriving.fail(error)
        self._state.flows.clear()

    def _finish(self, carriers: list[Carrier]) -> None:
        for carrier in carriers:
            try:
                carrier.finish()
            except CarrierLost:  # it ended by itself meanwhile; for closing that is as good
                with self._lock:
                    self._state.drop(carrier)
                    if self._closing is not None and not self._state.carriers:
                        self._closing.finish()

    def _report(self, error: NexarError) -> None:
        if self._on_lost is not None:
            self._on_lost(self, error)

    def _forked(self) -> None:
        self._state.failure = UsageError(
            "this link belongs to the parent process; a forked child must make its own node with nexar.init()"
        )
        self._state.drop_carriers()  # they live on in the parent; here even an abort may wait for a thread that is not


_ABORTED = "this side closed the link, and the peer did not answer"


def close_all(progress: Progress, links: Sequence[Link], *, close_timeout: float, longest: float) -> None:
    """Close all of them. Whoever has not agreed is aborted when nothing was heard from any of them for `patience`
    seconds, or after `longest`; at once at Ctrl-C.

    One after the other would leave nothing of the time to those behind a slow one. What was heard, not what was
    sent: this side repeats its own words by itself, also to the dead.
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
        before, heard = heard, _announced(closings)
        if heard == before:
            return
        try:
            progress.wait(list(closings.values()), min(deadline, now + close_timeout))
        except OperationTimeout:
            continue
        except TransportFailed:  # it was told, and nobody drives any more: there is nothing to wait for
            return
        return


def _announced(closings: dict[Link, Closing]) -> float:
    """Grows while anybody says anything. Who has agreed says nothing any more, which is news too."""
    pending = [link for link, closing in closings.items() if not closing.done]
    return len(closings) - len(pending) + sum(link.heard_bytes() for link in pending)
