"""The seed: admits nodes that know the secret, issues certificates, commits the first membership.

It holds no rank and carries no data; a formed cluster continues without it. It votes when the number of members is
even.
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

from nexar.cluster.addresses import candidate_addresses
from nexar.cluster.control_loop import ControlLoop
from nexar.cluster.decisions.admission import Admission
from nexar.cluster.decisions.admission_checks import AdmissionLimits, ClockLimits
from nexar.cluster.decisions.admission_events import SeedEvent
from nexar.cluster.decisions.failure_detector import longest_extension
from nexar.cluster.decisions.paxos import Vote
from nexar.cluster.delay_meter import DelayMeter
from nexar.cluster.host import read_interfaces
from nexar.cluster.membership import MAX_MEMBERS, Membership, PinnedNode
from nexar.cluster.seed_connection import CertificateIssuer
from nexar.cluster.seed_server import SeedServer
from nexar.cluster.seed_state import SeedIdentity, SeedState, make_identity
from nexar.cluster.seed_status import FormationStatus, SeedLog, StatusBoardService
from nexar.cluster.transports import Transports, open_transports, usable_schemes
from nexar.config import Config
from nexar.errors import FormationTimeout, NexarError, UsageError
from nexar.links.progress import Progress
from nexar.security.authority import AUTHORITY_LIFETIME, CLOCK_SKEW, make_credentials
from nexar.security.certificates import Credentials, Trust
from nexar.security.invitation import Invitation, format_ticket, invitation_from_token
from nexar.transport.address import format_address, is_loopback, parse_address
from nexar.transport.base import Acceptor
from nexar.transport.registry import capabilities_of
from nexar.types import whole
from nexar.wire.join import MAX_JOIN_BYTES
from nexar.wire.status import StatusPage

_IDLE_TIMEOUT: Final = 10.0
"""Seconds until a silent join connection is lost. QUIC does not report a killed process: until then a joiner waits for
a dead seed, or the seed counts a dead node. A node that was only slow reconnects.
"""
_KEEP_ALIVE_INTERVAL: Final = 2.5

_MAX_STREAMS: Final = 16  # more than a join connection needs; limits unauthenticated peers
_CONNECTIONS_PER_PENDING: Final = 4
"""QUIC connections per pending one: waiting, finishing, or in their handshake."""
_PACKET_BYTES: Final = 1200  # every path carries it; probing for more would cost a search per connection
_WINDOW_BYTES: Final = 2 * MAX_JOIN_BYTES  # unread bytes: the largest message and the start of the next


def open_seed_transports(
    config: Config, credentials: Credentials, trust: Trust, acceptor: Acceptor, *, size: int, listen: str | None = None
) -> Transports:
    """Listen for join connections. Errors as `open_transports`."""
    schemes = [scheme for scheme in usable_schemes(config) if capabilities_of(scheme).node_port]
    settings = {
        "idle_timeout": _IDLE_TIMEOUT,
        "keep_alive_interval": _KEEP_ALIVE_INTERVAL,
        "max_streams": _MAX_STREAMS,
        "max_connections": MAX_MEMBERS + _CONNECTIONS_PER_PENDING * config.join_max_pending,
        "peers": size,
        "stream_window_bytes": _WINDOW_BYTES,
        "handshake_budget": 2 * config.join_max_pending,
        "max_mtu": _PACKET_BYTES,
        "loopback_mtu": _PACKET_BYTES,
    }
    return open_transports(config, credentials, trust, acceptor, listen=listen, schemes=schemes, quic=settings)


def previous_listen_address(port: int, listen: str | None, config: Config) -> str | None:
    """Returns the address to listen at, given an earlier seed's port (0: none). Raises UsageError for another port:
    issued tickets name that one.
    """
    if not port:
        return listen
    bind = (config.bind or "").removeprefix("[").removesuffix("]")
    host, wanted = (bind, config.port) if listen is None else parse_address(listen)
    if wanted not in (0, port):
        raise UsageError(
            f"the seed in the state directory listens at port {port}, as its ticket says, not {wanted}; "
            f"give port {port} or 0, or another directory"
        )
    return format_address(host, port)


def seed_addresses(config: Config, address: str) -> tuple[str, ...]:
    """The seed's addresses for others, best first; loopback only if alone. Raises ConfigError."""
    interfaces = read_interfaces()
    (found,) = candidate_addresses(
        interfaces, address, schemes=("any",), iface=config.iface, advertise=config.advertise
    ).values()
    elsewhere = tuple(text for text in found if not is_loopback(text))
    return elsewhere or found or (format_address("127.0.0.1", parse_address(address)[1]),)


