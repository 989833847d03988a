"""The seed: opens the door of a cluster, admits those who know the secret, hands out identities and the first
membership. It holds no rank and is never on the way of the data; when it is gone, what has formed goes on. Later it
follows what the members choose, and is a witness of their choice when they are even in number.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import SystemRandom
from typing import Any, Final, Self

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from nexar.cluster.chronicle import Chronicle
from nexar.cluster.decisions.admission import Admission
from nexar.cluster.decisions.admission_events import Note
from nexar.cluster.decisions.compatibility import ClockLimits
from nexar.cluster.decisions.door_rules import DoorRules
from nexar.cluster.decisions.vote import Vote
from nexar.cluster.doorway import Doorway
from nexar.cluster.membership import MAX_MEMBERS, Attendant, Membership
from nexar.cluster.notary import Notary
from nexar.cluster.notice_board import NoticeBoard
from nexar.cluster.outcome import Outcome
from nexar.cluster.seed_place import open_place, same_place, seed_addresses
from nexar.cluster.seed_state import SeedIdentity, SeedState, make_identity
from nexar.config import Config
from nexar.errors import FormationTimeout, NexarError, UsageError
from nexar.links.progress import Progress
from nexar.security.authority import AUTHORITY_LIFETIME, CLOCK_SKEW, make_credentials
from nexar.security.credentials import Trust
from nexar.security.invitation import Invitation, invitation_from_token
from nexar.security.join_ticket import format_ticket
from nexar.transport.address import parse_address
from nexar.types import whole
from nexar.wire.bulletin import Board

_NOWHERE: Final = "localhost:1"  # a token is the same secret wherever the seed is


class Seed:
    """Open from its making on. Close it, or leave its `with` (or `async with`) block; not from inside `on_event`.

    The ticket is a secret: whoever has it can join. It is never logged.
    """

    def __init__(
        self,
        listen: str | None = None,
        size: int | None = None,
        *,
        config: Config | None = None,
        state_dir: str | Path | None = None,
        on_event: Callable[[Note], None] | None = None,
        **settings: Any,
    ) -> None:
        """Open the door for a cluster of `size` members.

        `listen` is host:port, UDP and TCP, port 0 for any; None: as the settings say. With `state_dir` the cluster
        outlives this process: a seed made later with the same directory has the same ticket, and knows the members if
        the cluster had formed. `on_event` is called with every Note, by a thread of the seed, and must not block.
        UsageError or ConfigError, and nothing is left open, if that is not possible.
        """
        config = replace(config or Config(), **settings)
        self._state = None if state_dir is None else SeedState(state_dir)
        identity, membership = _recall(self._state, config)
        self._size: Final = _check_size(size, membership)
        self._chronicle = Chronicle(on_event)
        self._outcome = Outcome()
        self._closing = threading.Lock()
        self._closed = False  # under `_closing`
        certificate = _certify(identity)
        credentials = make_credentials(identity.node, identity.authority.cluster, identity.key, certificate)
        trust = Trust(identity.authority.certificate_pem, allow_anonymous=True)
        self._doorway = self._make_doorway(config, identity, certificate, membership)
        with ExitStack() as undo:
            undo.callback(self._doorway.close)
            where = same_place(identity.port, listen, config)
            self._place = open_place(config, credentials, trust, self._doorway, size=self._size, listen=where)
            undo.callback(self._place.close)
            self.address: Final = self._place.address
            """Where it listens: the real port, also where 0 was asked for."""
            self._keep_identity(identity)
            invitation = Invitation(seed_addresses(config, self.address), identity.secret, identity.fingerprint)
            self.ticket: Final = format_ticket(invitation)
            """The one string that lets a node in."""
            undo.pop_all()
        self._progress = Progress(self._place.sleeper, list(self._place.by_scheme.values()), spin=0.0)

    def _make_doorway(
        self, config: Config, identity: SeedIdentity, certificate: x509.Certificate, membership: Membership | None
    ) -> Doorway:
        now = time.monotonic()
        rules = DoorRules(
            max_pending=config.join_max_pending,
            auth_timeout=config.join_auth_timeout,
            choose=SystemRandom().choice,
            elastic=config.elastic_enabled,
            most=config.elastic_max_world_size,
            clocks=ClockLimits(
                behind=CLOCK_SKEW.total_seconds(),
                ahead=min(CLOCK_SKEW.total_seconds(), config.certificate_lifetime),
            ),
        )
        if membership is not None:
            vote = None if self._state is None else self._state.load_vote()
            admission = Admission.resumed(membership, vote, rules=rules)
            self._outcome.resumed(membership, now + config.formation_timeout)
        else:
            admission = Admission(
                identity.authority.cluster,
                self._size,
                started=now,
                formation_timeout=config.formation_timeout,
                seed=Attendant(identity.node, identity.fingerprint),
                rules=rules,
            )
        lifetime = timedelta(seconds=min(config.certificate_lifetime, AUTHORITY_LIFETIME.total_seconds()))
        self._board = NoticeBoard(identity.authority.cluster, self._size, lambda: admission.joined)
        if membership is not None:
            self._board.moved(membership)
        notary = Notary(identity.secret, identity.authority, certificate.public_bytes(Encoding.DER), lifetime)
        return Doorway(
            admission,
            notary,
            self._outcome,
            self._chronicle,
            self._board,
            keep=self._keep_membership,
            keep_vote=self._keep_vote,
            discard=self._discard_membership,
            max_lingering=config.join_max_pending,
        )

    def _keep_membership(self, membership: Membership) -> None:
        if self._state is not None:
            self._state.keep_membership(membership)

    def _discard_membership(self) -> None:
        if self._state is not None:
            self._state.discard_membership()

    def _keep_vote(self, vote: Vote) -> None:
        if self._state is not None:
            self._state.keep_vote(vote)

    def _keep_identity(self, identity: SeedIdentity) -> None:
        if self._state is not None and not identity.port:
            self._state.keep_identity(replace(identity, port=parse_address(self.address)[1]))

    # -- what is known -----------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """How many members the cluster formed with, or is to form with."""
        return self._size

    @property
    def membership(self) -> Membership | None:
        """The newest membership that the seed knows; None before the cluster has formed."""
        return self._outcome.membership

    @property
    def events(self) -> list[Note]:
        """What happened at the door, the newest, oldest first: who knocked, who was refused and why, who left."""
        return self._chronicle.notes

    def board(self) -> Board:
        """What every member last told of itself, and who is lost and why. Any thread."""
        return self._board.whole()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "forming" if self.membership is None else "formed"
        return f"<Seed at {self.address} for {self._size} members, {state}>"

    # -- waiting -----------------------------------------------------------------------------------------

    def wait_formed(self, timeout: float | None = None) -> Membership:
        """Until everybody is there. FormationTimeout, saying who is and who was refused, at the timeout, or, at the
        latest, when the time for forming is over; then it raises that for ever. UsageError when the seed is closed.
        """
        try:
            return self._or_late(self._outcome.wait_formed(timeout), timeout or 0.0)
        except NexarError as error:
            raise copy(error) from None  # its own: several threads may wait

    async def formed(self) -> Membership:
        """As `wait_formed`, for a task, which may be cancelled (`asyncio.timeout`)."""
        try:
            return self._or_late(await self._outcome.formed_soon(), 0.0)
        except NexarError as error:
            raise copy(error) from None

    def wait_empty(self, timeout: float | None = None) -> bool:
        """Until every member has left or is gone. Members of a cluster that was resumed have the time for forming to
        come back. True also if the cluster failed to form, or the seed was closed; False at the timeout.
        """
        return self._outcome.wait_empty(timeout)

    def wait_launchers(self, timeout: float) -> bool:
        """Until every launcher has left: one whose ranks have ended may still have a failure to report, or to hear of.
        False at the timeout.
        """
        return self._outcome.wait_launchers(timeout)

    def _or_late(self, found: Membership | None, timeout: float) -> Membership:
        if found is not None:
            return found
        joined, refused = self._doorway.describe_joined(), self._doorway.describe_refused()
        raise FormationTimeout(joined=joined, expected=self._size, refused=refused, timeout=timeout)

    # -- the end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Shut the door: members go on without it, and whoever still waits for the cluster to form is told. Takes a
        second at most. Idempotent.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
        forming = self.membership is None
        self._outcome.failed(UsageError("this seed is closed; make another"))
        # A seed that keeps its state may be started again: those who wait may try again, so they are not refused.
        farewell = "the seed was closed before the cluster had formed" if forming and self._state is None else None
        self._doorway.close(farewell)
        self._progress.close()
        self._place.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        from asyncio import to_thread  # noqa: PLC0415 - whoever awaits has it; a launcher need not

        await to_thread(self.close)


def _recall(state: SeedState | None, config: Config) -> tuple[SeedIdentity, Membership | None]:
    """The identity that was kept, and what it had committed; else a new one."""
    secret = None
    if config.cluster_token is not None:
        secret = invitation_from_token(config.cluster_token, [_NOWHERE]).secret
    identity = None if state is None else state.load_identity()
    if state is None or identity is None:
        return make_identity(secret), None
    if secret is not None and secret != identity.secret:
        raise UsageError("the state directory belongs to a cluster with another token; take its token, or another one")
    return identity, state.load_membership(identity.authority.cluster)


def _check_size(size: int | None, membership: Membership | None) -> int:
    if membership is not None and membership.epoch > 1:
        return membership.size  # its members went on since, so what it formed with is history
    if membership is not None:
        if size not in (None, membership.size):
            raise UsageError(
                f"the cluster in the state directory has formed with {membership.size} members, not {size}; "
                "give that size, or another directory"
            )
        return membership.size
    number = whole(size)
    if number is None or not 1 <= number <= MAX_MEMBERS:
        raise UsageError(f"a seed needs the size of its cluster, 1 to {MAX_MEMBERS} members, not {size!r}")
    return number


def _certify(identity: SeedIdentity) -> x509.Certificate:
    """It lasts as long as the authority: nobody could give the seed another."""
    return identity.authority.issue(identity.node, identity.key.public_key(), AUTHORITY_LIFETIME)
