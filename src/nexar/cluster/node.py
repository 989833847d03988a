"""This process in a cluster: its id, its key, its transports and what drives them. Knows nothing of members."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Final, Self

from nexar.cluster.addresses import Interface, candidate_addresses, dial_order, own_ip_addresses, own_networks
from nexar.cluster.control_threads import CancelToken
from nexar.cluster.delay_meter import DelayMeter
from nexar.cluster.dialing import Dialer
from nexar.cluster.host import host_id, read_interfaces
from nexar.cluster.membership import Member
from nexar.cluster.transports import NETWORK, Transports, open_transports
from nexar.config import Config
from nexar.links.carrier_selection import bulk_channel_scheme
from nexar.links.progress import Progress, spin_of
from nexar.security.authority import make_key, provisional_credentials
from nexar.security.certificates import Credentials, Trust
from nexar.transport.address import host_of
from nexar.transport.base import Acceptor, Carrier, ConnectRefused, Expected, Transport
from nexar.transport.registry import is_ours, load
from nexar.transport.sleeper import PollSleeper
from nexar.types import MAX_NODE, NodeId

if TYPE_CHECKING:
    from nexar.transport.memory import MemoryNetwork


_TLS: Final = "tls"
_PLAIN: Final = "tcp"  # what the carriers of TLS call themselves that go on without it


def _sidecar(config: Config) -> str | None:
    scheme = bulk_channel_scheme(config.enable_tcp_bulk_sidecar, encrypted=config.encrypt_bulk_transport)
    return scheme if _TLS in config.transports else None


class Node:
    """It listens from the beginning, and lets nobody in before `certify`. Close it, or leave its `with` block."""

    def __init__(self, config: Config, network: MemoryNetwork | None = None) -> None:
        """`network`: talk inside this process only, to other nodes of that network; no certificates there."""
        self.id: Final[NodeId] = secrets.randbelow(MAX_NODE) + 1
        self.config: Final = config
        self.host: Final = host_id(config)
        self.key: Final = make_key()
        self.sidecar: Final = _sidecar(config) if network is None else None
        """The scheme of the connections for large payloads that it opens and takes; None: it does without."""
        self._acceptor: Acceptor | None = None  # written once, by `listen`, before anybody can come in
        self._transports = self._open(network)
        self.cancel_token: Final = CancelToken()
        """Made when this node begins to close, or nobody drives it any more: nobody dials for it then."""
        self.progress: Final = Progress(
            self._transports.sleeper,
            list(self._by_scheme.values()),
            spin=spin_of(config.spin_microsecs),
            on_end=self.cancel_token.make,
        )
        self.delay_meter: Final = DelayMeter(2 * config.heartbeat_timeout)
        """Says by how much deadlines for peers extend, because this process gets too little CPU."""
        self.dialer: Final = Dialer(
            {scheme: self._by_scheme[scheme] for scheme in self.mesh_schemes},
            self.cancel_token,
            own_delay=lambda: self.delay_meter.seconds,
        )

    def _open(self, network: MemoryNetwork | None) -> Transports:
        if network is None:
            plain_too = self.sidecar == _PLAIN
            return open_transports(self.config, provisional_credentials(self.id), Trust(b""), self, plain_too=plain_too)
        sleeper = PollSleeper()
        memory = load("memory")(sleeper, self.id, network)
        return Transports({"memory": memory}, sleeper, memory.listen("", self))

    @property
    def _by_scheme(self) -> Mapping[str, Transport]:
        return self._transports.by_scheme

    @property
    def meets_strangers(self) -> bool:
        """Whether others are in processes of their own; else all of them are threads of this one."""
        return "memory" not in self._by_scheme

    @property
    def network_schemes(self) -> tuple[str, ...]:
        """Those that lead to the seed and to any other member, preferred first."""
        return tuple(scheme for scheme in self._by_scheme if scheme in (*NETWORK, "memory"))

    @property
    def mesh_schemes(self) -> tuple[str, ...]:
        """Those that lead to other members: the same, and transports of other packages, preferred first."""
        return tuple(scheme for scheme in self._by_scheme if scheme in self.network_schemes or not is_ours(scheme))

    @property
    def capabilities(self) -> frozenset[str]:
        """What this node can do, for the hello."""
        return frozenset(self._by_scheme)

    # -- who may come in -------------------------------------------------------------------------------

    def listen(self, acceptor: Acceptor) -> None:
        """Who is let in from now on is `acceptor`'s."""
        self._acceptor = acceptor

    def certify(self, credentials: Credentials, trust: Trust) -> None:
        """Show these, and believe those, from now on."""
        for transport in self._by_scheme.values():
            transport.replace_credentials(credentials, trust)

    def expect_peers(self, count: int) -> None:
        """So many members may dial this node at once."""
        for transport in self._by_scheme.values():
            transport.expect_peers(count)

    def carrier_accepted(self, carrier: Carrier) -> None:
        """See Acceptor."""
        if self._acceptor is None:
            carrier.abort("this node is not listening yet")
        else:
            self._acceptor.carrier_accepted(carrier)

    def candidate_refused(self, address: str, reason: str) -> None:
        """See Acceptor."""
        if self._acceptor is not None:
            self._acceptor.candidate_refused(address, reason)

    # -- where we are, and how to get to others --------------------------------------------------------------

    @property
    def listens_at(self) -> str:
        """Host and port where its network transports listen, UDP and TCP."""
        return self._transports.address

    @cached_property
    def _interfaces(self) -> tuple[Interface, ...]:
        return read_interfaces()

    def addresses(self) -> dict[str, tuple[str, ...]]:
        """What others are told, by scheme. ConfigError if the settings leave nothing."""
        if "memory" in self._by_scheme:
            return {"memory": (self._transports.address,)}
        told = self._told(self._transports.address, *self.network_schemes)
        for scheme, transport in self._by_scheme.items():
            if not is_ours(scheme) and transport.address is not None:
                told |= self._told(transport.address, scheme)
        return told

    def _told(self, listening: str, *schemes: str) -> dict[str, tuple[str, ...]]:
        """An address that has no host and port is told as it is."""
        if host_of(listening) is None:
            return dict.fromkeys(schemes, (listening,))
        config = self.config
        return candidate_addresses(
            self._interfaces, listening, schemes=schemes, iface=config.iface, advertise=config.advertise
        )

    def ways_to(self, member: Member) -> dict[str, tuple[str, ...]]:
        """Its addresses worth dialing, by scheme."""
        if "memory" in self._by_scheme:
            return {"memory": tuple(member.addresses.get("memory", ()))}
        return dial_order(
            member.addresses,
            schemes=self.mesh_schemes,
            same_host=member.host == self.host,
            networks=own_networks(self._interfaces),
            own=own_ip_addresses(self._interfaces),
        )

    def memory_address_for(self, peer: NodeId) -> str:
        """Where that peer, and nobody else, may connect through shared memory; empty: nowhere."""
        shm = self._by_scheme.get("shm")
        return (shm.address_for(peer) or "") if shm is not None else ""

    def connect_memory(self, address: str, peer: NodeId, deadline: float) -> Carrier:
        """Through shared memory, at the address the peer told us. ConnectRefused, TimeoutError."""
        shm = self._by_scheme.get("shm")
        if shm is None:
            raise ConnectRefused("shared memory", "this node does without it")
        return shm.connect(address, Expected(peer), deadline)

    def connect_sidecar(self, member: Member, deadline: float) -> Carrier:
        """One more connection, of the scheme `sidecar`. ConnectRefused, TimeoutError."""
        return self._connect_tcp(member, deadline, plain=self.sidecar == _PLAIN)

    def connect_line(self, member: Member, deadline: float) -> Carrier:
        """A connection that the system of the peer closes when its process ends. ConnectRefused, TimeoutError."""
        return self._connect_tcp(member, deadline, plain=False)

    def _connect_tcp(self, member: Member, deadline: float, *, plain: bool) -> Carrier:
        addresses, tls = self.ways_to(member).get(_TLS, ()), self._by_scheme.get(_TLS)
        if not addresses or tls is None:
            raise ConnectRefused("the peer", "there is no way to it over TCP")
        return tls.connect(",".join(addresses), Expected(member.node, member.fingerprint, plain=plain), deadline)

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Links must have been closed before. Idempotent."""
        self.cancel_token.make()
        self.progress.close()
        self.dialer.close()
        self._transports.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
