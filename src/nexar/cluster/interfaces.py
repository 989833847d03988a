"""Reads the network interfaces of this host."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

from nexar.cluster.addresses import Attached, Interface


def read_interfaces() -> tuple[Interface, ...]:
    """All of them, also those that are down or have no address, in the order of the system."""
    import psutil  # type: ignore[import-untyped]  # noqa: PLC0415 - only who forms a cluster pays for it

    states = psutil.net_if_stats()
    return tuple(
        Interface(name, _attached(entries), states[name].mtu, states[name].isup)
        for name, entries in psutil.net_if_addrs().items()
        if name in states  # gone between the two looks
    )


def _attached(entries: list[Any]) -> tuple[Attached, ...]:
    return tuple(_parse(entry) for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6))


def _parse(entry: Any) -> Attached:
    number = ipaddress.ip_address(entry.address.partition("%")[0])  # without the interface, which we know
    if entry.netmask is None:
        return ipaddress.ip_interface(number)
    ones = int(ipaddress.ip_address(entry.netmask)).bit_count()  # both families write the mask as an address
    return ipaddress.ip_interface(f"{number}/{ones}")