_UNUSED_ADDRESS: Final = "localhost:1"  # a token is independent of the seed's address


class SeedService:
    """A running seed. Close it, or leave its `with` (or `async with`) block; not from inside `on_event`.

    The ticket is a secret that lets any node join. It is never logged.
    """

    def __init__(
        self,
        listen: str | None = None,
        size: int | None = None,
        *,
        config: Config | None = None,
        state_dir: str | Path | None = None,
        on_event: Callable[[SeedEvent], None] | None = None,
        **settings: Any,
    ) -> None:
        """Start a seed for a cluster of `size` members.

        `listen` is host:port for UDP and TCP, port 0 for any; None uses the settings. With `state_dir`, a later seed
        has the same ticket and knows the members. A thread calls `on_event` with every SeedEvent; it must not block.
        Raises UsageError or ConfigError, leaving nothing open.
        """
        config = replace(config or Config(), **settings)
        self._state = None if state_dir is None else SeedState(state_dir)
        identity, membership = _load_or_create(self._state, config)
        self._size: Final = _check_size(size, membership)
        self._seed_log = SeedLog(on_event)
        self._status = FormationStatus()
        self._closing = threading.Lock()
        self._closed = False  # guarded by `_closing`
        certificate = _certify(identity)
        credentials = make_credentials(identity.node, identity.authority.cluster, identity.key, certificate)
        trust = Trust(identity.authority.certificate_pem, allow_anonymous=True)
        self._control_loop = ControlLoop()  # its only timer is the server's, which may wait for the disk
        self._server = self._make_server(config, identity, certificate, membership)
        with ExitStack() as undo:
            undo.callback(self._control_loop.close)
            undo.callback(self._server.close)
            where = previous_listen_address(identity.port, listen, config)
            self._transports = open_seed_transports(
                config, credentials, trust, self._server, size=self._size, listen=where
            )
            undo.callback(self._transports.close)
            self.address: Final = self._transports.address  # with the real port, even if 0 was requested
            self._keep_identity(identity)
            invitation = Invitation(seed_addresses(config, self.address), identity.secret, identity.fingerprint)
            self.ticket: Final = format_ticket(invitation)
            undo.pop_all()
        self._progress = Progress(self._transports.sleeper, list(self._transports.by_scheme.values()), spin=0.0)
        self._progress.when_forked(self._control_loop.abandon)

    def _make_server(
        self, config: Config, identity: SeedIdentity, certificate: x509.Certificate, membership: Membership | None
    ) -> SeedServer:
        meter = DelayMeter(longest_extension(config.formation_timeout))
        admission = self._make_admission(config, identity, membership, _admission_limits(config, meter))
        lifetime = timedelta(seconds=min(config.certificate_lifetime, AUTHORITY_LIFETIME.total_seconds()))
        self._board = StatusBoardService(identity.authority.cluster, self._size, lambda: admission.joined)
        if membership is not None:
            self._board.moved(membership)
        issuer = CertificateIssuer(
            identity.secret, identity.authority, certificate.public_bytes(Encoding.DER), lifetime
        )
        return SeedServer(
            admission,
            issuer,
            self._status,
            self._seed_log,
            self._board,
            control_loop=self._control_loop,
            keep=self._keep_membership,
            keep_vote=self._keep_vote,
            discard=self._discard_membership,
            meter=meter,
            max_lingering=config.join_max_pending,
        )

    def _make_admission(
        self, config: Config, identity: SeedIdentity, membership: Membership | None, limits: AdmissionLimits
    ) -> Admission:
        now = time.monotonic()
        if membership is None:
            return Admission(
                identity.authority.cluster,
                self._size,
                started=now,
                formation_timeout=config.formation_timeout,
                seed=PinnedNode(identity.node, identity.fingerprint),
                limits=limits,
            )
        vote = None if self._state is None else self._state.load_vote()
        self._status.resumed(membership, now + config.formation_timeout)
        return Admission.resumed(membership, vote, limits=limits)

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

    # -- state -------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Members at the formation."""
        return self._size

    @property
    def membership(self) -> Membership | None:
        """The newest known; None before the cluster has formed."""
        return self._status.membership

    @property
    def events(self) -> list[SeedEvent]:
        """The newest events, oldest first."""
        return self._seed_log.events

    def board(self) -> StatusPage:
        """The latest status of every member. Any thread."""
        return self._board.whole()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "forming" if self.membership is None else "formed"
        return f"<Seed at {self.address} for {self._size} members, {state}>"

    # -- waiting -----------------------------------------------------------------------------------------

    def wait_formed(self, timeout: float | None = None) -> Membership:
        """Wait until the cluster has formed. Raises FormationTimeout, with joined and refused nodes, at the timeout or,
        for good, when the formation timeout expires; UsageError when closed.
        """
        try:
            return self._or_timeout(self._status.wait_formed(timeout), timeout or 0.0)
        except NexarError as error:
            raise copy(error) from None  # a copy per waiting thread

    async def formed(self) -> Membership:
        """Like `wait_formed`, for a task, which may be cancelled."""
        try:
            return self._or_timeout(await self._status.formed_soon(), 0.0)
        except NexarError as error:
            raise copy(error) from None

    def wait_empty(self, timeout: float | None = None) -> bool:
        """Wait until every member has left or died. Members of a resumed cluster have the formation timeout to return.
        True also if the formation failed or the seed was closed; False at the timeout.
        """
        return self._status.wait_empty(timeout)

    def wait_launchers(self, timeout: float) -> bool:
        """Wait until every launcher has left: it may outlive its ranks to report or receive a failure. False at the
        timeout.
        """
        return self._status.wait_launchers(timeout)

    def _or_timeout(self, found: Membership | None, timeout: float) -> Membership:
        if found is not None:
            return found
        joined, refused = self._server.describe_joined(), self._server.describe_refused()
        raise FormationTimeout(joined=joined, expected=self._size, refused=refused, timeout=timeout)

    # -- closing -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Members continue without the seed; waiting joiners are notified. Takes a second at most. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        forming = self.membership is None
        self._status.failed(UsageError("this seed is closed; make another"))
        # A seed with state may be restarted: its joiners may retry, so they are not refused.
        refusal = "the seed was closed before the cluster had formed" if forming and self._state is None else None
        self._server.close(refusal)
        self._control_loop.close()
        self._progress.close()
        self._transports.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        from asyncio import to_thread  # noqa: PLC0415 - a coroutine has it loaded; a launcher does not need it

        await to_thread(self.close)


