"""The addresses that a node advertises, and the order in which it dials those of a peer. Pure.

At most MAX_ADDRESSES are advertised, best first: ordinary interfaces; bridges to containers and virtual machines, which
have the same numbers on every host; IPv4 link-local; loopback, for peers on this host. IPv6 link-local addresses are
omitted: they need an interface name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from nexar.errors import ConfigError, UsageError
from nexar.transport.address import (
    AddressCandidate,
    Network,
    check_dialable,
    format_address,
    host_of,
    is_loopback,
    order_candidates,
    parse_address,
)
from nexar.transport.registry import capabilities_of, node_port_schemes

IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
IpInterface: TypeAlias = ipaddress.IPv4Interface | ipaddress.IPv6Interface

MAX_ADDRESSES: Final = 16
"""Few enough for the small message that an unauthenticated peer may send."""
_BRIDGE: Final = re.compile(
    r"(docker|br-|virbr|veth|vnet|cni|cali|cilium|flannel|podman|lxcbr|lxdbr|weave|kube|nerdctl|vmnet|vboxnet)"
)


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface of this host."""

    name: str
    addresses: tuple[IpInterface, ...]  # each with its network
    mtu_bytes: int
    up: bool = True

    @property
    def is_bridge(self) -> bool:
        """Whether the name is that of a bridge to containers or virtual machines."""
        return _BRIDGE.match(self.name) is not None


def candidate_addresses(
    interfaces: Sequence[Interface],
    listening: str,
    *,
    schemes: Iterable[str],
    iface: str | None = None,
    advertise: str | None = None,
) -> dict[str, tuple[str, ...]]:
    """Scheme → host:port addresses to advertise, best first; the same for every scheme.

    The setting `advertise` replaces all but loopback. Raises ConfigError if `iface` selects nothing or `advertise` is
    invalid.
    """
    host, port = parse_address(listening)
    bound = _number(host)
    if advertise is not None:
        chosen = [_advertised(text.strip(), port) for text in advertise.split(",") if text.strip()]
        if not chosen:
            raise _wrong_advertise(advertise, "it names no host")
    elif bound is not None and not bound.is_unspecified:
        return dict.fromkeys(schemes, (format_address(str(bound), port),))
    else:
        chosen = [format_address(str(number), port) for number in _ordinary(interfaces, iface, bound)]
    loopback = [format_address(str(number), port) for number in _loopback(interfaces, iface, bound)]
    chosen = chosen[: MAX_ADDRESSES - len(loopback)] + loopback
    return dict.fromkeys(schemes, tuple(dict.fromkeys(chosen)))


def own_networks(interfaces: Iterable[Interface]) -> list[Network]:
    """Without bridges, whose numbers are the same on every host."""
    attached = [address for each in interfaces if each.up and not each.is_bridge for address in each.addresses]
    return list(dict.fromkeys(address.network for address in attached if not _is_local(address.ip)))


def own_ip_addresses(interfaces: Iterable[Interface]) -> frozenset[IpAddress]:
    """The addresses of all interfaces."""
    return frozenset(address.ip for each in interfaces for address in each.addresses)


def add_seen_address(addresses: Mapping[str, tuple[str, ...]], seen: str) -> dict[str, tuple[str, ...]]:
    """Add the address from which the seed saw a node connect.

    An advertised one moves to the front. Any other may be a router that forwards the port: it comes last, before
    loopback. Loopback and link-local ones are ignored.
    """
    host = host_of(seen)
    number = None if host is None else _number(host)
    if number is None or _is_local(number) or number.is_unspecified:
        return dict(addresses)
    return {scheme: _insert_seen(advertised, str(number)) for scheme, advertised in addresses.items()}


def check_advertised(addresses: Mapping[str, tuple[str, ...]]) -> None:
    """Raises UsageError. Ignores schemes of other packages, which have their own form."""
    for scheme in node_port_schemes():
        for address in addresses.get(scheme, ()):
            try:
                check_dialable(address)
            except UsageError as error:
                raise UsageError(f"its {scheme} address {error}") from None


def _insert_seen(advertised: tuple[str, ...], host: str) -> tuple[str, ...]:
    port = next((parse_address(address)[1] for address in advertised if host_of(address) is not None), None)
    if port is None:
        return advertised
    seen = format_address(host, port)
    if seen in advertised:
        return (seen, *(address for address in advertised if address != seen))
    loopback = tuple(address for address in advertised if is_loopback(address))
    return (*(address for address in advertised if address not in loopback), seen, *loopback)


def _ordinary(interfaces: Sequence[Interface], iface: str | None, bound: IpAddress | None) -> list[IpAddress]:
    usable = [(each, address.ip) for each, address in _select(interfaces, iface) if _is_reachable(bound, address.ip)]
    return [number for _, number in sorted(usable, key=lambda entry: _objections(*entry))]


