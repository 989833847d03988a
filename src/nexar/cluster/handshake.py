"""The first words on a connection between two members: which place each holds, and in which membership.

    dialer                                   answerer
    Introduce(rank, epoch) ────────────────→  checks the pin, the rank and the epoch
          ←──────────────────────────────── Introduced(rank, epoch), or Declined
    anything else ─────────────────────────→  now it is a link here too

Law: the answerer makes a link of the connection when it has said Introduced and the dialer says anything more, and
says nothing else itself before that; the dialer makes a link of it when it hears Introduced. Lanes are not ordered
among one another, so this way no frame of a link can come before the link. Who goes on without having been welcomed
broke the protocol: a connection that was declined never becomes a link.

Who the other one is, the handshake of the transport has proven; what it claims here is compared with the membership.

One dial of one member, by the thread that wants the link: connect, introduce ourselves, share memory if possible.

Sidecars of the links of one node: opened in the background by who dialed the link, taken by who was dialed.

A sidecar is dialed like a link and introduces itself like one, so it is held to the same certificate, pin, rank and
epoch; its introduction says that it is one. It is never worth waiting for, and its failure harms nobody.
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

from nexar.cluster.control_threads import CancelToken, DialCancelled
from nexar.cluster.decisions.failure_detector import IF_SLOW
from nexar.cluster.decisions.refusals import brief
from nexar.cluster.membership import Member
from nexar.cluster.node import Node
from nexar.links.carrier_selection import takes_bulk_channel
from nexar.links.link import Link
from nexar.transport.base import Carrier, CarrierLost, ConnectRefused, Expected
from nexar.transport.registry import log_unhandled
from nexar.types import NodeId, describe_peer, format_node
from nexar.wire.control import Declined, Introduce, Introduced, Message, MessageError, Unknown
from nexar.wire.control import decode as decode_message
from nexar.wire.control import encode as encode_message
from nexar.wire.frame import Frame, FrameKind, Lane, control_header

_CONTROL: Final = int(FrameKind.CONTROL)


def send_control(carrier: Carrier, message: Message) -> None:
    """Send a control message on a connection that is no link yet. Raises CarrierLost."""
    body = encode_message(message)
    carrier.send_frame(Lane.CONTROL, 0, control_header(len(body)), body)


def send_declined(carrier: Carrier, reason: str, *, superseded: bool = False, expelled: int = 0) -> None:
    """Say why not, and close politely: the other side reads it, then closes too."""
    try:
        send_control(carrier, Declined(reason=reason, superseded=superseded, expelled=expelled))
        carrier.finish()
    except CarrierLost:
        return  # it is gone already: nobody to tell


class DialingHandshake:
    """The dialer's sink until the answer is here. `answered` gets the answer, or why there is none; once, on the
    driving thread, from inside the sink call: there a link may take the carrier over.
    """

    def __init__(self, carrier: Carrier, introduce: Introduce, answered: OnAnswered) -> None:
        self._answered = answered
        self._done = False  # the driving thread writes
        carrier.attach(self)
        send_control(carrier, introduce)

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        """See Sink."""
        answer = _read(frame, body)
        try:
            if isinstance(answer, (Introduced, Declined)):
                self._tell(carrier, answer)
            else:
                self._tell(carrier, CarrierLost("misbehaved", f"it answered an introduction with {_name(answer)}"))
        except Exception as fault:  # noqa: BLE001 - the boundary of what an answer can do here
            carrier.abort(log_unhandled(_who(carrier), fault))

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """See Sink. None is expected."""

    def carrier_finished(self, carrier: Carrier) -> None:
        """See Sink."""
        self._tell(carrier, CarrierLost("peer", "it closed the connection"))
        try:
            carrier.finish()
        except CarrierLost:
            return  # it ended by itself

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        """See Sink."""
        self._tell(carrier, error)

    def _tell(self, carrier: Carrier, answer: Introduced | Declined | CarrierLost) -> None:
        if not self._done:
            self._done = True
            self._answered(carrier, answer)


class _Stage(Enum):
    """How far an answerer is."""

    NEW = "new"  # nothing was said
    JUDGED = "judged"  # the introduction is here, its answer is not said yet
    WELCOME = "welcome"  # Introduced was said
    OVER = "over"  # declined, handed over or ended


class AnsweringHandshake:
    """The answerer's sink until the connection is a link, or nothing. `introduced` is called with the first word;
    then, at once or later and from any thread, `welcome` or `decline` says the answer. `confirmed` is called when a
    dialer that was welcomed goes on: it must hand the carrier over, and gets the frame for the new sink. If it never
    comes to that, `ended` is called.
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
        """What it has introduced itself as."""
        self._stage = _Stage.NEW  # the driving thread writes; from JUDGED on who answers, once
        carrier.attach(self)

    def welcome(self, answer: Introduced) -> None:
        """The dialer is who the membership says."""
        self._stage = _Stage.WELCOME  # before it is said: what follows may come at once
        try:
            send_control(self.carrier, answer)
        except CarrierLost:
            return  # the sink hears of it

    def decline(self, reason: str, *, superseded: bool = False, expelled: int = 0) -> None:
        """It is not, or its dial is not wanted. The carrier ends when the dialer has closed its side."""
        self._stage = _Stage.OVER
        send_declined(self.carrier, reason, superseded=superseded, expelled=expelled)

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        """See Sink."""
        try:
            self._take(frame, body)
        except Exception as fault:  # noqa: BLE001 - the boundary of what a dialer's frame can do here
            self._end(log_unhandled(_who(carrier), fault))

    def _take(self, frame: Frame, body: memoryview) -> None:
        if self._stage is _Stage.NEW:
            self._read_introduction(frame, body)
        elif self._stage is _Stage.WELCOME:
            self._stage = _Stage.OVER
            self._confirmed(self, frame, body)
        else:
            self._end("you went on without having been welcomed")

    def _read_introduction(self, frame: Frame, body: memoryview) -> None:
        message = _read(frame, body)
        if not isinstance(message, Introduce):
            self._end(f"you said {_name(message)} before introducing yourself")
            return
        self.is_sidecar = message.sidecar
        self._stage = _Stage.JUDGED
        self._introduced(self, message)

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """See Sink. None is expected."""

    def carrier_finished(self, carrier: Carrier) -> None:
        """See Sink. It has read that it was declined, or changed its mind."""
        self._end("you closed the connection before it was a link")

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        """See Sink. Nothing depended on it yet."""
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


