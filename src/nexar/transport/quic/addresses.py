"""Addresses as the native package takes them: numeric."""

from __future__ import annotations

import socket

from nexar.transport.address import parse_address


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
