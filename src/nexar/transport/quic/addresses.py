"""Addresses as the native package takes them: numeric."""

from __future__ import annotations

import socket

from nexar.transport.address import parse_address


def to_numeric(text: str) -> tuple[str, int]:
    """Where a socket is bound that shall have the address `text`; an empty host is every interface, of both families.
    OSError if it is nowhere.
    """
    return resolve(text, beside="::")[0]


def resolve(text: str, *, beside: str) -> list[tuple[str, int]]:
    """Every place that `text` names, each once, the system's favourite first. OSError if there is none.

    `beside` is the numeric host of the socket that will send there: one that speaks IPv4 only needs such an address.
    """
    host, port = parse_address(text)
    if not host:
        return [("::", port) if socket.has_dualstack_ipv6() else ("0.0.0.0", port)]
    family = socket.AF_UNSPEC if ":" in beside else socket.AF_INET
    found = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)
    return list(dict.fromkeys((str(place[0]), port) for _, _, _, _, place in found))
