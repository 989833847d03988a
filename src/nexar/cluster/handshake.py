"""The introduction on a new connection between two members, and the dials that perform it.

    dialer                                   answerer
    Introduce(rank, epoch) ────────────────→  checks the pin, the rank and the epoch
          ←──────────────────────────────── Introduced(rank, epoch), or Declined
    anything else ─────────────────────────→  now it is a link here too

Invariant: the dialer makes a link when it receives Introduced; the answerer when it has sent Introduced and receives
another frame, sending nothing else before. Lanes are not ordered among one another, so this way no frame of a link
precedes the link. A declined connection never becomes a link.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Final, TypeAlias

from msgspec.structs import replace

from nexar.cluster.control_loop import CancelToken, DialCancelled
from nexar.cluster.decisions.failure_detector import IF_SLOW
from nexar.cluster.decisions.refusals import brief
from nexar.cluster.membership import Member
from nexar.cluster.node import Node
from nexar.links.carrier_selection import takes_bulk_channel
from nexar.links.link import Link
from nexar.transport.base import Carrier, CarrierLost, ConnectRefused, Expected
from nexar.transport.registry import capabilities_of, log_unhandled
from nexar.types import NodeId, describe_peer, format_node
from nexar.wire.control import Declined, Introduce, Introduced, Message, MessageError, Unknown
from nexar.wire.control import decode as decode_message
from nexar.wire.control import encode as encode_message
from nexar.wire.frame import Frame, FrameKind, Lane, control_header

_log = logging.getLogger(__name__)

_CONTROL: Final = int(FrameKind.CONTROL)


def send_control(carrier: Carrier, message: Message) -> None:
    """For a connection that is not a link yet. Raises CarrierLost."""
    body = encode_message(message)
    carrier.send_frame(Lane.CONTROL, 0, control_header(len(body)), body)


def send_declined(carrier: Carrier, reason: str, *, superseded: bool = False, expelled: int = 0) -> None:
    """Send the reason and finish the connection."""
    try:
        send_control(carrier, Declined(reason=reason, superseded=superseded, expelled=expelled))
        carrier.finish()
    except CarrierLost:
        return  # the peer is gone


class DialingHandshake:
    """The dialer's sink until the answer. The driver calls `answered` once, inside the sink call, so that a link may
    take over the carrier.
    """

    def __init__(self, carrier: Carrier, introduce: Introduce, answered: OnAnswered) -> None:
        self._answered = answered
        self._done = False  # written by the driver
        carrier.attach(self)
        send_control(carrier, introduce)

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        answer = _read(frame, body)
        try:
            if isinstance(answer, (Introduced, Declined)):
                self._answer_once(carrier, answer)
            else:
                self._answer_once(
                    carrier, CarrierLost("misbehaved", f"it answered an introduction with {_type_name(answer)}")
                )
        except Exception as fault:  # noqa: BLE001 - an answer must not raise into the transport
            carrier.abort(log_unhandled(_describe(carrier), fault))

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """Not expected."""

    def carrier_finished(self, carrier: Carrier) -> None:
        self._answer_once(carrier, CarrierLost("peer", "it closed the connection"))
        try:
            carrier.finish()
        except CarrierLost:
            return  # already ended

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        self._answer_once(carrier, error)

    def _answer_once(self, carrier: Carrier, answer: Introduced | Declined | CarrierLost) -> None:
        if not self._done:
            self._done = True
            self._answered(carrier, answer)


class _Stage(Enum):
    NEW = "new"  # nothing received
    INTRODUCED = "introduced"  # introduction received, not answered
    WELCOME = "welcome"  # Introduced sent
    OVER = "over"  # declined, handed over or ended


class AnsweringHandshake:
    """The answerer's sink until the connection is a link or ends.

    `introduced` receives the introduction; `welcome` or `decline`, from any thread, answers it once. When a welcomed
    dialer continues, `confirmed` receives the frame and must take over the carrier; otherwise `ended` is called.
    """

    def __init__(
        self,
        carrier: Carrier,
        introduced: OnIntroduced,
        confirmed: OnConfirmed,
        ended: Callable[[AnsweringHandshake], None],
    ) -> None:
        self.carrier: Final = carrier
        self._introduced = introduced
        self._confirmed = confirmed
        self._ended = ended
        self.is_sidecar = False
        self._stage = _Stage.NEW  # written by the driver; from INTRODUCED on by the answering thread, once
        carrier.attach(self)

    def welcome(self, answer: Introduced) -> None:
        self._stage = _Stage.WELCOME  # first, because the next frame may arrive at once
        try:
            send_control(self.carrier, answer)
        except CarrierLost:
            return  # the sink is notified

    def decline(self, reason: str, *, superseded: bool = False, expelled: int = 0) -> None:
        self._stage = _Stage.OVER
        send_declined(self.carrier, reason, superseded=superseded, expelled=expelled)

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        try:
            self._take(frame, body)
        except Exception as fault:  # noqa: BLE001 - a dialer's frame must not raise into the transport
            self._end(log_unhandled(_describe(carrier), fault))

    def _take(self, frame: Frame, body: memoryview) -> None:
        if self._stage is _Stage.NEW:
            self._read_introduction(frame, body)
        elif self._stage is _Stage.WELCOME:
            self._stage = _Stage.OVER
            self._confirmed(self, frame, body)
        else:
            self._end("you sent data before the introduction was accepted")

    def _read_introduction(self, frame: Frame, body: memoryview) -> None:
        message = _read(frame, body)
        if not isinstance(message, Introduce):
            self._end(f"you sent {_type_name(message)} before an introduction")
            return
        self.is_sidecar = message.sidecar
        self._stage = _Stage.INTRODUCED
        self._introduced(self, message)

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """Not expected."""

    def carrier_finished(self, carrier: Carrier) -> None:
        self._end("you closed the connection before it was a link")

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        self._stage = _Stage.OVER
        self._ended(self)

    def _end(self, reason: str) -> None:
        self._stage = _Stage.OVER
        self.carrier.abort(reason)
        self._ended(self)


OnAnswered = Callable[[Carrier, Introduced | Declined | CarrierLost], None]
OnIntroduced = Callable[[AnsweringHandshake, Introduce], None]
OnConfirmed = Callable[[AnsweringHandshake, Frame, memoryview], None]


def _read(frame: Frame, body: memoryview) -> Message | Unknown | None:
    if frame.kind != _CONTROL:
        return None
    try:
        return decode_message(body)
    except MessageError:
        return None


def _describe(carrier: Carrier) -> str:
    return describe_peer(None, carrier.peer.node, carrier.peer.address)


def _type_name(message: Message | Unknown | None) -> str:
    return "nonsense" if message is None or isinstance(message, Unknown) else type(message).__name__


IntroductionCheck: TypeAlias = Callable[[NodeId, Introduced], str | None]
"""Returns the reason to reject an introduction, if any."""


class PeerDialFailed(Exception):
    """Its text is a cause for PeerLost."""


class NoLongerMember(PeerDialFailed):
    """The peer says that this node was removed."""

    def __init__(self, epoch: int, reason: str) -> None:
        super().__init__(f"it went on without this node in epoch {epoch}: {reason}")
        self.epoch = epoch
        self.reason = reason


class DialSuperseded(Exception):
    """The peer's own dial won."""


