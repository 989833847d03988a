"""Knocks at the seed's door until it is opened, refused for good, or the time is up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from random import Random
from typing import Final, TypeAlias

from cryptography import x509

from nexar.cluster.join_line import Impostor, JoinLine, LineLost, RefusedBySeed
from nexar.cluster.membership import Membership, MembershipError
from nexar.cluster.node import Node
from nexar.errors import FormationTimeout, JoinRefused, SeedUnreachable
from nexar.links.redial import pause_before
from nexar.security.authority import make_credentials
from nexar.security.credentials import Trust
from nexar.security.invitation import Invitation
from nexar.security.proof import Role
from nexar.security.renewal import read_validity
from nexar.security.request import make_request
from nexar.transport.base import ConnectRefused, Expected
from nexar.types import UNKNOWN_NODE, NodeId, Rank
from nexar.wire.joining import Apply, Committed, FormationFailed, Ready, Reserve, Welcome

_log = logging.getLogger(__name__)

GRACE: Final = 5.0
"""Seconds beyond the formation timeout: by then the seed, whose clock began earlier, has said who is missing."""
_LONGEST_ATTEMPT: Final = 10.0

Ask: TypeAlias = Callable[[bytes], "Apply | Reserve"]
"""What to ask for, given the proof that goes with it."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a candidate brings along."""

    rank: Rank | None = None
    """That its environment gave it; None: any."""
    launcher: NodeId = UNKNOWN_NODE


@dataclass(frozen=True, slots=True)
class Joined:
    """A candidate that is in."""

    line: JoinLine
    welcome: Welcome
    membership: Membership


class Worker:
    """Joins a cluster for one node."""

    def __init__(self, node: Node, invitation: Invitation, *, timeout: float, random: Random | None = None) -> None:
        self._node = node
        self._invitation = invitation
        self._timeout = timeout
        self._random = random or Random()
        self.attempts = 0

    def join(self, place: Place) -> Joined:
        """Become a member. JoinRefused, SeedUnreachable, FormationTimeout, VersionMismatch; all within the timeout,
        and GRACE for the seed's own word if we are in and others are not. Recalled when the node closes meanwhile.
        """
        deadline = time.monotonic() + self._timeout
        cause: LineLost | None = None
        while True:
            line, welcome = self._enter("candidate", lambda proof: self._apply(proof, place), deadline, cause)
            try:
                return self._complete(line, welcome, deadline)
            except LineLost as lost:  # the seed may come back: knock again
                _log.info("%s; knocking again", lost)
                cause = lost

    def rejoin(self, place: Place) -> Joined:
        """One attempt to be known again to a seed that was gone. As `join`, or why it came to nothing: an OSError."""
        deadline = time.monotonic() + self._timeout
        line, welcome = self._attempt("candidate", lambda proof: self._apply(proof, place), deadline)
        return self._complete(line, welcome, deadline)

    def enter(self, role: Role, ask: Ask) -> tuple[JoinLine, Welcome]:
        """Knock until the seed has said welcome, and take the certificate it gives. Errors as for `join`."""
        return self._enter(role, ask, time.monotonic() + self._timeout)

    def _enter(self, role: Role, ask: Ask, deadline: float, cause: Exception | None = None) -> tuple[JoinLine, Welcome]:
        """`cause`: why it was not enough to have entered before."""
        while self.attempts == 0 or time.monotonic() < deadline:
            self._node.recall.pause(self._pause(deadline))
            try:
                return self._attempt(role, ask, min(deadline, time.monotonic() + _LONGEST_ATTEMPT))
            except TimeoutError as failed:
                cause = cause or failed  # the last attempt has little time: the one before knew more
            except (ConnectRefused, LineLost) as failed:
                cause = failed
        raise self._unreachable(cause) from cause

    def _attempt(self, role: Role, ask: Ask, deadline: float) -> tuple[JoinLine, Welcome]:
        """What another attempt would not change is raised as the user reads it; the rest is an OSError."""
        self.attempts += 1
        try:
            return self._knock(role, ask, deadline)
        except RefusedBySeed as refused:
            raise JoinRefused(reason=refused.reason, address=", ".join(self._invitation.addresses)) from refused
        except Impostor as impostor:
            raise self._not_the_seed(impostor) from impostor
        except ConnectRefused as failed:
            if failed.verification:
                raise self._not_the_seed(failed) from failed
            raise

    def _pause(self, deadline: float) -> float:
        return min(pause_before(self.attempts, self._random), max(0.0, deadline - time.monotonic()))

    def _unreachable(self, cause: Exception | None) -> SeedUnreachable:
        return SeedUnreachable(
            addresses=self._invitation.addresses, attempts=self.attempts, cause=_text(cause), timeout=self._timeout
        )

    def _not_the_seed(self, cause: Exception) -> SeedUnreachable:
        """Somebody answered, at once, and it is not the seed we were invited by."""
        remedy = "take the ticket, or the token and the address, of the seed that runs now"
        return SeedUnreachable(
            addresses=self._invitation.addresses, attempts=self.attempts, cause=_text(cause), remedy=remedy
        )

    def _knock(self, role: Role, ask: Ask, deadline: float) -> tuple[JoinLine, Welcome]:
        invitation, node = self._invitation, self._node
        expected = Expected(UNKNOWN_NODE, invitation.fingerprint, anonymous=True)
        line = JoinLine(node.dialer.dial(self._addresses(), expected, deadline))
        try:
            with node.recall.waking(line.interrupt):
                proof = line.prove_each_other(invitation, node.id, role, node.capabilities, deadline)
                line.send(ask(proof))
                welcome = line.expect(Welcome, deadline)
            take_certificate(node, welcome.cluster, welcome.certificate, welcome.authority)
        except BaseException:
            line.close("giving up")
            raise
        return line, welcome

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
        )

    def _complete(self, line: JoinLine, welcome: Welcome, deadline: float) -> Joined:
        try:
            with self._node.recall.waking(line.interrupt):
                line.send(Ready())
                return Joined(line, welcome, self._await_membership(line, welcome, deadline + GRACE))
        except BaseException:
            line.close("giving up")
            raise

    def _await_membership(self, line: JoinLine, welcome: Welcome, deadline: float) -> Membership:
        try:
            message = line.receive(deadline)
        except TimeoutError as late:
            raise FormationTimeout(
                joined=["this node"], expected=welcome.size, refused={}, timeout=self._timeout + GRACE
            ) from late
        except RefusedBySeed as refused:
            raise JoinRefused(reason=refused.reason, address=line.address) from refused
        if isinstance(message, FormationFailed):
            raise FormationTimeout(
                joined=message.joined,
                expected=message.expected,
                refused=dict(message.refused),
                timeout=message.timeout,
            )
        if not isinstance(message, Committed):
            raise LineLost(f"the seed said {type(message).__name__} where the membership was due")
        try:
            return Membership.decode(message.membership)
        except MembershipError as error:
            raise LineLost(f"the seed sent a membership that is none: {error}") from error


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
