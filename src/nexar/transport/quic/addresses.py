"""Addresses as text, `host:port` or `[v6 address]:port`, and as the native package takes them: numeric."""

from __future__ import annotations

import ipaddress
import socket

from nexar.errors import UsageError


def parse_address(text: str) -> tuple[str, int]:
    """Host and port. UsageError for anything else."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{text!r} is not an address; write host:port or [address]:port")
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], int(port)
    if ":" in host:
        raise UsageError(f"{text!r} is ambiguous; write IPv6 addresses as [{host}]:{port}")
    return host, int(port)


def format_address(address: tuple[str, int]) -> str:
    """The text `parse_address` takes. An IPv4 peer of a dual-stack socket is shown as what it is."""
    host, port = address
    if ":" not in host:
        return f"{host}:{port}"
    mapped = ipaddress.IPv6Address(host.partition("%")[0]).ipv4_mapped
    return f"{mapped}:{port}" if mapped else f"[{host}]:{port}"


def to_numeric(text: str, *, beside: str = "::") -> tuple[str, int]:
    """Where `text` is, names resolved; an empty host is every interface, of both families. OSError if it is nowhere.

    `beside` is the numeric host of the socket that will send there: one that speaks IPv4 only needs such an address.
    """
    host, port = parse_address(text)
    if not host:
        return ("::", port) if socket.has_dualstack_ipv6() else ("0.0.0.0", port)
    family = socket.AF_UNSPEC if ":" in beside else socket.AF_INET
    resolved = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0][4]
    return str(resolved[0]), port
