"""The join line, on the side of the node that joins: the carrier to the seed, and what is said on it.

It stays open as long as the node is part of the cluster, so that the seed knows who is there, and certificates are
renewed over it. Nobody else is ever spoken to here, and nothing but join messages.

Knocks at the seed's door until it is opened, refused for good, or the time is up.

Who comes after the cluster has formed is let in too, where it is elastic, and then waits for its members to take it.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from random import Random
from typing import Final, TypeAlias, TypeVar

from cryptography import x509

from nexar.cluster.decisions.failure_detector import longest_extension
from nexar.cluster.membership import Membership, MembershipError
from nexar.cluster.node import Node
from nexar.cluster.wait_notice import NoticeTimes, Tell, WaitNotice, seconds_left
from nexar.config import agreed_settings
from nexar.errors import (
    FormationTimeout,
    JoinRefused,
    NexarError,
    OperationTimeout,
    SeedUnreachable,
    VersionMismatch,
    list_ranks,
)
from nexar.links.reconnect import pause_before
from nexar.security.authority import make_credentials, read_validity
from nexar.security.certificates import Trust, make_request
from nexar.security.invitation import Invitation
from nexar.security.proof import Role, make_nonce, prove, proves
from nexar.transport.base import Carrier, CarrierLost, ConnectRefused, Expected
from nexar.types import UNKNOWN_NODE, NodeId, Rank
from nexar.wire.frame import Frame, FrameKind, Lane, control_header
from nexar.wire.hello import HandshakeError, Hello, encode_hello
from nexar.wire.join import (
    MAX_JOIN_BYTES,
    Challenge,
    Committed,
    Current,
    FormationFailed,
    FormationProgress,
    FormationQuery,
    JoinMessage,
    JoinRefusedMessage,
    JoinRequest,
    Leave,
    Ready,
    ReserveRanks,
    StatusPageReply,
    WatchStatus,
    Welcome,
    decode_join,
    encode_join,
)

_CONTROL: Final = int(FrameKind.CONTROL)
_MOST_WAITING: Final = 512  # messages that nobody has taken: who listens takes them at once
_Expected = TypeVar("_Expected")
_Received: TypeAlias = JoinMessage | NexarError | ConnectionError


class SeedConnectionLost(ConnectionError):
    """The line to the seed is gone, or what comes over it makes no sense."""


class NotTheSeed(ConnectionError):
    """Who answers at `address`, the seed's, does not know the secret."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(reason)
        self.address = address


