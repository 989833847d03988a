"""Inspects this machine: software, interfaces, limits, and connections inside this process."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import ssl
import time
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from nexar.cli.doctor.observations import Attachment, FreeSpace, Limits, ListenPort, Machine, RoundTrip, Version
from nexar.cli.doctor.probe_session import DIAL_TIMEOUT, ProbeConnection, ProbeSession
from nexar.cluster.host import host_id, read_interfaces
from nexar.cluster.membership import Member, Membership
from nexar.cluster.node import Node
from nexar.config import Config
from nexar.errors import NexarError
from nexar.security.authority import Authority, make_credentials
from nexar.security.certificates import Trust, fingerprint
from nexar.transport.base import Carrier, CarrierLost, ConnectRefused
from nexar.transport.quic import missing_support
from nexar.transport.registry import capabilities_of, why_unavailable

_CLUSTER: Final = "doctor"
_LOOPBACK: Final = "127.0.0.1"


def try_round_trip(scheme: str, config: Config) -> RoundTrip:
    """Use loopback or shared memory. Returns a failure, never raises.

    A transport of another package is dialed at the address that it advertises.
    """
    missing = why_unavailable(scheme)
    if missing is not None:
        is_memory = capabilities_of(scheme).shares_memory
        return RoundTrip(scheme, problem=missing if is_memory else "")  # the versions show a missing package
    schemes = (scheme,) if capabilities_of(scheme).node_port else (scheme, "tls")
    alone = replace(
        config, transports=schemes, bind=_LOOPBACK, port=0, port_range=None, iface=None, advertise=None, host_id=None
    )
    try:
        with ExitStack() as stack:
            near, far = (stack.enter_context(Node(alone)) for _ in range(2))
            return RoundTrip(scheme, round_trip=_exchange(near, far, scheme, stack))
    except (ConnectRefused, CarrierLost, OSError, NexarError) as error:
        return RoundTrip(scheme, problem=getattr(error, "reason", None) or str(error))


def _exchange(near: Node, far: Node, scheme: str, stack: ExitStack) -> float:
    membership = _certified(near, far)
    asking, answering = ProbeSession(near), ProbeSession(far)
    for node, session in ((near, asking), (far, answering)):
        node.listen(session)
        session.adopt(membership)
    stack.callback(answering.close)
    stack.callback(asking.close)
    deadline = time.monotonic() + DIAL_TIMEOUT
    if capabilities_of(scheme).shares_memory:
        carrier = near.connect_memory(far.memory_address_for(near.id), far.id, deadline)
        return _measure(carrier, deadline, stack)
    reach = asking.dial(0, 1, scheme)
    if reach.round_trip is None:
        raise ConnectRefused(_LOOPBACK, reach.problem)
    return reach.round_trip


def _measure(carrier: Carrier, deadline: float, stack: ExitStack) -> float:
    connection = ProbeConnection(carrier, lambda _connection, _message: None)
    stack.callback(connection.finish)
    return connection.measure(deadline).round_trip


def _certified(*nodes: Node) -> Membership:
    authority = Authority.create(_CLUSTER)
    for node in nodes:
        certificate = authority.issue(node.id, node.key.public_key())
        node.certify(make_credentials(node.id, _CLUSTER, node.key, certificate), Trust(authority.certificate_pem))
    members = (Member(node.id, node.host, fingerprint(node.key.public_key()), node.addresses()) for node in nodes)
    return Membership(_CLUSTER, 1, tuple(members))


_PACKAGES: Final = ("nexar", "numpy", "cryptography")
_MEMORY: Final = Path("/dev/shm")
_SYSTEM: Final = Path("/proc/sys/net/core")


def inspect_machine(config: Config) -> Machine:
    """Takes about a second; listens, and connects to itself."""
    return Machine(
        name=socket.gethostname(),
        host=host_id(config),
        wanted=config.transports,
        versions=_versions(),
        interfaces=_attachments(),
        door=_listen_port(config),
        trips=tuple(try_round_trip(scheme, config) for scheme in config.transports),
        memory=_memory(),
        limits=_limits(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        load=os.getloadavg()[0],
        clock=time.time(),
    )


def _versions() -> tuple[Version, ...]:
    packages = [Version(name, _installed(name)) for name in _PACKAGES]
    problem = missing_support()
    quic = Version("nexar-native", _installed("nexar-native") if problem is None else None, problem or "")
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


def _listen_port(config: Config) -> ListenPort:
    try:
        with Node(config) as node:
            advertised = next(iter(node.addresses().values()), ())
            return ListenPort(node.listens_at, advertised)
    except NexarError as error:
        return ListenPort(problem=str(error))


def _memory() -> FreeSpace | None:
    if not _MEMORY.is_dir():
        return None
    usage = shutil.disk_usage(_MEMORY)
    return FreeSpace(str(_MEMORY), usage.total, usage.free)


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
