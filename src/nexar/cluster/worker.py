"""Knocks at the seed's door until it is opened, refused for good, or the time is up.

Who comes after the cluster has formed is let in too, where it is elastic, and then waits for its members to take it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from random import Random
from typing import Final, TypeAlias, TypeVar

from cryptography import x509

from nexar.cluster.join_line import Impostor, JoinLine, LineLost, RefusedBySeed
from nexar.cluster.membership import Membership, MembershipError
from nexar.cluster.node import Node
from nexar.cluster.wait_notice import NoticeTimes, Tell, WaitNotice, seconds_left
from nexar.config import agreed_settings
from nexar.errors import FormationTimeout, JoinRefused, OperationTimeout, SeedUnreachable
from nexar.errors.base import list_ranks
from nexar.links.redial import pause_before
from nexar.security.authority import make_credentials
from nexar.security.credentials import Trust
from nexar.security.invitation import Invitation
from nexar.security.proof import Role
from nexar.security.renewal import read_validity
from nexar.security.request import make_request
from nexar.transport.base import ConnectRefused, Expected
from nexar.types import UNKNOWN_NODE, NodeId, Rank
from nexar.wire.joining import (
    Apply,
    Committed,
    Current,
    FormationFailed,
    Inquire,
    JoinMessage,
    Progress,
    Ready,
    Reserve,
    Shown,
    Watch,
    Welcome,
)

_log = logging.getLogger(__name__)

GRACE: Final = 5.0
"""Seconds beyond the formation timeout: by then the seed, whose clock began earlier, has said who is missing."""
_LONGEST_ATTEMPT: Final = 10.0

_Entered = TypeVar("_Entered")
_Answer = TypeVar("_Answer", Welcome, Shown)
Ask: TypeAlias = Callable[[bytes], "Apply | Reserve"]
"""What to ask for, given the proof that goes with it."""
OnCurrent: TypeAlias = Callable[[Membership], None]
"""Told, by the thread that joins, whom it will join as soon as they take it: at first and again at each change."""


@dataclass(frozen=True, slots=True)
class Place:
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
class Joined:
    """A candidate that is in."""

    line: JoinLine
    welcome: Welcome
    membership: Membership
    """The first that it is in; if it came `again`, a later one perhaps."""
    again: bool = False
    """It had to knock again, and was a member already."""


class Worker:
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

    def join(self, place: Place, on_current: OnCurrent | None = None) -> Joined:
        """Become a member. JoinRefused, SeedUnreachable, FormationTimeout, VersionMismatch; all within the timeout,
        and GRACE for the seed's own word if we are in and others are not. Recalled when the node closes meanwhile.

        Where the cluster has formed and takes us later, `on_current` is told whom we will join; OperationTimeout if
        that takes longer than `join_timeout`. A seed that goes away meanwhile is knocked at again.
        """
        deadline = time.monotonic() + self._timeout
        cause: LineLost | None = None
        while True:
            line, welcome = self._enter("candidate", lambda proof: self._apply(proof, place), deadline, cause)
            try:
                joined = self._complete(line, welcome, deadline, on_current or _nobody)
                return replace(joined, again=joined.again and cause is not None)
            except LineLost as lost:  # the seed may come back: knock again
                _log.info("%s; knocking again", lost)
                cause = lost
                if line.epoch:  # it was in, so its time for coming in begins anew
                    deadline = time.monotonic() + self._timeout

    def rejoin(self, place: Place) -> Joined:
        """One attempt to be known again to a seed that was gone. As `join`, or why it came to nothing: an OSError.

        LineLost also if the seed takes us for somebody new: others know more, and tell it.
        """
        deadline = time.monotonic() + self._timeout
        ask = partial(self._apply, place=place)
        line, welcome = self._attempt(lambda: self._knock("candidate", ask, deadline))
        return self._complete(line, welcome, deadline, _taken_for_another)

    def enter(self, role: Role, ask: Ask) -> tuple[JoinLine, Welcome]:
        """Knock until the seed has said welcome, and take the certificate it gives. Errors as for `join`."""
        return self._enter(role, ask, time.monotonic() + self._timeout)

    def enter_again(self, role: Role, ask: Ask) -> JoinLine:
        """One attempt, at a seed that was gone. Errors as for `rejoin`."""
        deadline = time.monotonic() + self._timeout
        return self._attempt(lambda: self._knock(role, ask, deadline))[0]

    def watch(self) -> tuple[JoinLine, Shown]:
        """Knock until the seed shows its board, to whoever knows the secret; nothing else is wanted of it, and no
        certificate given. Errors as for `join`.
        """
        deadline = time.monotonic() + self._timeout
        return self._persist(lambda until: self._attempt(lambda: self._knock_to_watch(until)), deadline)

    def _enter(self, role: Role, ask: Ask, deadline: float, cause: Exception | None = None) -> tuple[JoinLine, Welcome]:
        """`cause`: why it was not enough to have entered before."""
        return self._persist(lambda until: self._attempt(lambda: self._knock(role, ask, until)), deadline, cause)

    def _persist(
        self, attempt: Callable[[float], _Entered], deadline: float, cause: Exception | None = None
    ) -> _Entered:
        with WaitNotice(self._tell_for_host, lambda: self._no_seed(deadline)):
            while self.attempts == 0 or time.monotonic() < deadline:
                self._node.recall.pause(self._pause(deadline))
                try:
                    return attempt(min(deadline, time.monotonic() + _LONGEST_ATTEMPT))
                except TimeoutError as failed:
                    cause = cause or failed  # the last attempt has little time: the one before knew more
                except (ConnectRefused, LineLost) as failed:
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
        except Impostor as impostor:
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

    def _knock(self, role: Role, ask: Ask, deadline: float) -> tuple[JoinLine, Welcome]:
        line, welcome = self._greet(role, ask, Welcome, deadline)
        try:
            take_certificate(self._node, welcome.cluster, welcome.certificate, welcome.authority)
        except BaseException:
            line.close("giving up")
            raise
        return line, welcome

    def _knock_to_watch(self, deadline: float) -> tuple[JoinLine, Shown]:
        return self._greet("onlooker", Watch, Shown, deadline)

    def _greet(
        self, role: Role, ask: Callable[[bytes], JoinMessage], answer: type[_Answer], deadline: float
    ) -> tuple[JoinLine, _Answer]:
        """Until the seed has given this answer."""
        invitation, node = self._invitation, self._node
        expected = Expected(UNKNOWN_NODE, invitation.fingerprint, anonymous=True)
        line = JoinLine(node.dialer.dial(self._addresses(), expected, deadline, failed=self._note_failure))
        try:
            with node.recall.waking(line.interrupt):
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

    def _apply(self, proof: bytes, place: Place) -> Apply:
        node = self._node
        return Apply(
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

    def _complete(self, line: JoinLine, welcome: Welcome, deadline: float, on_current: OnCurrent) -> Joined:
        try:
            with self._node.recall.waking(line.interrupt):
                with suppress(LineLost):  # what the seed said before it closed the line has come, and is heard below
                    line.send(Ready())
                return self._await_membership(line, welcome, deadline + GRACE, on_current)
        except BaseException:
            line.close("giving up")
            raise

    def _await_membership(self, line: JoinLine, welcome: Welcome, deadline: float, on_current: OnCurrent) -> Joined:
        """Who is a member already is not told first whom it will join."""
        began, at_once = time.monotonic(), True
        notices = NoticeTimes(began)
        while True:
            message = self._await_word(line, welcome, deadline, notices)
            match message:
                case Committed():
                    return Joined(line, welcome, _read_membership(line, message), again=at_once)
                case Current():
                    at_once = False
                    on_current(_read_membership(line, message))
                    deadline = began + self._join_timeout
                case FormationFailed():
                    raise formation_error(message)
                case _:
                    raise LineLost(f"the seed said {type(message).__name__} where the membership was due")

    def _await_word(self, line: JoinLine, welcome: Welcome, deadline: float, notices: NoticeTimes) -> JoinMessage:
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
            if not isinstance(message, Progress):
                return message
            if self._tell is not None and message.reports:
                self._tell(_missing(message) + seconds_left(deadline - GRACE))  # the seed gives up GRACE earlier

    def _ask_who_is_missing(self, line: JoinLine, deadline: float) -> None:
        """Of the seed, while the cluster forms. The members of one that has formed decide by themselves."""
        if not line.epoch:
            line.send(Inquire())
        elif self._tell is not None:
            self._tell(f"waiting for a checkpoint of the members, which lets this node in{seconds_left(deadline)}")

    def _too_late(self, line: JoinLine, welcome: Welcome) -> FormationTimeout | OperationTimeout:
        if not line.epoch:
            return FormationTimeout(
                joined=["this node"], expected=welcome.size, refused={}, timeout=self._timeout + GRACE
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


def _missing(progress: Progress) -> str:
    """Whom a formation waits for, and whom the seed has refused meanwhile."""
    count = progress.expected - progress.joined
    named = f": {list_ranks(progress.missing)}" if progress.missing else ""
    more = ", …" if 0 < len(progress.missing) < count else ""
    refused = "; ".join(f"{who}: {why}" for who, why in progress.refused.items())
    return f"waiting for {count} of {progress.expected} ranks{named}{more}" + (
        f" (refused: {refused})" if refused else ""
    )


def _nobody(_: Membership) -> None:
    """Nobody wants to know whom it will join."""


def _taken_for_another(_: Membership) -> None:
    raise LineLost("the seed does not know this node as a member yet")


def _read_membership(line: JoinLine, message: Committed | Current) -> Membership:
    try:
        membership = Membership.decode(message.membership)
    except MembershipError as error:
        raise LineLost(f"the seed sent a membership that is none: {error}") from error
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
        raise LineLost(f"the certificate that the seed gave cannot be used: {error}") from error


def _text(cause: Exception | None) -> str:
    return str(getattr(cause, "reason", None) or cause or "no time was left")
