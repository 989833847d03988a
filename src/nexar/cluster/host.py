"""The host id and the network interfaces of this host.

Ranks with the same host id try shared memory and loopback. So a host is one running kernel, host name and network
namespace; `NEXAR_HOST_ID` overrides this.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
from pathlib import Path
from typing import Any, Final

from nexar.cluster.addresses import Interface, IpInterface
from nexar.config import Config

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NETWORK: Final = Path("/proc/self/ns/net")
_BYTES: Final = 6


def host_id(config: Config) -> str:
    """The setting, or twelve hexadecimal digits that stay until a reboot."""
    if config.host_id is not None:
        return config.host_id
    facts = (_boot(), socket.gethostname(), _network_namespace())
    return hashlib.blake2b("\0".join(facts).encode(), digest_size=_BYTES, person=b"nexar host").hexdigest()


def _boot() -> str:
    return _BOOT.read_text().strip() if _BOOT.exists() else ""  # other systems use the host name only


def _network_namespace() -> str:
    return str(os.stat(_NETWORK).st_ino) if _NETWORK.exists() else ""


def read_interfaces() -> tuple[Interface, ...]:
    """All interfaces, in the system's order."""
    import psutil  # type: ignore[import-untyped]  # noqa: PLC0415 - only a process in a cluster pays for it

    states = psutil.net_if_stats()
    return tuple(
        Interface(name, _attached(entries), states[name].mtu, states[name].isup)
        for name, entries in psutil.net_if_addrs().items()
        if name in states  # removed between the two calls
    )


def _attached(entries: list[Any]) -> tuple[IpInterface, ...]:
    return tuple(_parse(entry) for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6))


def _parse(entry: Any) -> IpInterface:
    number = ipaddress.ip_address(entry.address.partition("%")[0])  # without the interface name
    if entry.netmask is None:
        return ipaddress.ip_interface(number)
    ones = int(ipaddress.ip_address(entry.netmask)).bit_count()  # both families write the mask as an address
    return ipaddress.ip_interface(f"{number}/{ones}")
