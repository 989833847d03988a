"""Several hosts on one machine: network namespaces joined by virtual Ethernet.

    with NetworkNamespaces(mtu=9000) as network, PeerPair(left, right, places=network.places) as pair:
        network.lose(0, percent=2, protocol="udp")
        pair.results()

The machine's own network is not touched. `ipv4=False`: IPv6 only. `dead_end=True`: every host has a second interface,
listed first, in a network that all hosts seem to share but that delivers nothing.

Loss applies to arriving packets. With segmentation offload one lost packet is up to 64 KiB; `offload=False` limits
packets to the MTU, as on a real wire.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from contextlib import ExitStack
from functools import cache
from typing import Final, Literal, Self

from nexar_tools.peer_protocol import HostSpec

Protocol = Literal["any", "tcp", "udp"]

_numbers = itertools.count()
_TABLE: Final = "inet nexar"
_INTERFACE: Final = "wire"
_DEAD_END: Final = "aside"
_TOOLS: Final = {"ip": "iproute2", "nft": "nftables", "ethtool": "ethtool"}


class NetworkNamespaces:
    """A `with` block with `count` connected namespaces."""

    def __init__(
        self, count: int = 2, *, mtu: int = 1500, offload: bool = True, ipv4: bool = True, dead_end: bool = False
    ) -> None:
        self.mtu = mtu
        self._ipv4 = ipv4
        self._dead_end = dead_end
        self.names = [f"nexar-{os.getpid()}-{next(_numbers)}" for _ in range(count)]
        self._switch = f"nexar-{os.getpid()}-{next(_numbers)}"  # namespace of the bridge, if there is one
        self._offload = offload
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            for number, name in enumerate(self.names):
                self._make_namespace(name)
                if self._dead_end:
                    self._add_dead_end(number, name)
            if len(self.names) == 2:
                self._join(self.names[0], _INTERFACE, self.names[1], _INTERFACE)
            else:
                self._join_by_bridge()
            for number, name in enumerate(self.names):
                self._configure(number, name)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    # -- hosts -----------------------------------------------------------------------------------------

    @property
    def places(self) -> tuple[HostSpec, ...]:
        """All hosts, by IPv4 address if there is one."""
        return tuple(self.place(number, ipv6=not self._ipv4) for number in range(len(self.names)))

    def place(self, number: int, *, ipv6: bool = False) -> HostSpec:
        """The address, and the command that enters the namespace."""
        host = _ipv6(number) if ipv6 else _ipv4(number)
        return HostSpec(host, (_tool("ip"), "netns", "exec", self.names[number]))

    # -- packet loss -----------------------------------------------------------------------------------

    def lose(self, number: int, percent: float, *, protocol: Protocol = "any") -> None:
        """Drops arriving packets at random."""
        self._rule(number, protocol, f"numgen random mod 10000 < {round(percent * 100)} drop")

    def lose_bursts(self, number: int, *, burst: int, every: int, after: int = 0, protocol: Protocol = "any") -> None:
        """Of every `every` packets, passes `after` and drops the next `burst`."""
        self._rule(number, protocol, f"numgen inc mod {every} {after}-{after + burst - 1} drop")

    def drop(self, number: int, *, protocol: Protocol = "any") -> None:
        self._rule(number, protocol, "drop")

    def deafen(self, number: int, other: int) -> None:
        """Drops packets from `other` to `number`, but not the reverse direction."""
        for match in (f"ip saddr {_ipv4(other)}", f"ip6 saddr {_ipv6(other)}"):
            self._rule(number, "any", f"{match} drop")

    def clear(self, number: int) -> None:
        """Removes all loss."""
        self._run("netns", "exec", self.names[number], _tool("nft"), f"flush chain {_TABLE} arriving")

    def _rule(self, number: int, protocol: Protocol, action: str) -> None:
        match = "" if protocol == "any" else f"meta l4proto {protocol} "
        # Loopback inside the namespace is not the wire.
        rule = f'add rule {_TABLE} arriving iifname "{_INTERFACE}" {match}{action}'
        self._run("netns", "exec", self.names[number], _tool("nft"), rule)

    # -- construction ----------------------------------------------------------------------------------

    def _make_namespace(self, name: str) -> None:
        self._run("netns", "add", name)
        self._stack.callback(self._run, "netns", "delete", name)

    def _join(self, near: str, interface: str, far: str, far_interface: str) -> None:
        ends = [interface, "mtu", str(self.mtu), "netns", near, "type", "veth"]
        self._run("link", "add", *ends, "peer", "name", far_interface, "mtu", str(self.mtu), "netns", far)

    def _join_by_bridge(self) -> None:
        self._make_namespace(self._switch)
        self._run("-n", self._switch, "link", "add", "bridge", "mtu", str(self.mtu), "type", "bridge")
        self._run("-n", self._switch, "link", "set", "bridge", "up")
        for number, name in enumerate(self.names):
            self._join(name, _INTERFACE, self._switch, f"port{number}")
            self._run("-n", self._switch, "link", "set", f"port{number}", "master", "bridge", "up")

    def _add_dead_end(self, number: int, name: str) -> None:
        """The far end is in the same namespace without an address: it accepts everything and answers nothing."""
        far = f"{_DEAD_END}-far"
        self._run("-n", name, "link", "add", _DEAD_END, "type", "veth", "peer", "name", far)
        if self._ipv4:
            self._run("-n", name, "address", "add", f"{_dead_end_ipv4(number)}/16", "dev", _DEAD_END)
        self._run("-n", name, "address", "add", f"{_dead_end_ipv6(number)}/64", "dev", _DEAD_END, "nodad")
        for interface in (_DEAD_END, far):
            self._run("-n", name, "link", "set", interface, "up")

    def _configure(self, number: int, name: str) -> None:
        if self._ipv4:
            self._run("-n", name, "address", "add", f"{_ipv4(number)}/16", "dev", _INTERFACE)
        self._run("-n", name, "address", "add", f"{_ipv6(number)}/64", "dev", _INTERFACE, "nodad")
        for interface in ("lo", _INTERFACE):
            self._run("-n", name, "link", "set", interface, "up")
        if not self._offload:
            features = [word for feature in ("tso", "gso", "gro") for word in (feature, "off")]
            self._run(
                "netns", "exec", name, _tool("ethtool"), "-K", _INTERFACE, *features, "tx-udp-segmentation", "off"
            )
        table = f"add table {_TABLE}; add chain {_TABLE} arriving {{ type filter hook input priority 0; }}"
        self._run("netns", "exec", name, _tool("nft"), table)

    def _run(self, *arguments: str) -> None:
        done = subprocess.run([_tool("ip"), *arguments], capture_output=True, text=True, check=False, timeout=30)
        if done.returncode:
            raise OSError(f"`ip {' '.join(arguments)}` failed: {(done.stderr or done.stdout).strip()}")


def _find(tool: str) -> str | None:
    """Searches the administrator's directories too."""
    return shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin")


def _tool(name: str) -> str:
    return _find(name) or name


def _ipv4(number: int) -> str:
    return f"10.77.0.{number + 1}"


def _ipv6(number: int) -> str:
    return f"fd77::{number + 1:x}"


def _dead_end_ipv4(number: int) -> str:
    return f"10.66.0.{number + 1}"


def _dead_end_ipv6(number: int) -> str:
    return f"fd66::{number + 1:x}"


@cache
def permitted() -> str | None:
    """Why namespaces cannot be used here; None if they can."""
    missing = [f"{tool} (package {package})" for tool, package in _TOOLS.items() if not _find(tool)]
    if missing:
        return f"network namespaces need {', '.join(missing)}"
    try:
        with NetworkNamespaces():
            return None
    except OSError as error:
        return f"network namespaces are not permitted here: {error}"
