"""From what was seen on one machine to what to change there. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nexar.cli.doctor.observations import Finding, Machine

SOCKET_BUFFER_BYTES: Final = 4 << 20
"""What QUIC asks the system for: less, and bursts of datagrams are lost."""
OPEN_FILES: Final = 1024
"""A rank holds two or three descriptors for each peer it talks to."""
_BUSY: Final = 2.0
"""Processes per CPU."""
_WITHOUT_QUIC: Final = "until then TLS over TCP serves"


def machine_findings(machine: Machine) -> list[Finding]:
    """What to change on this machine, the gravest first; nothing if all is well."""
    found = [
        *_about_door(machine),
        *_about_trips(machine),
        *_about_interfaces(machine),
        *_about_versions(machine),
        *_about_limits(machine),
        *_about_load(machine),
    ]
    return sorted(found, key=lambda finding: not finding.needed)  # stable: equals keep their order


def _about_door(machine: Machine) -> Iterator[Finding]:
    if machine.door.problem:
        yield Finding(f"{machine.name} cannot listen: {machine.door.problem}")


def _about_trips(machine: Machine) -> Iterator[Finding]:
    for trip in machine.trips:
        if trip.round_trip is not None or not trip.problem:
            continue
        if trip.scheme == "shm":
            text = f"{machine.name} has no shared memory for its ranks: {trip.problem}; the network serves, more slowly"
            yield Finding(text, needed=False)
        else:
            remedy = "allow it on loopback, or leave it out of NEXAR_TRANSPORTS"
            yield Finding(f"{machine.name} cannot talk to itself over {trip.scheme}: {trip.problem}; {remedy}")


def _about_interfaces(machine: Machine) -> Iterator[Finding]:
    if not any(each.up and each.addresses and not each.loopback for each in machine.interfaces):
        text = f"{machine.name} has no network but loopback: no other host can reach it; bring an interface up"
        yield Finding(text, needed=False)


def _about_versions(machine: Machine) -> Iterator[Finding]:
    numbers = {version.name: version.number for version in machine.versions}
    problems = {version.name: version.problem for version in machine.versions}
    ours, quic = numbers.get("nexar"), numbers.get("nexar-quic")
    if "quic" not in machine.wanted:
        return
    if quic is None:
        reason = problems.get("nexar-quic") or "it is not installed"
        remedy = (
            f"`make setup` builds it in a clone where a Rust toolchain is, `make wheels` for others; {_WITHOUT_QUIC}"
        )
        yield Finding(f"{machine.name} has no QUIC ({reason}): {remedy}", needed=False)
    elif quic != ours:
        text = f"{machine.name} has nexar {ours} and nexar-quic {quic}: install the wheels of one version"
        yield Finding(text, needed=False)


def _about_limits(machine: Machine) -> Iterator[Finding]:
    limits = machine.limits
    if limits.open_files is not None and limits.open_files < OPEN_FILES:
        text = f"{machine.name} lets a process open {limits.open_files} files: `ulimit -n {4 * OPEN_FILES}`"
        yield Finding(text)
    small = {
        name: found
        for name, found in (("rmem_max", limits.receive_buffer_bytes), ("wmem_max", limits.send_buffer_bytes))
        if found is not None and found < SOCKET_BUFFER_BYTES
    }
    if small and "quic" in machine.wanted:
        sizes = " and ".join(f"net.core.{name} is {found}" for name, found in small.items())
        wishes = " ".join(f"net.core.{name}={SOCKET_BUFFER_BYTES}" for name in small)
        yield Finding(f"{machine.name}: {sizes}, QUIC loses bursts: `sysctl -w {wishes}`", needed=False)


def _about_load(machine: Machine) -> Iterator[Finding]:
    if machine.load > _BUSY * machine.cpus:
        text = f"{machine.name} is busy: {machine.load:.0f} processes want {machine.cpus} CPUs; stop some, or wait"
        yield Finding(text, needed=False)
