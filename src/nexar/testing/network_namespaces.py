"""Hosts on one machine: network namespaces joined by virtual Ethernet, with an MTU and with weather.

Each namespace has a network stack of its own, so processes in two of them meet only through the wire between them.
Addresses are private and exist inside the namespaces alone; nothing of the machine's own network is touched.

    with NetworkNamespaces(mtu=9000) as network, PeerPair(left, right, places=network.places) as pair:
        network.lose(0, percent=2, protocol="udp")
        pair.results()

`ipv4=False` leaves IPv6 alone. `dead_end=True` gives every host a second interface, before the wire in every list, with
an address in one more network that all of them seem to share: what is sent there reaches nobody.

Weather falls on what *arrives* in a namespace. The kernel hands large sends over the wire in one piece (segmentation
offload), so one lost piece is up to 64 KiB; `offload=False` makes every packet as large as the MTU, as on a real wire.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from contextlib import ExitStack
from functools import cache
from typing import Final, Literal, Self

from nexar.testing.peer_protocol import HostSpec

Protocol = Literal["any", "tcp", "udp"]

_numbers = itertools.count()
_TABLE: Final = "inet nexar"
_INTERFACE: Final = "wire"
_DEAD_END: Final = "aside"
_TOOLS: Final = {"ip": "iproute2", "nft": "nftables", "ethtool": "ethtool"}


class NetworkNamespaces:
    """A `with` block in which `count` namespaces can reach one another; they are gone afterwards, whatever happened."""

    def __init__(
        self, count: int = 2, *, mtu: int = 1500, offload: bool = True, ipv4: bool = True, dead_end: bool = False
    ) -> None:
        self.mtu = mtu
        self._ipv4 = ipv4
        self._dead_end = dead_end
        self.names = [f"nexar-{os.getpid()}-{next(_numbers)}" for _ in range(count)]
        self._switch = f"nexar-{os.getpid()}-{next(_numbers)}"  # the namespace of the bridge, where there is one
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
                self._equip(number, name)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    # -- places ----------------------------------------------------------------------------------------

    @property
    def places(self) -> tuple[HostSpec, ...]:
        """Where processes run, by IPv4 where there is any."""
        return tuple(self.place(number, ipv6=not self._ipv4) for number in range(len(self.names)))

    def place(self, number: int, *, ipv6: bool = False) -> HostSpec:
        """Where processes of this namespace run: its address, and the command that enters it."""
        host = _ipv6(number) if ipv6 else _ipv4(number)
        return HostSpec(host, (_tool("ip"), "netns", "exec", self.names[number]))

    # -- weather ---------------------------------------------------------------------------------------

    def lose(self, number: int, percent: float, *, protocol: Protocol = "any") -> None:
        """Lose this share of the packets that arrive there, by chance."""
        self._rule(number, protocol, f"numgen random mod 10000 < {round(percent * 100)} drop")

    def lose_bursts(self, number: int, *, burst: int, every: int, after: int = 0, protocol: Protocol = "any") -> None:
        """Of each `every` packets that arrive there, let `after` pass and lose the next `burst`, one after the other.

        From the first packet on.
        """
        self._rule(number, protocol, f"numgen inc mod {every} {after}-{after + burst - 1} drop")

    def drop(self, number: int, *, protocol: Protocol = "any") -> None:
        """Let nothing of this protocol arrive there."""
        self._rule(number, protocol, "drop")

    def deafen(self, number: int, other: int) -> None:
        """Let nothing arrive there that comes from the other one. The other hears it as before."""
        for match in (f"ip saddr {_ipv4(other)}", f"ip6 saddr {_ipv6(other)}"):
            self._rule(number, "any", f"{match} drop")

    def clear(self, number: int) -> None:
        """Fair weather again."""
        self._run("netns", "exec", self.names[number], _tool("nft"), f"flush chain {_TABLE} arriving")

    def _rule(self, number: int, protocol: Protocol, verdict: str) -> None:
        match = "" if protocol == "any" else f"meta l4proto {protocol} "
        # Loopback inside the namespace is not the wire.
        rule = f'add rule {_TABLE} arriving iifname "{_INTERFACE}" {match}{verdict}'
        self._run("netns", "exec", self.names[number], _tool("nft"), rule)

    # -- building --------------------------------------------------------------------------------------

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
        """A wire whose far end is in the same namespace and has no address: it takes everything and answers nothing."""
        far = f"{_DEAD_END}-far"
        self._run("-n", name, "link", "add", _DEAD_END, "type", "veth", "peer", "name", far)
        if self._ipv4:
            self._run("-n", name, "address", "add", f"{_aside_ipv4(number)}/16", "dev", _DEAD_END)
        self._run("-n", name, "address", "add", f"{_aside_ipv6(number)}/64", "dev", _DEAD_END, "nodad")
        for interface in (_DEAD_END, far):
            self._run("-n", name, "link", "set", interface, "up")

    def _equip(self, number: int, name: str) -> None:
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
    """Where it is: also where only the administrator's search path leads, which a user's may lack."""
    return shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin")


def _tool(name: str) -> str:
    return _find(name) or name


def _ipv4(number: int) -> str:
    return f"10.77.0.{number + 1}"


def _ipv6(number: int) -> str:
    return f"fd77::{number + 1:x}"


def _aside_ipv4(number: int) -> str:
    return f"10.66.0.{number + 1}"


def _aside_ipv6(number: int) -> str:
    return f"fd66::{number + 1:x}"


@cache
def permitted() -> str | None:
    """Why namespaces cannot be used here; None if they can. Found out by making some."""
    missing = [f"{tool} (package {package})" for tool, package in _TOOLS.items() if not _find(tool)]
    if missing:
        return f"network namespaces need {', '.join(missing)}"
    try:
        with NetworkNamespaces():
            return None
    except OSError as error:
        return f"network namespaces are not permitted here: {error}"
