"""Looks at this machine: what is installed, how it is connected, what it lets a process have."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import ssl
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from nexar.cli.doctor.observations import Attachment, Door, Limits, Machine, Room, Version
from nexar.cli.doctor.round_trip import try_trip
from nexar.cluster.host_id import host_id
from nexar.cluster.interfaces import read_interfaces
from nexar.cluster.node import Node
from nexar.config import Config
from nexar.errors import NexarError
from nexar.transport.quic import available

_PACKAGES: Final = ("nexar", "numpy", "cryptography")
_MEMORY: Final = Path("/dev/shm")
_SYSTEM: Final = Path("/proc/sys/net/core")


def look_at_machine(config: Config) -> Machine:
    """All there is to see, in about a second. Listens, and connects to itself, for moments."""
    return Machine(
        name=socket.gethostname(),
        host=host_id(config),
        wanted=config.transports,
        versions=_versions(),
        interfaces=_attachments(),
        door=_door(config),
        trips=tuple(try_trip(scheme, config) for scheme in config.transports),
        memory=_memory(),
        limits=_limits(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        load=os.getloadavg()[0],
        clock=time.time(),
    )


def _versions() -> tuple[Version, ...]:
    packages = [Version(name, _installed(name)) for name in _PACKAGES]
    problem = available()
    quic = Version("nexar-quic", _installed("nexar-quic") if problem is None else None, problem or "")
    python = Version("python", platform.python_version())
    return (python, packages[0], quic, *packages[1:], Version("openssl", ssl.OPENSSL_VERSION.split()[1]))


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _attachments() -> tuple[Attachment, ...]:
    return tuple(
        Attachment(
            name=each.name,
            addresses=tuple(str(address) for address in each.addresses),
            mtu_bytes=each.mtu_bytes,
            up=each.up,
            loopback=any(address.is_loopback for address in each.addresses),
        )
        for each in read_interfaces()
    )


def _door(config: Config) -> Door:
    """Open it as `nexar.init` would. The settings may ask for what cannot be had; that is what we are here to say."""
    try:
        with Node(config) as node:
            told = next(iter(node.addresses().values()), ())
            return Door(node.listens_at, told)
    except NexarError as error:
        return Door(problem=str(error))


def _memory() -> Room | None:
    if not _MEMORY.is_dir():
        return None
    usage = shutil.disk_usage(_MEMORY)
    return Room(str(_MEMORY), usage.total, usage.free)


def _limits() -> Limits:
    import resource  # noqa: PLC0415 - not on every system

    def soft_and_hard(name: int) -> tuple[int | None, int | None]:
        soft, hard = resource.getrlimit(name)
        return (None if soft == resource.RLIM_INFINITY else soft), (None if hard == resource.RLIM_INFINITY else hard)

    open_files, most = soft_and_hard(resource.RLIMIT_NOFILE)
    return Limits(
        open_files=open_files,
        most_open_files=most,
        locked_bytes=soft_and_hard(resource.RLIMIT_MEMLOCK)[0],
        receive_buffer_bytes=_number(_SYSTEM / "rmem_max"),
        send_buffer_bytes=_number(_SYSTEM / "wmem_max"),
    )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except OSError:
        return None  # another system, or a namespace that hides it