class PeerDial:
    """Connects, introduces and shares memory. Call `run` once."""

    def __init__(
        self, node: Node, member: Member, link: Link, introduce: Introduce, why_not_accepted: IntroductionCheck
    ) -> None:
        self._node = node
        self._member = member
        self._link = link
        self._introduce = introduce
        self._why_not_accepted = why_not_accepted
        self._lock = threading.Lock()  # guards the next two
        self._over = False  # answers are ignored from now on
        self.opened = False  # the link has a carrier
        self.cancel_token = CancelToken()  # ends the dial when its link is not wanted
        self._answered = threading.Event()
        self._answer: Introduced | Declined | CarrierLost | None = None  # written by the driver, once

    def run(self, deadline: float, connect_by: float | None = None) -> None:
        """Blocks. Raises PeerDialFailed or DialSuperseded. Afterwards the link owns the carrier (`opened`), or it is
        aborted. `connect_by`: an earlier deadline for the connection.
        """
        carrier = self._connect(deadline if connect_by is None else min(connect_by, deadline))
        try:
            with self._node.cancel_token.waking(self._answered.set), self.cancel_token.waking(self._answered.set):
                self._answered.wait(max(0.0, deadline - time.monotonic()))
        finally:
            self._end(carrier)
        if not self.opened:
            raise self._explain(self._answer)
        if isinstance(self._answer, Introduced):
            self._after_open(self._answer, deadline)

    @property
    def sidecar(self) -> str:
        """The peer's bulk channel scheme; may be empty."""
        return self._answer.sidecar if isinstance(self._answer, Introduced) else ""

    @property
    def broken_by_peer(self) -> bool:
        return isinstance(self._answer, CarrierLost)

    def _end(self, carrier: Carrier) -> None:
        with self._lock:
            self._over = True
        if not self.opened:
            # A peer that declined may not close its side. Its answer has arrived, so nothing is lost.
            carrier.abort("the introduction came to nothing")

    def _explain(self, answer: Introduced | Declined | CarrierLost | None) -> PeerDialFailed | DialSuperseded:
        if answer is None:
            return PeerDialFailed(self._cancelled() or f"it accepted the connection and did not answer{IF_SLOW}")
        if isinstance(answer, Introduced):
            return PeerDialFailed(self._why_not_accepted(self._member.node, answer) or "it answered too late")
        if isinstance(answer, Declined) and answer.expelled:
            return NoLongerMember(answer.expelled, brief(answer.reason))
        if isinstance(answer, Declined):
            return DialSuperseded() if answer.superseded else PeerDialFailed(f"it declined: {brief(answer.reason)}")
        return PeerDialFailed(f"the connection broke at once: {brief(answer.reason)}")

    def _connect(self, deadline: float) -> Carrier:
        try:
            carrier = self._connect_carrier(deadline)
            DialingHandshake(carrier, self._introduce, self._take)
        except (ConnectRefused, CarrierLost) as error:
            raise PeerDialFailed(f"cannot connect: {error.reason}") from error
        except TimeoutError as error:
            raise PeerDialFailed(f"cannot connect: {error}") from error
        except DialCancelled as cancelled:
            raise PeerDialFailed(self._cancelled() or str(cancelled)) from cancelled
        return carrier

    def _cancelled(self) -> str | None:
        if self._node.cancel_token.is_cancelled:
            return str(DialCancelled())
        return "it is no longer a member" if self.cancel_token.is_cancelled else None

    def _connect_carrier(self, deadline: float) -> Carrier:
        """Raises ConnectRefused, TimeoutError, DialCancelled."""
        expected = Expected(self._member.node, self._member.fingerprint)
        return self._node.dialer.dial(self._node.dial_addresses(self._member), expected, deadline, self.cancel_token)

    def _adopt(self, carrier: Carrier) -> None:
        self._link.adopt(carrier)

    def _after_open(self, answer: Introduced, deadline: float) -> None:
        self._share_memory(answer.shared_memory, deadline)

    def _take(self, carrier: Carrier, answer: Introduced | Declined | CarrierLost) -> None:
        """Called by the driver, inside the sink call."""
        with self._lock:  # atomic with the end of the dial: a carrier is never both adopted and aborted
            if self._over:
                return
            self._answer = answer
            if isinstance(answer, Introduced) and self._why_not_accepted(self._member.node, answer) is None:
                self._adopt(carrier)
                self.opened = True
        self._answered.set()

    def _share_memory(self, address: str, deadline: float) -> None:
        # An offer from another host could only lead to a process of another user.
        if not address or self._member.host != self._node.host:
            return
        try:
            self._link.adopt(self._node.connect_memory(address, self._member.node, deadline))
        except OSError as error:
            node = format_node(self._member.node)
            _log.info("no shared memory with node %s, using the network: %s", node, error)