def _objections(interface: Interface, number: IpAddress) -> tuple[bool, bool, bool]:
    # The strongest objection comes first. More networks carry IPv4 than IPv6.
    return number.is_link_local, interface.is_bridge, number.version == 6


def _is_reachable(bound: IpAddress | None, number: IpAddress) -> bool:
    """For remote peers, at a socket bound to `bound`."""
    if number.is_loopback or number.is_unspecified or number.is_multicast:
        return False
    if number.version == 6:
        return not number.is_link_local and (bound is None or bound.version == 6)
    return True


def _loopback(interfaces: Iterable[Interface], iface: str | None, bound: IpAddress | None) -> list[IpAddress]:
    found = [address.ip for each in interfaces if each.up and iface != f"^{each.name}" for address in each.addresses]
    reachable = [number for number in found if bound is None or bound.version >= number.version]
    return sorted({number for number in reachable if number.is_loopback}, key=lambda number: number.version)


def _select(interfaces: Sequence[Interface], iface: str | None) -> list[tuple[Interface, IpInterface]]:
    everything = [(each, address) for each in interfaces if each.up for address in each.addresses]
    if iface is None:
        return everything
    if iface.startswith("^"):
        return [(each, address) for each, address in everything if each.name != iface[1:]]
    network = _network(iface)
    if network is not None:
        chosen = [(each, address) for each, address in everything if address.ip in network]
    else:
        chosen = [(each, address) for each, address in everything if each.name == iface]
    if not chosen:
        raise _nothing_selected(interfaces, iface)
    return chosen


def _nothing_selected(interfaces: Sequence[Interface], iface: str) -> ConfigError:
    there = "; ".join(_describe(each) for each in interfaces)
    idle = "" if all(each.name != iface for each in interfaces) else f"{iface} is down or has no address"
    allowed = f"one of the interfaces of this host ({there}), an address or a network of one, or ^NAME to leave one out"
    return ConfigError(variable="NEXAR_IFACE", value=iface, allowed=allowed, hint=idle)


def _describe(interface: Interface) -> str:
    numbers = ", ".join(str(address) for address in interface.addresses) or "no address"
    return f"{interface.name}: {numbers}" + ("" if interface.up else ", down")


def _advertised(text: str, port: int) -> str:
    number = _number(text.removeprefix("[").removesuffix("]"))
    if number is not None:
        return _dialable(text, str(number), port)
    try:
        return _dialable(text, *parse_address(text if ":" in text else f"{text}:{port}"))
    except UsageError as error:
        raise _wrong_advertise(text, str(error)) from error


def _dialable(text: str, host: str, port: int) -> str:
    number = _number(host)
    if not host or not port:
        raise _wrong_advertise(text, "it names no host" if not host else "port 0 cannot be dialed")
    if number is not None and (number.is_unspecified or number.is_multicast):
        raise _wrong_advertise(text, f"{number} cannot be dialed")
    if number is None and not re.search(r"[^0-9.]", host):
        raise _wrong_advertise(text, f"{host} is no IPv4 address")
    return format_address(host, port)


def _wrong_advertise(text: str, why: str) -> ConfigError:
    allowed = "host names or addresses, with a port or without, separated by commas"
    return ConfigError(variable="NEXAR_ADVERTISE", value=text, allowed=allowed, hint=why)


def _network(text: str) -> Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _number(text: str) -> IpAddress | None:
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None


def _is_local(number: IpAddress) -> bool:
    return number.is_loopback or number.is_link_local


def dial_order(
    addresses: Mapping[str, Sequence[str]],
    *,
    schemes: Sequence[str],
    same_host: bool,
    networks: Sequence[Network] = (),
    own: Collection[IpAddress] = (),
) -> dict[str, tuple[str, ...]]:
    """Scheme → addresses worth dialing, best first, in the order of `schemes`, without empty ones.

    On another host, our addresses (`own`) belong to other nodes or lead to us: they are omitted, like loopback. A peer
    with no other address shares our network whatever its host id: it is dialed like one on this host, but not through
    shared memory.
    """
    usable = [scheme for scheme in schemes if same_host or not capabilities_of(scheme).shares_memory]
    offered = [AddressCandidate(scheme, address) for scheme in usable for address in addresses.get(scheme, ())]
    numbers = {str(number) for number in own}
    foreign = [candidate for candidate in offered if host_of(candidate.address) not in numbers]
    shares_network = same_host or not foreign
    if not shares_network:
        offered = foreign
    order: dict[str, list[str]] = {}
    for candidate in order_candidates(offered, schemes=usable, networks=networks, same_host=shares_network):
        order.setdefault(candidate.scheme, []).append(candidate.address)
    return {scheme: tuple(chosen) for scheme, chosen in order.items()}
