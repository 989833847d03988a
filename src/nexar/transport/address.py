"""Addresses as text: `host:port` and `[IPv6 address]:port`. Names are not resolved here."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from nexar.errors import UsageError

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
_Numeric: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_PORT: Final = re.compile(r"0|[1-9][0-9]{0,4}")
_LABEL: Final = r"[A-Za-z0-9_-]{1,63}"
_HOST: Final = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*\.?)?")  # for other names the resolver raises UnicodeError
_ZONE: Final = re.compile(r"[A-Za-z0-9._-]+")
_MAX_HOST: Final = 253  # limit of DNS
_CACHED: Final = 1024  # addresses; those of a member are parsed again for every probe and dial of it


class AddressCandidate(NamedTuple):
    """A scheme and an address for its `connect`."""

    scheme: str
    address: str


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port; an empty host means every interface. Raises UsageError."""
    host, colon, port = text.rpartition(":")
    if not colon or not _PORT.fullmatch(port) or int(port) > 65535:
        raise UsageError(f"{text!r} is not an address; write host:port or [address]:port")
    if host.startswith("[") and host.endswith("]"):
        return _check_v6(host[1:-1], text), int(port)
    if ":" in host:
        raise UsageError(f"{text!r} is ambiguous; write IPv6 addresses as [{host}]:{port}")
    if not _HOST.fullmatch(host) or len(host) > _MAX_HOST:
        raise UsageError(f"{text!r} is not an address: {host!r} is not a host name or an IP address")
    return host, int(port)


def check_dialable(text: str) -> None:
    """Raise UsageError unless `text` has a host and a port above 0."""
    host, port = parse_address(text)
    if not host or not port:
        raise UsageError(f"{text!r} cannot be dialed; write a host and a port above 0")


def format_address(host: str, port: int) -> str:
    """Inverse of `parse_address`. IPv4-mapped IPv6 becomes IPv4."""
    if ":" not in host:
        return f"{host}:{port}"
    mapped = ipaddress.IPv6Address(host.partition("%")[0]).ipv4_mapped
    return f"{mapped}:{port}" if mapped else f"[{host}]:{port}"


def parse_addresses(text: str) -> list[tuple[str, int]]:
    """Parse a list separated by commas."""
    return [parse_address(part.strip()) for part in text.split(",")]


@lru_cache(_CACHED)
def host_of(address: str) -> str | None:
    """Return the host, None if the address is not host:port."""
    try:
        return parse_address(address)[0]
    except UsageError:
        return None


@lru_cache(_CACHED)
def is_loopback(address: str) -> bool:
    """Whether every host that dials the address reaches itself."""
    host = host_of(address)
    number = None if host is None else _number_of(host)
    return host == "localhost" or (number is not None and number.is_loopback)


def order_candidates(
    candidates: Iterable[AddressCandidate],
    *,
    schemes: Sequence[str],
    networks: Sequence[Network] = (),
    same_host: bool = False,
) -> list[AddressCandidate]:
    """Return the candidates worth dialing, best first; equal ones keep their order.

    Order: by `schemes`, then addresses in `networks`, other numeric addresses, names, link-local addresses. Loopback
    comes first for a peer on this host and is dropped otherwise.
    """
    known = [candidate for candidate in dict.fromkeys(candidates) if candidate.scheme in schemes]
    ranked = [(schemes.index(c.scheme), _distance(c.address, networks, same_host=same_host), c) for c in known]
    return [c for _, distance, c in sorted(ranked, key=lambda entry: entry[:2]) if distance < _UNREACHABLE]


_UNREACHABLE: Final = 9


def _distance(address: str, networks: Sequence[Network], *, same_host: bool) -> int:
    host = host_of(address)
    if host is None:  # only its scheme understands it
        return 2
    if is_loopback(address):
        return 0 if same_host else _UNREACHABLE
    number = _number_of(host)
    if number is None:
        return 4
    if number.is_unspecified or number.is_multicast:
        return _UNREACHABLE
    if number.is_link_local:
        return 5
    return 1 if any(number in network for network in networks) else 3


@lru_cache(_CACHED)
def _number_of(host: str) -> _Numeric | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _check_v6(host: str, text: str) -> str:
    number, percent, zone = host.partition("%")
    try:
        canonical = str(ipaddress.IPv6Address(number))
    except ValueError:
        raise UsageError(f"{text!r} is not an address: {number!r} is not an IPv6 address") from None
    if percent and not _ZONE.fullmatch(zone):
        raise UsageError(f"{text!r} is not an address: {zone!r} is not the name of an interface")
    return canonical + percent + zone
