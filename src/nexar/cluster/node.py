"""This process in a cluster: id, key, transports and event loop, without members."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Final, Self

from nexar.cluster.addresses import Interface, candidate_addresses, dial_order, own_ip_addresses, own_networks
from nexar.cluster.control_loop import CancelToken, ControlLoop
from nexar.cluster.delay_meter import DelayMeter
from nexar.cluster.dialing import Dialer
from nexar.cluster.host import host_id, read_interfaces
from nexar.cluster.membership import Member
from nexar.cluster.task_pool import TaskPool
from nexar.cluster.transports import Transports, open_transports
from nexar.config import Config
from nexar.links.carrier_selection import bulk_channel_scheme
from nexar.links.progress import Progress, spin_of
from nexar.security.authority import make_key, provisional_credentials
from nexar.security.certificates import Credentials, Trust
from nexar.transport.address import host_of
from nexar.transport.base import Acceptor, Carrier, ConnectRefused, Expected, Transport
from nexar.transport.registry import capabilities_of, load, tcp_scheme
from nexar.transport.sleeper import PollSleeper
from nexar.types import MAX_NODE, NodeId

if TYPE_CHECKING:
    from nexar.transport.memory import MemoryNetwork

_BACKGROUND_THREADS: Final = 4


def _sidecar(config: Config) -> str | None:
    scheme = bulk_channel_scheme(config.enable_tcp_bulk_sidecar, encrypted=config.encrypt_bulk_transport)
    return scheme if tcp_scheme(config.transports) is not None else None


class Node:
    """Listens at once, accepts after `certify`. Close it, or leave its `with` block."""

    def __init__(self, config: Config, network: MemoryNetwork | None = None) -> None:
        """`network`: connect only inside this process, without certificates."""
        self.id: Final[NodeId] = secrets.randbelow(MAX_NODE) + 1
        self.config: Final = config
        self.host: Final = host_id(config)
        self.key: Final = make_key()
        self.sidecar: Final = _sidecar(config) if network is None else None
        """Scheme of its bulk channels, if any."""
        self._acceptor: Acceptor | None = None  # written once by `listen`, before a peer can connect
        self._transports = self._open(network)
        self.cancel_token: Final = CancelToken()  # cancelled when the node closes or its event loop ends
        self.progress: Final = Progress(
            self._transports.sleeper,
            list(self._by_scheme.values()),
            spin=spin_of(config.spin_microsecs),
            on_end=self.cancel_token.cancel,
        )
        self.control_loop: Final = ControlLoop()
        """Timers and probes of this node. Users of the loop close their timers before the node closes it."""
        self.progress.when_forked(self.control_loop.abandon)
        self.delay_meter: Final = DelayMeter(2 * config.heartbeat_timeout)
        """Extends deadlines of peers when this process gets too little CPU."""
        self.dialer: Final = Dialer(
            {scheme: self._by_scheme[scheme] for scheme in self.mesh_schemes},
            self.cancel_token,
            own_delay=lambda: self.delay_meter.seconds,
        )
        self.background: Final = TaskPool("nexar-background", _BACKGROUND_THREADS)
        """For tasks that may take minutes, so that they take no thread from dials."""

    def _open(self, network: MemoryNetwork | None) -> Transports:
        if network is None:
            credentials = provisional_credentials(self.id)
            return open_transports(self.config, credentials, Trust(b""), self, plain_too=self._sidecar_is_plain)
        sleeper = PollSleeper()
        memory = load("memory")(sleeper, self.id, network)
        return Transports({"memory": memory}, sleeper, memory.listen("", self))

    @property
    def _sidecar_is_plain(self) -> bool:
        return self.sidecar is not None and not capabilities_of(self.sidecar).encrypts

    @property
    def _by_scheme(self) -> Mapping[str, Transport]:
        return self._transports.by_scheme

    @cached_property
    def _in_process(self) -> str | None:
        # The scheme of a node whose peers are in this process.
        return next((scheme for scheme in self._by_scheme if capabilities_of(scheme).in_process), None)

    @cached_property
    def _memory(self) -> Transport | None:
        found = (each for scheme, each in self._by_scheme.items() if capabilities_of(scheme).shares_memory)
        return next(found, None)

    @property
    def has_remote_peers(self) -> bool:
        """Whether peers are other processes."""
        return self._in_process is None

    @property
    def network_schemes(self) -> tuple[str, ...]:
        """Schemes that reach the seed and all members, preferred first."""
        found = [(scheme, capabilities_of(scheme)) for scheme in self._by_scheme]
        return tuple(scheme for scheme, each in found if each.node_port or each.in_process)

    @property
    def mesh_schemes(self) -> tuple[str, ...]:
        """`network_schemes` and those of other packages."""
        return tuple(scheme for scheme in self._by_scheme if not capabilities_of(scheme).shares_memory)

    @property
    def schemes(self) -> frozenset[str]:
        """The field `capabilities` on the wire."""
        return frozenset(self._by_scheme)

    # -- incoming connections --------------------------------------------------------------------------

    def listen(self, acceptor: Acceptor) -> None:
        self._acceptor = acceptor

    def certify(self, credentials: Credentials, trust: Trust) -> None:
        for transport in self._by_scheme.values():
            transport.replace_credentials(credentials, trust)

    def expect_peers(self, count: int) -> None:
        for transport in self._by_scheme.values():
            transport.expect_peers(count)

    def lose_at_exit(self, enabled: bool) -> None:
        for transport in self._by_scheme.values():
            transport.lose_at_exit(enabled)

    def carrier_accepted(self, carrier: Carrier) -> None:
        if self._acceptor is None:
            carrier.abort("this node is not listening yet")
        else:
            self._acceptor.carrier_accepted(carrier)

    def candidate_refused(self, address: str, reason: str) -> None:
        if self._acceptor is not None:
            self._acceptor.candidate_refused(address, reason)

    # -- addresses and connections ---------------------------------------------------------------------------

    @property
    def listens_at(self) -> str:
        """Host and port, UDP and TCP."""
        return self._transports.address

    @cached_property
    def _interfaces(self) -> tuple[Interface, ...]:
        return read_interfaces()

    def addresses(self) -> dict[str, tuple[str, ...]]:
        """The advertised ones by scheme. Raises ConfigError if the settings leave none."""
        if self._in_process is not None:
            return {self._in_process: (self._transports.address,)}
        advertised = self._advertised(self._transports.address, *self.network_schemes)
        for scheme in self.mesh_schemes:
            address = self._by_scheme[scheme].address
            if scheme not in advertised and address is not None:
                advertised |= self._advertised(address, scheme)
        return advertised

    def _advertised(self, listening: str, *schemes: str) -> dict[str, tuple[str, ...]]:
        # Addresses without host and port are advertised unchanged.
        if host_of(listening) is None:
            return dict.fromkeys(schemes, (listening,))
        config = self.config
        return candidate_addresses(
            self._interfaces, listening, schemes=schemes, iface=config.iface, advertise=config.advertise
        )

    def dial_addresses(self, member: Member) -> dict[str, tuple[str, ...]]:
        if self._in_process is not None:
            return {self._in_process: tuple(member.addresses.get(self._in_process, ()))}
        return dial_order(
            member.addresses,
            schemes=self.mesh_schemes,
            same_host=member.host == self.host,
            networks=own_networks(self._interfaces),
            own=own_ip_addresses(self._interfaces),
        )

    def memory_address_for(self, peer: NodeId) -> str:
        """An address for this peer alone; empty if none."""
        return (self._memory.address_for(peer) or "") if self._memory is not None else ""

    def connect_memory(self, address: str, peer: NodeId, deadline: float) -> Carrier:
        """Raises ConnectRefused, TimeoutError."""
        if self._memory is None:
            raise ConnectRefused("shared memory", "this node has no shared memory transport")
        return self._memory.connect(address, Expected(peer), deadline)

    def connect_sidecar(self, member: Member, deadline: float) -> Carrier:
        """Raises ConnectRefused, TimeoutError."""
        return self._connect_tcp(member, deadline, plain=self._sidecar_is_plain)

    def connect_liveness(self, member: Member, deadline: float) -> Carrier:
        """Raises ConnectRefused, TimeoutError."""
        return self._connect_tcp(member, deadline, plain=False)

    def _connect_tcp(self, member: Member, deadline: float, *, plain: bool) -> Carrier:
        scheme = tcp_scheme(self._by_scheme)
        addresses = () if scheme is None else self.dial_addresses(member).get(scheme, ())
        if scheme is None or not addresses:
            raise ConnectRefused("the peer", "it has no address that this node can dial over TCP")
        expected = Expected(member.node, member.fingerprint, plain=plain)
        return self._by_scheme[scheme].connect(",".join(addresses), expected, deadline)

    # -- closing ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """The caller closes the links first. Idempotent."""
        self.cancel_token.cancel()
        self.control_loop.close()  # its callbacks use the transports
        self.progress.close()
        self.dialer.close()
        self.background.close()
        self._transports.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