class RefusedBySeed(ConnectionError):
    """The seed said no. `reason` is the seed's; `expelled`: the epoch since which this node is no member; 0: it was
    none, or left; `nobody_left`: every member has left or died.
    """

    def __init__(self, reason: str, expelled: int = 0, *, nobody_left: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.expelled = expelled
        self.nobody_left = nobody_left


class JoinConnection:
    """One carrier to the seed. A `Sink`; messages wait until `receive` takes them. Close it, or `leave`."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._received: queue.SimpleQueue[_Received] = queue.SimpleQueue()  # put by the driving thread
        self.epoch = 0
        """Of the membership that the seed told on this line; 0: none yet. Written by who receives."""
        carrier.attach(self)

    @property
    def address(self) -> str:
        """Where the seed was reached."""
        return self._carrier.peer.address

    @property
    def scheme(self) -> str:
        """How."""
        return self._carrier.scheme

    def send(self, message: JoinMessage) -> None:
        """Raises LineLost."""
        self._send(encode_join(message))

    @property
    def unread_bytes(self) -> int:
        """What was sent and not yet taken by the system. LineLost."""
        try:
            return self._carrier.queued_bytes(Lane.CONTROL)
        except CarrierLost as loss:
            raise SeedConnectionLost(f"the line to the seed is gone: {loss.reason}") from loss

    def receive(self, deadline: float) -> JoinMessage:
        """The next message. LineLost, VersionMismatch, RefusedBySeed; TimeoutError at the deadline (inf: none)."""
        try:
            left = max(0.0, deadline - time.monotonic())
            received = self._received.get(timeout=min(left, threading.TIMEOUT_MAX))
        except queue.Empty:
            raise TimeoutError(f"no word from the seed at {self.address}") from None
        if isinstance(received, Exception):
            self._received.put(received)  # it stays the last word
            raise received
        if isinstance(received, JoinRefusedMessage):
            raise RefusedBySeed(received.reason, received.expelled, nobody_left=received.nobody_left)
        return received

    def expect(self, kind: type[_Expected], deadline: float) -> _Expected:
        """The next message, which must be of this kind: as `receive`."""
        message = self.receive(deadline)
        if not isinstance(message, kind):
            raise SeedConnectionLost(f"the seed said {type(message).__name__} where {kind.__name__} was due")
        return message

    def prove_each_other(
        self, invitation: Invitation, node: NodeId, role: Role, capabilities: frozenset[str], deadline: float
    ) -> bytes:
        """Say hello, check the seed's proof, and return ours. Impostor before anything was said that depends on the
        secret; what else goes wrong as `receive`.
        """
        nonce = make_nonce()
        assert role != "seed"
        self._send(encode_hello(Hello(node=node, role=role, capabilities=capabilities, nonce=nonce)))
        challenge = self.expect(Challenge, deadline)
        certificate = self._carrier.peer.certificate or b"\0"  # a carrier without one proves nothing, and cannot match
        if not proves(challenge.proof, invitation.secret, "seed", nonce, challenge.nonce, certificate):
            self.close("you do not know the secret")
            raise NotTheSeed(
                self.address,
                f"whoever answers at {self.address} cannot prove that it knows the secret: the ticket or token belongs "
                "to another cluster, or somebody stands between this node and the seed",
            )
        self._carrier.admit()
        return prove(invitation.secret, role, nonce, challenge.nonce, certificate)

    def leave(self, reason: str = "") -> None:
        """Tell the seed, politely; do not wait for it."""
        try:
            self.send(Leave(reason=reason))
            self._carrier.finish()
        except (SeedConnectionLost, CarrierLost):
            return  # the seed is gone already: nobody to tell

    def interrupt(self) -> None:
        """End a `receive` that waits, with LineLost; also the next one. The line itself stays."""
        self._received.put(SeedConnectionLost("this side stopped listening"))

    def close(self, reason: str) -> None:
        """Now. Idempotent."""
        self._carrier.abort(reason)

    def _send(self, body: bytes) -> None:
        try:
            self._carrier.send_frame(Lane.CONTROL, 0, control_header(len(body)), body)
        except CarrierLost as loss:
            raise SeedConnectionLost(f"the line to the seed is gone: {loss.reason}") from loss

    # -- Sink: the driving thread ------------------------------------------------------------------------

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        """See Sink."""
        if frame.kind != _CONTROL:
            self._end(SeedConnectionLost(f"the seed sent a frame of kind {frame.kind} on the join line"))
            return
        if self._received.qsize() >= _MOST_WAITING:
            self._end(SeedConnectionLost("the seed says more than anybody asked for"))
            return
        try:
            self._received.put(decode_join(body, MAX_JOIN_BYTES))
        except VersionMismatch as mismatch:
            self._end(VersionMismatch(ours=mismatch.ours, theirs=mismatch.theirs, peer=f"the seed at {self.address}"))
        except HandshakeError as error:
            self._end(SeedConnectionLost(f"the seed is not understood: {error}"))

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """See Sink. None is ever expected here."""

    def carrier_finished(self, carrier: Carrier) -> None:
        """See Sink. Finish too, so that the seed need not wait for us."""
        self._received.put(SeedConnectionLost("the seed closed the line"))
        try:
            carrier.finish()
        except CarrierLost:
            return  # it has ended by itself

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        """See Sink."""
        self._received.put(SeedConnectionLost(f"the line to the seed is gone: {error.reason}"))

    def _end(self, error: NexarError | ConnectionError) -> None:
        self._received.put(error)
        self._carrier.abort(str(error))


_log = logging.getLogger(__name__)

GRACE: Final = 5.0
"""Seconds beyond the formation timeout, and beyond what a slow seed adds to it: by then the seed, whose clock began
earlier, has said who is missing."""
_LONGEST_ATTEMPT: Final = 10.0

_Entered = TypeVar("_Entered")
_Answer = TypeVar("_Answer", Welcome, StatusPageReply)
Ask: TypeAlias = Callable[[bytes], "JoinRequest | ReserveRanks"]
"""What to ask for, given the proof that goes with it."""
OnCurrent: TypeAlias = Callable[[Membership], None]
"""Told, by the thread that joins, whom it will join as soon as they take it: at first and again at each change."""


@dataclass(frozen=True, slots=True)
class RankRequest:
    """What a candidate brings along."""

    rank: Rank | None = None
    """That its environment gave it; None: any."""
    launcher: NodeId = UNKNOWN_NODE
    epoch: int = 0
    """Of the membership that it is in already; 0: of none."""
    size: int = 0
    """Of the world, as its environment says; 0: its environment does not say."""
    confirms: bool = False
    """It will tell the seed when it is connected to the other members of the first membership."""


@dataclass(frozen=True, slots=True)
class JoinedCluster:
    """A candidate that is in."""

    line: JoinConnection
    welcome: Welcome
    membership: Membership
    """The first that it is in; if it came `again`, a later one perhaps."""
    again: bool = False
    """It had to knock again, and was a member already."""


def patience(timeout: float) -> float:
    """Seconds beyond the formation timeout that a node waits for the seed's answer."""
    return GRACE + longest_extension(timeout)


class JoinClient:
    """Joins a cluster for one node."""

    def __init__(
        self,
        node: Node,
        invitation: Invitation,
        *,
        timeout: float,
        join_timeout: float = 0.0,
        random: Random | None = None,
        clock: Callable[[], float] = time.time,
        tell: Tell | None = None,
        tells_for_host: bool = True,
    ) -> None:
        """`timeout`: until the cluster has formed; `join_timeout`: until one that has formed takes us, 0: no limit.
        `clock`: seconds since 1970. `tell` shows the user what is waited for. `tells_for_host`: this process also
        tells what all processes of its host wait for, such as a seed that does not answer.
        """
        self._node = node
        self._invitation = invitation
        self._timeout = timeout
        self._join_timeout = join_timeout or math.inf
        self._random = random or Random()
        self._clock = clock
        self._tell = tell
        self._tell_for_host = tell if tells_for_host else None
        self._last_failure = "no answer yet"  # why the attempt before came to nothing
        self.attempts = 0

    def join(self, place: RankRequest, on_current: OnCurrent | None = None) -> JoinedCluster:
        """Become a member. JoinRefused, SeedUnreachable, FormationTimeout, VersionMismatch; all within the timeout,
        and `patience` for the seed's own word if we are in and others are not. Recalled when the node closes meanwhile.

        Where the cluster has formed and takes us later, `on_current` is told whom we will join; OperationTimeout if
        that takes longer than `join_timeout`. A seed that goes away meanwhile is knocked at again.
        """
        deadline = time.monotonic() + self._timeout
        cause: SeedConnectionLost | None = None
        while True:
            line, welcome = self._enter("candidate", lambda proof: self._apply(proof, place), deadline, cause)
            try:
                joined = self._complete(line, welcome, deadline, on_current or _ignore_membership)
                return replace(joined, again=joined.again and cause is not None)
            except SeedConnectionLost as lost:  # the seed may come back: knock again
                _log.info("%s; knocking again", lost)
                cause = lost
                if line.epoch:  # it was in, so its time for coming in begins anew
                    deadline = time.monotonic() + self._timeout

    def rejoin(self, place: RankRequest) -> JoinedCluster:
        """One attempt to be known again to a seed that was gone. As `join`, or why it came to nothing: an OSError.

        LineLost also if the seed takes us for somebody new: others know more, and tell it.
        """
        deadline = time.monotonic() + self._timeout
        ask = partial(self._apply, place=place)
        line, welcome = self._attempt(lambda: self._knock("candidate", ask, deadline))
        return self._complete(line, welcome, deadline, _taken_for_another)

    def enter(self, role: Role, ask: Ask) -> tuple[JoinConnection, Welcome]:
        """Knock until the seed has said welcome, and take the certificate it gives. Errors as for `join`."""
        return self._enter(role, ask, time.monotonic() + self._timeout)

    def enter_again(self, role: Role, ask: Ask) -> JoinConnection:
        """One attempt, at a seed that was gone. Errors as for `rejoin`."""
        deadline = time.monotonic() + self._timeout
        return self._attempt(lambda: self._knock(role, ask, deadline))[0]

    def watch(self) -> tuple[JoinConnection, StatusPageReply]:
        """Knock until the seed shows its board, to whoever knows the secret; nothing else is wanted of it, and no
        certificate given. Errors as for `join`.
        """
        deadline = time.monotonic() + self._timeout
        return self._persist(lambda until: self._attempt(lambda: self._connect_to_observe(until)), deadline)

    def _enter(
        self, role: Role, ask: Ask, deadline: float, cause: Exception | None = None
    ) -> tuple[JoinConnection, Welcome]:
        """`cause`: why it was not enough to have entered before."""
        return self._persist(lambda until: self._attempt(lambda: self._knock(role, ask, until)), deadline, cause)

    def _persist(
        self, attempt: Callable[[float], _Entered], deadline: float, cause: Exception | None = None
    ) -> _Entered:
        with WaitNotice(self._tell_for_host, lambda: self._no_seed(deadline)):
            while self.attempts == 0 or time.monotonic() < deadline:
                self._node.cancel_token.pause(self._pause(deadline))
                try:
                    return attempt(min(deadline, time.monotonic() + _LONGEST_ATTEMPT))
                except TimeoutError as failed:
                    cause = cause or failed  # the last attempt has little time: the one before knew more
                except (ConnectRefused, SeedConnectionLost) as failed:
                    cause = failed
                self._last_failure = _text(cause)
        raise self._unreachable(cause) from cause

    def _note_failure(self, cause: str) -> None:
        self._last_failure = cause

    def _no_seed(self, deadline: float) -> str:
        where = ", ".join(self._invitation.addresses)
        return f"no seed answers at {where}: {self._last_failure}{seconds_left(deadline)}"

    def _attempt(self, knock: Callable[[], _Entered]) -> _Entered:
        """What another attempt would not change is raised as the user reads it; the rest is an OSError."""
        self.attempts += 1
        try:
            return knock()
        except RefusedBySeed as refused:
            address = ", ".join(self._invitation.addresses)
            raise _join_refused(refused, address) from refused
        except NotTheSeed as impostor:
            raise self._not_the_seed(impostor, impostor.address) from impostor
        except ConnectRefused as failed:
            if failed.verification:
                raise self._not_the_seed(failed, failed.address) from failed
            raise

    def _pause(self, deadline: float) -> float:
        return min(pause_before(self.attempts, self._random), max(0.0, deadline - time.monotonic()))

    def _unreachable(self, cause: Exception | None) -> SeedUnreachable:
        return SeedUnreachable(
            addresses=self._invitation.addresses, attempts=self.attempts, cause=_text(cause), timeout=self._timeout
        )

    def _not_the_seed(self, cause: Exception, address: str) -> SeedUnreachable:
        """Somebody answered, at once, and it is not the seed we were invited by."""
        remedy = "take the ticket, or the token and the address, of the seed that runs now"
        return SeedUnreachable(
            addresses=self._invitation.addresses,
            attempts=self.attempts,
            cause=_text(cause),
            remedy=remedy,
            answered=address,
            credential="token" if self._invitation.fingerprint is None else "ticket",
        )

    def _knock(self, role: Role, ask: Ask, deadline: float) -> tuple[JoinConnection, Welcome]:
        line, welcome = self._greet(role, ask, Welcome, deadline)
        try:
            take_certificate(self._node, welcome.cluster, welcome.certificate, welcome.authority)
        except BaseException:
            line.close("giving up")
            raise
        return line, welcome

    def _connect_to_observe(self, deadline: float) -> tuple[JoinConnection, StatusPageReply]:
        return self._greet("onlooker", WatchStatus, StatusPageReply, deadline)

    def _greet(
        self, role: Role, ask: Callable[[bytes], JoinMessage], answer: type[_Answer], deadline: float
    ) -> tuple[JoinConnection, _Answer]:
        """Until the seed has given this answer."""
        invitation, node = self._invitation, self._node
        expected = Expected(UNKNOWN_NODE, invitation.fingerprint, anonymous=True)
        line = JoinConnection(node.dialer.dial(self._addresses(), expected, deadline, failed=self._note_failure))
        try:
            with node.cancel_token.waking(line.interrupt):
                proof = line.prove_each_other(invitation, node.id, role, node.capabilities, deadline)
                line.send(ask(proof))
                return line, line.expect(answer, deadline)
        except BaseException:
            line.close("giving up")
            raise

    def _addresses(self) -> Mapping[str, tuple[str, ...]]:
        """TLS first. The seed must know who has died before it commits, and the system closes the TCP connections of a
        process that is killed, where QUIC falls silent and is missed only half a minute later.
        """
        schemes = sorted(self._node.network_schemes, key=lambda scheme: scheme != "tls")
        return dict.fromkeys(schemes, self._invitation.addresses)

    def _apply(self, proof: bytes, place: RankRequest) -> JoinRequest:
        node = self._node
        return JoinRequest(
            proof=proof,
            request=make_request(node.id, node.key),
            host=node.host,
            addresses=node.addresses(),
            rank=place.rank,
            launcher=place.launcher,
            epoch=place.epoch,
            size=place.size,
            clock=self._clock(),
            settings=agreed_settings(node.config),
            confirms=place.confirms,
        )

    def _complete(
        self, line: JoinConnection, welcome: Welcome, deadline: float, on_current: OnCurrent
    ) -> JoinedCluster:
        try:
            with self._node.cancel_token.waking(line.interrupt):
                with suppress(
                    SeedConnectionLost
                ):  # what the seed said before it closed the line has come, and is heard below
                    line.send(Ready())
                return self._await_membership(line, welcome, deadline + patience(self._timeout), on_current)
        except BaseException:
            line.close("giving up")
            raise

    def _await_membership(
        self, line: JoinConnection, welcome: Welcome, deadline: float, on_current: OnCurrent
    ) -> JoinedCluster:
        """Who is a member already is not told first whom it will join."""
        began, at_once = time.monotonic(), True
        notices = NoticeTimes(began)
        while True:
            message = self._await_word(line, welcome, deadline, notices)
            match message:
                case Committed():
                    return JoinedCluster(line, welcome, _read_membership(line, message), again=at_once)
                case Current():
                    at_once = False
                    on_current(_read_membership(line, message))
                    deadline = began + self._join_timeout
                case FormationFailed():
                    raise formation_error(message)
                case _:
                    raise SeedConnectionLost(f"the seed said {type(message).__name__} where the membership was due")

    def _await_word(self, line: JoinConnection, welcome: Welcome, deadline: float, notices: NoticeTimes) -> JoinMessage:
        """The next message about the membership. Meanwhile the user is told who is missing."""
        while True:
            try:
                message = line.receive(deadline if self._tell is None else min(deadline, notices.next))
            except TimeoutError as late:
                if time.monotonic() >= deadline:
                    raise self._too_late(line, welcome) from late
                self._ask_who_is_missing(line, deadline)
                notices.advance(time.monotonic())
                continue
            except RefusedBySeed as refused:
                raise _join_refused(refused, line.address) from refused
            if not isinstance(message, FormationProgress):
                return message
            if self._tell is not None and message.reports:
                # The seed gives up earlier, unless it runs slowly.
                self._tell(_missing(message) + seconds_left(deadline - patience(self._timeout)))

    def _ask_who_is_missing(self, line: JoinConnection, deadline: float) -> None:
        """Of the seed, while the cluster forms. The members of one that has formed decide by themselves."""
        if not line.epoch:
            line.send(FormationQuery())
        elif self._tell is not None:
            self._tell(f"waiting for a checkpoint of the members, which lets this node in{seconds_left(deadline)}")

    def _too_late(self, line: JoinConnection, welcome: Welcome) -> FormationTimeout | OperationTimeout:
        if not line.epoch:
            return FormationTimeout(
                joined=["this node"],
                expected=welcome.size,
                refused={},
                timeout=self._timeout + patience(self._timeout),
            )
        waiting_for = "a checkpoint of the members, which would let this node in (NEXAR_JOIN_TIMEOUT_SECS)"
        return OperationTimeout(operation="nexar.init()", waiting_for=waiting_for, timeout=self._join_timeout)


def formation_error(failed: FormationFailed) -> FormationTimeout:
    """What `init()` raises when the seed says that the cluster did not form."""
    return FormationTimeout(
        joined=failed.joined,
        expected=failed.expected,
        refused=dict(failed.refused),
        timeout=failed.timeout,
        reason=failed.reason,
    )


def _join_refused(refused: RefusedBySeed, address: str) -> JoinRefused:
    return JoinRefused(
        reason=refused.reason, address=address, expelled=refused.expelled, nobody_left=refused.nobody_left
    )


def _missing(progress: FormationProgress) -> str:
    """Whom a formation waits for, and whom the seed has refused meanwhile."""
    count = progress.expected - progress.joined
    named = f": {list_ranks(progress.missing)}" if progress.missing else ""
    more = ", …" if 0 < len(progress.missing) < count else ""
    refused = "; ".join(f"{who}: {why}" for who, why in progress.refused.items())
    return f"waiting for {count} of {progress.expected} ranks{named}{more}" + (
        f" (refused: {refused})" if refused else ""
    )


def _ignore_membership(_: Membership) -> None:
    """Nobody wants to know whom it will join."""


def _taken_for_another(_: Membership) -> None:
    raise SeedConnectionLost("the seed does not know this node as a member yet")


def _read_membership(line: JoinConnection, message: Committed | Current) -> Membership:
    try:
        membership = Membership.decode(message.membership)
    except MembershipError as error:
        raise SeedConnectionLost(f"the seed sent a membership that is none: {error}") from error
    line.epoch = membership.epoch
    return membership


def take_certificate(node: Node, cluster: str, certificate: bytes, authority: bytes) -> tuple[datetime, datetime]:
    """Let the node show the certificate that the seed gave, and believe its authority (both PEM). Returns from when and
    until when it is valid. LineLost if they are no such thing.
    """
    try:
        loaded = x509.load_pem_x509_certificate(certificate)
        node.certify(make_credentials(node.id, cluster, node.key, loaded), Trust(authority))
        return read_validity(certificate)
    except ValueError as error:
        raise SeedConnectionLost(f"the certificate that the seed gave cannot be used: {error}") from error


def _text(cause: Exception | None) -> str:
    return str(getattr(cause, "reason", None) or cause or "no time was left")
