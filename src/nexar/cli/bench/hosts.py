"""Where ranks run: this machine, or two hosts on it, network namespaces joined by virtual Ethernet.

Each namespace has a network of its own, so ranks in two of them meet only through the wire between them; both share
the machine's cores. Addresses are private and exist inside the namespaces alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final, NamedTuple

from nexar.errors import UsageError

_WIRE: Final = "wire"
_PATIENCE: Final = 30.0


class Host(NamedTuple):
    """Where processes are started, and how they are reached from the other one."""

    prefix: tuple[str, ...] = ()
    """Put before a command, it runs there."""
    address: str = "127.0.0.1"
    interface: str = "lo"


@contextmanager
def opened_hosts(count: int, mtu: int) -> Iterator[tuple[Host, ...]]:
    """One host, this machine itself, or two that are gone afterwards, whatever happened."""
    if count == 1:
        yield (Host(),)
        return
    if count != 2:
        raise UsageError(f"--hosts {count} cannot be made; 1 is this machine, 2 are joined by a wire")
    if shutil.which("ip") is None:
        raise UsageError("--hosts 2 needs the tool `ip` (package iproute2) to make network namespaces")
    if os.geteuid() != 0:
        raise UsageError("--hosts 2 makes network namespaces, which only root may: run it with sudo")
    with ExitStack() as stack:
        yield _joined(stack, mtu)


def _joined(stack: ExitStack, mtu: int) -> tuple[Host, Host]:
    first, second = (f"nexar-bench-{os.getpid()}-{number}" for number in range(2))
    for name in (first, second):
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "delete", name)  # its end of the wire goes with it
    near = ("link", "add", _WIRE, "mtu", str(mtu), "netns", first, "type", "veth")
    _ip(*near, "peer", "name", _WIRE, "mtu", str(mtu), "netns", second)
    for number, name in enumerate((first, second)):
        _ip("-n", name, "address", "add", f"{_address(number)}/16", "dev", _WIRE)
        for interface in ("lo", _WIRE):
            _ip("-n", name, "link", "set", interface, "up")
    ends = [Host(("ip", "netns", "exec", name), _address(n), _WIRE) for n, name in enumerate((first, second))]
    return ends[0], ends[1]


def _address(number: int) -> str:
    return f"10.78.0.{number + 1}"


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False, timeout=_PATIENCE)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise UsageError(f"--hosts 2 is not permitted here: `ip {' '.join(arguments)}` failed: {said}")