def _admission_limits(config: Config, meter: DelayMeter) -> AdmissionLimits:
    skew = CLOCK_SKEW.total_seconds()
    return AdmissionLimits(
        max_pending=config.join_max_pending,
        auth_timeout=config.join_auth_timeout,
        choose=SystemRandom().choice,
        elastic=config.elastic_enabled,
        most=config.elastic_max_world_size,
        clocks=ClockLimits(behind=skew, ahead=min(skew, config.certificate_lifetime)),
        own_delay=lambda: meter.seconds,
    )


def _load_or_create(state: SeedState | None, config: Config) -> tuple[SeedIdentity, Membership | None]:
    secret = None
    if config.cluster_token is not None:
        secret = invitation_from_token(config.cluster_token, [_UNUSED_ADDRESS]).secret
    identity = None if state is None else state.load_identity()
    if state is None or identity is None:
        return make_identity(secret), None
    if secret is not None and secret != identity.secret:
        raise UsageError("the state directory belongs to a cluster with another token; take its token, or another one")
    return identity, state.load_membership(identity.authority.cluster)


def _check_size(size: int | None, membership: Membership | None) -> int:
    if membership is not None and membership.epoch > 1:
        return membership.size  # the members have changed since it formed
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
    # As long as the authority: nothing could renew it.
    return identity.authority.issue(identity.node, identity.key.public_key(), AUTHORITY_LIFETIME)