_LONGEST_DIAL: Final = 10.0


class SidecarDial(PeerDial):
    """Dials the bulk channel of a link."""

    def _connect_carrier(self, deadline: float) -> Carrier:
        return self._node.connect_sidecar(self._member, deadline)

    def _adopt(self, carrier: Carrier) -> None:
        self._link.sidecar.adopt(carrier)

    def _after_open(self, answer: Introduced, deadline: float) -> None:
        """Nothing more to open."""


class SidecarDialer:
    """Opens bulk channels in the background, on the side that dialed the link. Any thread. Failures are harmless."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._warned = False  # warned once; two threads may both warn

    @property
    def offered(self) -> str:
        return self._node.sidecar or ""

    def open(
        self, member: Member, link: Link, introduce: Introduce, offered: str, why_not_accepted: IntroductionCheck
    ) -> None:
        """Ignored if the ends use different schemes. Never blocks."""
        if self.offered == offered and takes_bulk_channel(self._node.sidecar, link.schemes):
            dial = SidecarDial(self._node, member, link, replace(introduce, sidecar=True), why_not_accepted)
            self._node.dialer.try_in_thread(partial(self._run, dial, link), "a bulk sidecar is not dialed")

    def _run(self, dial: SidecarDial, link: Link) -> None:
        try:
            dial.run(time.monotonic() + _LONGEST_DIAL)
        except (PeerDialFailed, DialSuperseded) as failed:
            if not self._node.cancel_token.is_cancelled and link.failure is None:  # otherwise it is not needed
                link.sidecar.open_failed()
                self._warn(link, failed, dial)

    def _warn(self, link: Link, why: Exception, dial: SidecarDial) -> None:
        # One warning is enough. A peer that ended the connection most likely closes.
        level = logging.INFO if dial.broken_by_peer else logging.DEBUG if self._warned else logging.WARNING
        self._warned = self._warned or not dial.broken_by_peer
        node = format_node(link.peer)
        _log.log(level, "no bulk sidecar to node %s, using the mesh connection only: %s", node, why)

    def why_refused(self, carrier: Carrier, introduce: Introduce) -> str | None:
        if introduce.sidecar and carrier.scheme != self._node.sidecar:
            return f"this node takes {self._node.sidecar or 'no'} sidecars, not {carrier.scheme}"
        if not introduce.sidecar and not capabilities_of(carrier.scheme).encrypts:
            return "a connection that is not encrypted carries large payloads and nothing else"
        return None
