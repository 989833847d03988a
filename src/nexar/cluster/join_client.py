"""Joining: the connection to the seed, and the client that retries until it is admitted or refused.

The connection stays open while the node is in the cluster, as a sign of life.
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
from nexar.cluster.membership import Membership, MembershipError, decode_membership
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
from nexar.security.authority import make_credentials, read_validity
from nexar.security.certificates import Trust, make_request
from nexar.security.invitation import Invitation
from nexar.security.proof import Role, make_nonce, prove, proves
from nexar.transport.base import Carrier, CarrierLost, ConnectRefused, Expected
from nexar.transport.registry import capabilities_of
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

_log = logging.getLogger(__name__)

_CONTROL: Final = int(FrameKind.CONTROL)
_MAX_UNREAD: Final = 512  # unread messages; a reader takes them at once
_Expected = TypeVar("_Expected")
_Received: TypeAlias = JoinMessage | NexarError | ConnectionError


class SeedConnectionLost(ConnectionError):
    """The connection is lost or carries invalid data."""


class NotTheSeed(ConnectionError):
    """The process at the seed's address does not know the secret."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(reason)
        self.address = address


class RefusedBySeed(ConnectionError):
    """`expelled`: the epoch that removed this node, 0 if none."""

    def __init__(self, reason: str, expelled: int = 0, code: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.expelled = expelled
        self.code = code


class JoinConnection:
    """The `Sink` of a connection to the seed. Close it, or `leave`."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._received: queue.SimpleQueue[_Received] = queue.SimpleQueue()  # filled by the driver
        self.epoch = 0  # of the membership received on this connection; 0 before; written by the receiver
        carrier.attach(self)

    @property
    def address(self) -> str:
        return self._carrier.peer.address

    def send(self, message: JoinMessage) -> None:
        """Raises SeedConnectionLost."""
        self._send(encode_join(message))

    @property
    def unread_bytes(self) -> int:
        """Raises SeedConnectionLost."""
        try:
            return self._carrier.queued_bytes(Lane.CONTROL)
        except CarrierLost as loss:
            raise SeedConnectionLost(f"connection to the seed lost: {loss.reason}") from loss

    def receive(self, deadline: float) -> JoinMessage:
        """Raises SeedConnectionLost, VersionMismatch, RefusedBySeed; TimeoutError at the deadline."""
        try:
            left = max(0.0, deadline - time.monotonic())
            received = self._received.get(timeout=min(left, threading.TIMEOUT_MAX))
        except queue.Empty:
            raise TimeoutError(f"no answer from the seed at {self.address}") from None
        if isinstance(received, Exception):
            self._received.put(received)  # later calls raise it too
            raise received
        if isinstance(received, JoinRefusedMessage):
            raise RefusedBySeed(received.reason, received.expelled, _code(received))
        return received

    def expect(self, kind: type[_Expected], deadline: float) -> _Expected:
        """Errors as `receive`."""
        message = self.receive(deadline)
        if not isinstance(message, kind):
            raise SeedConnectionLost(f"the seed sent {type(message).__name__} instead of {kind.__name__}")
        return message

    def prove_each_other(
        self, invitation: Invitation, node: NodeId, role: Role, capabilities: frozenset[str], deadline: float
    ) -> bytes:
        """Send the hello, check the seed's proof, return ours. Raises NotTheSeed before anything that depends on the
        secret is sent; else as `receive`.
        """
        nonce = make_nonce()
        assert role != "seed"
        self._send(encode_hello(Hello(node=node, role=role, capabilities=capabilities, nonce=nonce)))
        challenge = self.expect(Challenge, deadline)
        certificate = self._carrier.peer.certificate or b"\0"  # without a certificate no proof can match
        if not proves(challenge.proof, invitation.secret, "seed", nonce, challenge.nonce, certificate):
            self.close("you do not know the secret")
            raise NotTheSeed(
                self.address,
                f"the process at {self.address} cannot prove that it knows the secret: the ticket or token belongs "
                "to another cluster, or the connection is intercepted",
            )
        self._carrier.admit()
        return prove(invitation.secret, role, nonce, challenge.nonce, certificate)

    def leave(self, reason: str = "") -> None:
        """Does not wait."""
        try:
            self.send(Leave(reason=reason))
            self._carrier.finish()
        except (SeedConnectionLost, CarrierLost):
            return  # the seed is gone

    def interrupt(self) -> None:
        """End the current or next `receive` with SeedConnectionLost."""
        self._received.put(SeedConnectionLost("this side stopped listening"))

    def close(self, reason: str) -> None:
        """Idempotent."""
        self._carrier.abort(reason)

    def _send(self, body: bytes) -> None:
        try:
            self._carrier.send_frame(Lane.CONTROL, 0, control_header(len(body)), body)
        except CarrierLost as loss:
            raise SeedConnectionLost(f"connection to the seed lost: {loss.reason}") from loss

    # -- Sink: called by the driver ----------------------------------------------------------------------

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        if frame.kind != _CONTROL:
            self._end(SeedConnectionLost(f"the seed sent a frame of kind {frame.kind} on the join connection"))
            return
        if self._received.qsize() >= _MAX_UNREAD:
            self._end(SeedConnectionLost("the seed sent too many messages"))
            return
        try:
            self._received.put(decode_join(body, MAX_JOIN_BYTES))
        except VersionMismatch as mismatch:
            self._end(VersionMismatch(ours=mismatch.ours, theirs=mismatch.theirs, peer=f"the seed at {self.address}"))
        except HandshakeError as error:
            self._end(SeedConnectionLost(f"invalid message from the seed: {error}"))

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """Not expected."""

    def carrier_finished(self, carrier: Carrier) -> None:
        # Finish too, so that the seed does not wait.
        self._received.put(SeedConnectionLost("the seed closed the connection"))
        try:
            carrier.finish()
        except CarrierLost:
            return  # already ended

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        self._received.put(SeedConnectionLost(f"connection to the seed lost: {error.reason}"))

    def _end(self, error: NexarError | ConnectionError) -> None:
        self._received.put(error)
        self._carrier.abort(str(error))


GRACE: Final = 5.0
"""Seconds beyond the formation timeout and a slow seed's extension: by then the seed, whose clock started earlier, has
reported the missing ranks.
"""
_LONGEST_ATTEMPT: Final = 10.0
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 2.0
_DOUBLINGS: Final = 16  # far beyond the longest pause, and far below the largest float

_Result = TypeVar("_Result")
_Answer = TypeVar("_Answer", Welcome, StatusPageReply)


def pause_before(attempt: int, random: Random) -> float:
    """Seconds before attempt 0, 1, 2, …: none, then up to a bound that doubles."""
    if attempt == 0:
        return 0.0
    bound = FIRST_PAUSE * 2.0 ** min(attempt - 1, _DOUBLINGS)
    return random.uniform(0.0, min(bound, LONGEST_PAUSE))


Ask: TypeAlias = Callable[[bytes], "JoinRequest | ReserveRanks"]
"""Makes the request from the proof."""
OnCurrent: TypeAlias = Callable[[Membership], None]
"""Receives the membership to join, and its changes, in the joining thread."""


@dataclass(frozen=True, slots=True)
class RankRequest:
    """A joiner's request."""

    rank: Rank | None = None  # from its environment; None for any
    launcher: NodeId = UNKNOWN_NODE
    epoch: int = 0  # of its current membership; 0 if none
    size: int = 0  # of the world, from its environment; 0 if unknown
    confirms: bool = False  # it will report when it is connected to the first membership


@dataclass(frozen=True, slots=True)
class JoinedCluster:
    """A node that joined."""

    connection: JoinConnection
    welcome: Welcome
    membership: Membership  # the first one it is in; a later one if `again`
    again: bool = False  # it had to reconnect and was a member already


def answer_margin(timeout: float) -> float:
    """Seconds beyond the formation timeout for the seed's answer."""
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
        """`timeout` limits the formation, `join_timeout` the wait for a formed cluster (0: no limit). `clock`: seconds
        since 1970. `tell` shows waits to the user; `tells_for_host`: also those shared by this host's processes.
        """
        self._node = node
        self._invitation = invitation
        self._timeout = timeout
        self._join_timeout = join_timeout or math.inf
        self._random = random or Random()
        self._clock = clock
        self._tell = tell
        self._tell_for_host = tell if tells_for_host else None
        self._last_failure = "no answer yet"  # of the last attempt; written by the joining and the dialing threads
        self.attempts = 0  # written by the joining thread

    def join(self, request: RankRequest, on_current: OnCurrent | None = None) -> JoinedCluster:
        """Become a member; retries while the seed is away. Raises JoinRefused, SeedUnreachable, FormationTimeout or
        VersionMismatch within the timeout (plus `answer_margin` once admitted); DialCancelled. In a formed cluster,
        `on_current` receives the membership to join; OperationTimeout after `join_timeout`.
        """
        deadline = time.monotonic() + self._timeout
        cause: SeedConnectionLost | None = None
        while True:
            connection, welcome = self._enter(
                "candidate", lambda proof: self._join_request(proof, request), deadline, cause
            )
            try:
                joined = self._complete(connection, welcome, deadline, on_current or _ignore_membership)
                return replace(joined, again=joined.again and cause is not None)
            except SeedConnectionLost as lost:  # the seed may come back
                _log.info("%s; reconnecting", lost)
                cause = lost
                if connection.epoch:  # it was admitted, so the timeout starts again
                    deadline = time.monotonic() + self._timeout

    def rejoin(self, request: RankRequest) -> JoinedCluster:
        """Reconnect once. Errors as `join`, or OSError; SeedConnectionLost also while the seed does not know this
        member yet.
        """
        deadline = time.monotonic() + self._timeout
        ask = partial(self._join_request, request=request)
        connection, welcome = self._attempt(lambda: self._connect("candidate", ask, deadline))
        return self._complete(connection, welcome, deadline, _not_known_yet)

    def enter(self, role: Role, ask: Ask) -> tuple[JoinConnection, Welcome]:
        """Connect until admitted; install the certificate. Errors as `join`."""
        return self._enter(role, ask, time.monotonic() + self._timeout)

    def enter_again(self, role: Role, ask: Ask) -> JoinConnection:
        """Reconnect once. Errors as `rejoin`."""
        deadline = time.monotonic() + self._timeout
        return self._attempt(lambda: self._connect(role, ask, deadline))[0]

    def watch(self) -> tuple[JoinConnection, StatusPageReply]:
        """Connect until the seed shows its status board. Errors as `join`."""
        deadline = time.monotonic() + self._timeout
        return self._retry(lambda until: self._attempt(lambda: self._connect_to_observe(until)), deadline)

    def _enter(
        self, role: Role, ask: Ask, deadline: float, cause: Exception | None = None
    ) -> tuple[JoinConnection, Welcome]:
        return self._retry(lambda until: self._attempt(lambda: self._connect(role, ask, until)), deadline, cause)

    def _retry(self, attempt: Callable[[float], _Result], deadline: float, cause: Exception | None = None) -> _Result:
        with WaitNotice(self._tell_for_host, lambda: self._no_seed(deadline)):
            while self.attempts == 0 or time.monotonic() < deadline:
                self._node.cancel_token.pause(self._pause(deadline))
                try:
                    return attempt(min(deadline, time.monotonic() + _LONGEST_ATTEMPT))
                except TimeoutError as failed:
                    cause = cause or failed  # the last attempt has little time; the one before knew more
                except (ConnectRefused, SeedConnectionLost) as failed:
                    cause = failed
                self._last_failure = _text(cause)
        raise self._unreachable(cause) from cause

    def _note_failure(self, cause: str) -> None:
        self._last_failure = cause

    def _no_seed(self, deadline: float) -> str:
        where = ", ".join(self._invitation.addresses)
        return f"no seed answers at {where}: {self._last_failure}{seconds_left(deadline)}"

    def _attempt(self, connect: Callable[[], _Result]) -> _Result:
        """Converts final errors to those for users; others are OSError."""
        self.attempts += 1
        try:
            return connect()
        except RefusedBySeed as refused:
            address = ", ".join(self._invitation.addresses)
            raise join_refused(refused, address) from refused
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
        remedy = "take the ticket, or the token and the address, of the seed that runs now"
        return SeedUnreachable(
            addresses=self._invitation.addresses,
            attempts=self.attempts,
            cause=_text(cause),
            remedy=remedy,
            answered=address,
            credential="token" if self._invitation.fingerprint is None else "ticket",
        )

    def _connect(self, role: Role, ask: Ask, deadline: float) -> tuple[JoinConnection, Welcome]:
        connection, welcome = self._authenticate(role, ask, Welcome, deadline)
        try:
            take_certificate(self._node, welcome.cluster, welcome.certificate, welcome.authority)
        except BaseException:
            connection.close("giving up")
            raise
        return connection, welcome

    def _connect_to_observe(self, deadline: float) -> tuple[JoinConnection, StatusPageReply]:
        return self._authenticate("onlooker", WatchStatus, StatusPageReply, deadline)

    def _authenticate(
        self, role: Role, ask: Callable[[bytes], JoinMessage], answer: type[_Answer], deadline: float
    ) -> tuple[JoinConnection, _Answer]:
        invitation, node = self._invitation, self._node
        expected = Expected(UNKNOWN_NODE, invitation.fingerprint, anonymous=True)
        connection = JoinConnection(node.dialer.dial(self._addresses(), expected, deadline, failed=self._note_failure))
        try:
            with node.cancel_token.waking(connection.interrupt):
                proof = connection.prove_each_other(invitation, node.id, role, node.schemes, deadline)
                connection.send(ask(proof))
                return connection, connection.expect(answer, deadline)
        except BaseException:
            connection.close("giving up")
            raise

    def _addresses(self) -> Mapping[str, tuple[str, ...]]:
        # TLS first: the seed must notice deaths before it commits. The system closes TCP connections of a killed
        # process at once; QUIC times out after half a minute.
        schemes = sorted(self._node.network_schemes, key=lambda scheme: not capabilities_of(scheme).closes_on_death)
        return dict.fromkeys(schemes, self._invitation.addresses)

    def _join_request(self, proof: bytes, request: RankRequest) -> JoinRequest:
        node = self._node
        return JoinRequest(
            proof=proof,
            request=make_request(node.id, node.key),
            host=node.host,
            addresses=node.addresses(),
            rank=request.rank,
            launcher=request.launcher,
            epoch=request.epoch,
            size=request.size,
            clock=self._clock(),
            settings=agreed_settings(node.config),
            confirms=request.confirms,
        )

    def _complete(
        self, connection: JoinConnection, welcome: Welcome, deadline: float, on_current: OnCurrent
    ) -> JoinedCluster:
        try:
            with self._node.cancel_token.waking(connection.interrupt):
                with suppress(SeedConnectionLost):  # messages that the seed sent before it closed are read below
                    connection.send(Ready())
                return self._await_membership(connection, welcome, deadline + answer_margin(self._timeout), on_current)
        except BaseException:
            connection.close("giving up")
            raise

    def _await_membership(
        self, connection: JoinConnection, welcome: Welcome, deadline: float, on_current: OnCurrent
    ) -> JoinedCluster:
        # A member receives Committed without Current.
        began, at_once = time.monotonic(), True
        notices = NoticeTimes(began)
        while True:
            message = self._next_message(connection, welcome, deadline, notices)
            match message:
                case Committed():
                    return JoinedCluster(connection, welcome, _read_membership(connection, message), again=at_once)
                case Current():
                    at_once = False
                    on_current(_read_membership(connection, message))
                    deadline = began + self._join_timeout
                case FormationFailed():
                    raise formation_error(message)
                case _:
                    raise SeedConnectionLost(f"the seed sent {type(message).__name__} instead of the membership")

    def _next_message(
        self, connection: JoinConnection, welcome: Welcome, deadline: float, notices: NoticeTimes
    ) -> JoinMessage:
        while True:
            try:
                message = connection.receive(deadline if self._tell is None else min(deadline, notices.next))
            except TimeoutError as late:
                if time.monotonic() >= deadline:
                    raise self._too_late(connection, welcome) from late
                self._ask_who_is_missing(connection, deadline)
                notices.advance(time.monotonic())
                continue
            except RefusedBySeed as refused:
                raise join_refused(refused, connection.address) from refused
            if not isinstance(message, FormationProgress):
                return message
            if self._tell is not None and message.reports:
                # The seed gives up earlier, unless it runs slowly.
                self._tell(_missing(message) + seconds_left(deadline - answer_margin(self._timeout)))

    def _ask_who_is_missing(self, connection: JoinConnection, deadline: float) -> None:
        # The members of a formed cluster decide themselves.
        if not connection.epoch:
            connection.send(FormationQuery())
        elif self._tell is not None:
            self._tell(f"waiting for a checkpoint of the members, which lets this node in{seconds_left(deadline)}")

    def _too_late(self, connection: JoinConnection, welcome: Welcome) -> FormationTimeout | OperationTimeout:
        if not connection.epoch:
            return FormationTimeout(
                joined=["this node"],
                expected=welcome.size,
                refused={},
                timeout=self._timeout + answer_margin(self._timeout),
            )
        waiting_for = "a checkpoint of the members, which would let this node in"
        return OperationTimeout(operation="joining the cluster", waiting_for=waiting_for, timeout=self._join_timeout)


def formation_error(failed: FormationFailed) -> FormationTimeout:
    """The error for a failed formation."""
    return FormationTimeout(
        joined=failed.joined,
        expected=failed.expected,
        refused=dict(failed.refused),
        timeout=failed.timeout,
        reason=failed.reason,
    )


def join_refused(refused: RefusedBySeed, address: str) -> JoinRefused:
    """The error for users."""
    return JoinRefused(reason=refused.reason, address=address, expelled=refused.expelled, code=refused.code)


def _code(message: JoinRefusedMessage) -> str:
    # An older seed sends no code.
    return message.code or ("nobody_left" if message.nobody_left else "")


def _missing(progress: FormationProgress) -> str:
    count = progress.expected - progress.joined
    named = f": {list_ranks(progress.missing)}" if progress.missing else ""
    more = ", …" if 0 < len(progress.missing) < count else ""
    refused = "; ".join(f"{who}: {why}" for who, why in progress.refused.items())
    return f"waiting for {count} of {progress.expected} ranks{named}{more}" + (
        f" (refused: {refused})" if refused else ""
    )


def _ignore_membership(_: Membership) -> None:
    """Does nothing."""


def _not_known_yet(_: Membership) -> None:
    raise SeedConnectionLost("the seed does not know this node as a member yet")


def _read_membership(connection: JoinConnection, message: Committed | Current) -> Membership:
    try:
        membership = decode_membership(message.membership)
    except MembershipError as error:
        raise SeedConnectionLost(f"the seed sent an invalid membership: {error}") from error
    connection.epoch = membership.epoch
    return membership


def take_certificate(node: Node, cluster: str, certificate: bytes, authority: bytes) -> tuple[datetime, datetime]:
    """Install certificate and authority (PEM); returns the validity. Raises SeedConnectionLost if they are unusable."""
    try:
        loaded = x509.load_pem_x509_certificate(certificate)
        node.certify(make_credentials(node.id, cluster, node.key, loaded), Trust(authority))
        return read_validity(certificate)
    except ValueError as error:
        raise SeedConnectionLost(f"the certificate that the seed gave cannot be used: {error}") from error


def _text(cause: Exception | None) -> str:
    return str(getattr(cause, "reason", None) or cause or "no time was left")