def _who(carrier: Carrier) -> str:
    return describe_peer(None, carrier.peer.node, carrier.peer.address)


def _name(message: Message | Unknown | None) -> str:
    return "nonsense" if message is None or isinstance(message, Unknown) else type(message).__name__


_log = logging.getLogger(__name__)


IntroductionCheck: TypeAlias = Callable[[NodeId, Introduced], str | None]
"""What is wrong with what a node says of itself; None: nothing."""


class PeerDialFailed(Exception):
    """It came to nothing. The text is a cause, fit for a PeerLost."""


class NoLongerMember(PeerDialFailed):
    """It says that this node is no member any more."""

    def __init__(self, epoch: int, reason: str) -> None:
        super().__init__(f"it went on without this node in epoch {epoch}: {reason}")
        self.epoch = epoch
        self.reason = reason


class DialSuperseded(Exception):
    """Nothing is wrong: the peer's own dial to us has won, and is about to be a link."""


class PeerDial:
    """`run` it once. The link has its carriers when it returns."""

    def __init__(
        self, node: Node, member: Member, link: Link, introduce: Introduce, why_not_accepted: IntroductionCheck
    ) -> None:
        """`fault_of` says what is wrong with what the member claims."""
        self._node = node
        self._member = member
        self._link = link
        self._introduce = introduce
        self._fault_of = why_not_accepted
        self._lock = threading.Lock()  # over the next two
        self._over = False  # from now on no answer is taken
        self.opened = False
        """The link has a carrier."""
        self.cancel_token = CancelToken()
        """Make it when nobody wants this link any more: the dial ends at once."""
        self._answered = threading.Event()
        self._answer: Introduced | Declined | CarrierLost | None = None  # written by the driving thread, once

    def run(self, deadline: float, connect_by: float | None = None) -> None:
        """Raises DialFailed or Superseded. Whatever it raises: the carrier is the link's (`opened`), or it is gone.

        `connect_by`: until then the connection must be there, if that is before the deadline of the answer.
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
            self._go_on(self._answer, deadline)

    @property
    def sidecar(self) -> str:
        """The scheme of the sidecar that the peer takes; empty: none, or no answer."""
        return self._answer.sidecar if isinstance(self._answer, Introduced) else ""

    @property
    def broke(self) -> bool:
        """It came to nothing although the peer was reached: it has ended the connection."""
        return isinstance(self._answer, CarrierLost)

    def _end(self, carrier: Carrier) -> None:
        with self._lock:
            self._over = True
        if not self.opened:
            # Whoever said no may not close its side: what was said is here, so this side waits for nothing.
            carrier.abort("the introduction came to nothing")

    def _explain(self, answer: Introduced | Declined | CarrierLost | None) -> PeerDialFailed | DialSuperseded:
        if answer is None:
            return PeerDialFailed(self._cancelled() or f"it accepted the connection and did not answer{IF_SLOW}")
        if isinstance(answer, Introduced):
            return PeerDialFailed(self._fault_of(self._member.node, answer) or "it answered too late")
        if isinstance(answer, Declined) and answer.expelled:
            return NoLongerMember(answer.expelled, brief(answer.reason))
        if isinstance(answer, Declined):
            return DialSuperseded() if answer.superseded else PeerDialFailed(f"it declined: {brief(answer.reason)}")
        return PeerDialFailed(f"the connection broke at once: {brief(answer.reason)}")

    def _connect(self, deadline: float) -> Carrier:
        try:
            carrier = self._reach(deadline)
            DialingHandshake(carrier, self._introduce, self._take)
        except (ConnectRefused, CarrierLost) as error:
            raise PeerDialFailed(f"cannot connect: {error.reason}") from error
        except TimeoutError as error:
            raise PeerDialFailed(f"cannot connect: {error}") from error
        except DialCancelled as recalled:
            raise PeerDialFailed(self._cancelled() or str(recalled)) from recalled
        return carrier

    def _cancelled(self) -> str | None:
        """Why nobody wants the link any more; None: somebody does."""
        if self._node.cancel_token.made:
            return str(DialCancelled())
        return "it is no member any more" if self.cancel_token.made else None

    def _reach(self, deadline: float) -> Carrier:
        """Connect. ConnectRefused, TimeoutError, Recalled."""
        expected = Expected(self._member.node, self._member.fingerprint)
        return self._node.dialer.dial(self._node.ways_to(self._member), expected, deadline, self.cancel_token)

    def _adopt(self, carrier: Carrier) -> None:
        """The peer is who it should be."""
        self._link.adopt(carrier)

    def _go_on(self, answer: Introduced, deadline: float) -> None:
        """The link has its carrier."""
        self._share_memory(answer.shared_memory, deadline)

    def _take(self, carrier: Carrier, answer: Introduced | Declined | CarrierLost) -> None:
        """The driving thread, inside the sink: here the link takes over, or nobody does."""
        with self._lock:  # in one step with the end of the dial: a carrier is never both the link's and aborted
            if self._over:
                return
            self._answer = answer
            if isinstance(answer, Introduced) and self._fault_of(self._member.node, answer) is None:
                self._adopt(carrier)
                self.opened = True
        self._answered.set()

    def _share_memory(self, address: str, deadline: float) -> None:
        """One more carrier, the fastest, if it can be had. An offer of a member that is not on this host is not
        followed: it can only lead to a process that is somebody else's.
        """
        if not address or self._member.host != self._node.host:
            return
        try:
            self._link.adopt(self._node.connect_memory(address, self._member.node, deadline))
        except OSError as error:
            node = format_node(self._member.node)
            _log.info("no shared memory with node %s, the network serves instead: %s", node, error)


_LONGEST_DIAL: Final = 10.0


class SidecarDial(PeerDial):
    """One dial of a member to which there is a link. `run` it once."""

    def _reach(self, deadline: float) -> Carrier:
        return self._node.connect_sidecar(self._member, deadline)

    def _adopt(self, carrier: Carrier) -> None:
        self._link.sidecar.adopt(carrier)

    def _go_on(self, answer: Introduced, deadline: float) -> None:
        """There is nothing more to open."""


class SidecarDialer:
    """Any thread."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._complained = False  # a second warning says nothing new; two threads at once may both give one

    @property
    def offered(self) -> str:
        """What the peer of a link is told."""
        return self._node.sidecar or ""

    def open(
        self, member: Member, link: Link, introduce: Introduce, offered: str, why_not_accepted: IntroductionCheck
    ) -> None:
        """The sidecar of a link that we dialed, if both ends want the same one and it is of use there. Never blocks."""
        if self.offered == offered and takes_bulk_channel(self._node.sidecar, link.schemes):
            dial = SidecarDial(self._node, member, link, replace(introduce, sidecar=True), why_not_accepted)
            self._node.dialer.run_in_thread(partial(self._run, dial, link))

    def _run(self, dial: SidecarDial, link: Link) -> None:
        try:
            dial.run(time.monotonic() + _LONGEST_DIAL)
        except (PeerDialFailed, DialSuperseded) as failed:
            if not self._node.cancel_token.made and link.failure is None:  # else nobody has any use for it now
                link.sidecar.could_not_be_opened()
                self._complain(link, failed, dial)

    def _complain(self, link: Link, why: Exception, dial: SidecarDial) -> None:
        """Once as a warning. That the peer ended the connection is hardly worth one: most likely it closes."""
        level = logging.INFO if dial.broke else logging.DEBUG if self._complained else logging.WARNING
        self._complained = self._complained or not dial.broke
        node = format_node(link.peer)
        _log.log(level, "no bulk sidecar to node %s, the mesh connection serves alone: %s", node, why)

    def why_not(self, carrier: Carrier, introduce: Introduce) -> str | None:
        """Why a connection that introduces itself so is not wanted; None if it is."""
        if introduce.sidecar and carrier.scheme != self._node.sidecar:
            return f"this node takes {self._node.sidecar or 'no'} sidecars, not {carrier.scheme}"
        if not introduce.sidecar and carrier.scheme == "tcp":
            return "a connection that is not encrypted carries large payloads and nothing else"
        return None
