"""Derives findings from observations, by host. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from nexar.cli.doctor.observations import DoctorFinding, DoctorReport, Machine, Reach
from nexar.transport.address import parse_address
from nexar.transport.registry import capabilities_of, node_port_schemes
from nexar.types import Rank

SOCKET_BUFFER_BYTES: Final = 4 << 20
"""What QUIC asks the system for: with less, bursts of datagrams are lost."""
OPEN_FILES: Final = 1024
"""A rank holds two or three descriptors for each peer it talks to."""
_BUSY: Final = 2.0
"""Processes per CPU."""
_WITHOUT_QUIC: Final = "until then TLS over TCP serves"


def machine_findings(machine: Machine) -> list[DoctorFinding]:
    """Most important first."""
    found = [
        *_about_port(machine),
        *_about_trips(machine),
        *_about_interfaces(machine),
        *_about_versions(machine),
        *_about_limits(machine),
        *_about_load(machine),
    ]
    return sorted(found, key=lambda finding: not finding.needed)  # a stable sort


def _about_port(machine: Machine) -> Iterator[DoctorFinding]:
    if machine.door.problem:
        yield DoctorFinding(f"{machine.name} cannot listen: {machine.door.problem}")


def _about_trips(machine: Machine) -> Iterator[DoctorFinding]:
    for trip in machine.trips:
        if trip.round_trip is not None or not trip.problem:
            continue
        if capabilities_of(trip.scheme).shares_memory:
            text = f"{machine.name} has no shared memory for its ranks: {trip.problem}; the network serves, more slowly"
            yield DoctorFinding(text, needed=False)
        else:
            remedy = "allow it on loopback, or leave it out of NEXAR_TRANSPORTS"
            yield DoctorFinding(f"{machine.name} cannot talk to itself over {trip.scheme}: {trip.problem}; {remedy}")


def _about_interfaces(machine: Machine) -> Iterator[DoctorFinding]:
    if not any(each.up and each.addresses and not each.loopback for each in machine.interfaces):
        text = f"{machine.name} has no network but loopback: no other host can reach it; bring an interface up"
        yield DoctorFinding(text, needed=False)


def _about_versions(machine: Machine) -> Iterator[DoctorFinding]:
    numbers = {version.name: version.number for version in machine.versions}
    problems = {version.name: version.problem for version in machine.versions}
    ours, quic = numbers.get("nexar"), numbers.get("nexar-native")
    if "quic" not in machine.wanted:
        return
    if quic is None:
        reason = problems.get("nexar-native") or "it is not installed"
        remedy = (
            f"`make setup` builds it in a clone where a Rust toolchain is, `make wheels` for others; {_WITHOUT_QUIC}"
        )
        yield DoctorFinding(f"{machine.name} has no QUIC ({reason}): {remedy}", needed=False)
    elif quic != ours:
        text = f"{machine.name} has nexar {ours} and nexar-native {quic}: install the wheels of one version"
        yield DoctorFinding(text, needed=False)


def _about_limits(machine: Machine) -> Iterator[DoctorFinding]:
    limits = machine.limits
    if limits.open_files is not None and limits.open_files < OPEN_FILES:
        text = f"{machine.name} lets a process open {limits.open_files} files: `ulimit -n {4 * OPEN_FILES}`"
        yield DoctorFinding(text)
    small = {
        name: found
        for name, found in (("rmem_max", limits.receive_buffer_bytes), ("wmem_max", limits.send_buffer_bytes))
        if found is not None and found < SOCKET_BUFFER_BYTES
    }
    if small and "quic" in machine.wanted:
        sizes = " and ".join(f"net.core.{name} is {found}" for name, found in small.items())
        values = " ".join(f"net.core.{name}={SOCKET_BUFFER_BYTES}" for name in small)
        yield DoctorFinding(f"{machine.name}: {sizes}, QUIC loses bursts: `sysctl -w {values}`", needed=False)


def _about_load(machine: Machine) -> Iterator[DoctorFinding]:
    if machine.load > _BUSY * machine.cpus:
        text = f"{machine.name} is busy: {machine.load:.0f} processes want {machine.cpus} CPUs; stop some, or wait"
        yield DoctorFinding(text, needed=False)


PROTOCOLS: Final = node_port_schemes()
"""What a firewall calls them."""
_SKEW: Final = 60.0
"""Certificates allow ten minutes; beyond this, the logs of two hosts cannot be compared."""


def cluster_findings(reports: Mapping[Rank, DoctorReport], size: int) -> list[DoctorFinding]:
    """Most important first. `size` is that of the whole cluster."""
    hosts = _Hosts(reports)
    found = [
        *_about_silent(reports, size),
        *_about_pairs(hosts),
        *_about_clocks(reports),
        *(finding for host in hosts.names for finding in machine_findings(hosts.first(host).machine)),
    ]
    unique = dict.fromkeys((finding.text, finding.needed) for finding in found)
    return sorted((DoctorFinding(*each) for each in unique), key=lambda finding: not finding.needed)


def skews(reports: Mapping[Rank, DoctorReport]) -> dict[Rank, float]:
    """Return how many seconds each clock is ahead of rank 0's."""
    seen: dict[Rank, tuple[float, float]] = {}
    for reach in _reaches(reports):
        if reach.skew is None or reach.round_trip is None or 0 not in (reach.source, reach.dest):
            continue
        rank, ahead = (reach.dest, reach.skew) if reach.source == 0 else (reach.source, -reach.skew)
        if rank not in seen or reach.round_trip < seen[rank][0]:  # a shorter round trip bounds the skew better
            seen[rank] = reach.round_trip, ahead
    return {0: 0.0} | {rank: ahead for rank, (_, ahead) in sorted(seen.items())}


class _Hosts:
    def __init__(self, reports: Mapping[Rank, DoctorReport]) -> None:
        self._reports = reports
        self.names: dict[str, list[Rank]] = {}
        for rank, report in sorted(reports.items()):
            self.names.setdefault(report.machine.host, []).append(rank)

    def first(self, host: str) -> DoctorReport:
        return self._reports[self.names[host][0]]

    def label(self, host: str) -> str:
        """With the id if two hosts have the same name."""
        name = self.first(host).machine.name
        alike = [other for other in self.names if self.first(other).machine.name == name]
        return f"{name} ({host})" if len(alike) > 1 else name

    def pairs(self) -> Iterator[tuple[str, str]]:
        names = list(self.names)
        return ((a, b) for index, a in enumerate(names) for b in names[index + 1 :])

    def failures(self, source: str, dest: str) -> dict[str, Reach]:
        failed: dict[str, Reach] = {}
        for reach in self._between(source, dest):
            if reach.round_trip is None and reach.offered:
                failed.setdefault(reach.scheme, reach)
        return failed

    def reached(self, source: str, dest: str) -> bool:
        return any(reach.round_trip is not None for reach in self._between(source, dest))

    def _between(self, source: str, dest: str) -> list[Reach]:
        dests = set(self.names[dest])
        return [reach for rank in self.names[source] for reach in self._reports[rank].reaches if reach.dest in dests]


def _about_pairs(hosts: _Hosts) -> Iterator[DoctorFinding]:
    for one, other in hosts.pairs():
        if not hosts.reached(one, other) and not hosts.reached(other, one):
            yield _unreachable(hosts, one, other)
        else:
            yield from _one_way(hosts, one, other)
            yield from _one_way(hosts, other, one)


def _unreachable(hosts: _Hosts, one: str, other: str) -> DoctorFinding:
    names = f"{hosts.label(one)} and {hosts.label(other)}"
    reasons = "; ".join(
        f"{PROTOCOLS.get(scheme, scheme)}: {reach.problem}" for scheme, reach in hosts.failures(one, other).items()
    )
    remedy = f"open {_port(hosts.first(other))} for UDP or TCP there, or choose the network with NEXAR_IFACE"
    return DoctorFinding(f"{names} cannot reach each other ({reasons or 'no transport in common'}): {remedy}")


def _one_way(hosts: _Hosts, source: str, dest: str) -> Iterator[DoctorFinding]:
    whole = hosts.reached(source, dest)
    for scheme, reach in hosts.failures(source, dest).items():
        protocol = PROTOCOLS.get(scheme, scheme)
        remedy = f"open {_port(hosts.first(dest))} for {protocol} there"
        if whole and protocol == "UDP":
            remedy += ", or set NEXAR_TRANSPORTS=shm,tls"
        text = (
            f"{hosts.label(dest)} cannot be reached over {protocol} from {hosts.label(source)} "
            f"({reach.problem}): {remedy}"
        )
        # TCP is the fallback if UDP is closed: it is not needed as long as UDP works.
        yield DoctorFinding(text, needed=protocol == "UDP" or not whole)


def _port(report: DoctorReport) -> str:
    if report.fixed_port:
        return f"port {parse_address(report.address)[1]}"
    return "a port (fix it with NEXAR_PORT or NEXAR_PORT_RANGE)"


def _about_silent(reports: Mapping[Rank, DoctorReport], size: int) -> Iterator[DoctorFinding]:
    for rank in range(size):
        if rank not in reports:
            text = f"rank {rank} sent no report: see what its own doctor printed"
            yield DoctorFinding(text)


def _about_clocks(reports: Mapping[Rank, DoctorReport]) -> Iterator[DoctorFinding]:
    off: dict[str, float] = {}
    for rank, ahead in skews(reports).items():
        if abs(ahead) > _SKEW and rank in reports:
            off.setdefault(reports[rank].machine.name, ahead)
    for name, ahead in off.items():
        side = "ahead of" if ahead > 0 else "behind"
        first = reports[0].machine.name if 0 in reports else "rank 0"
        text = f"the clock of {name} is {abs(ahead):.0f} s {side} that of {first}: let both keep time by NTP"
        yield DoctorFinding(text)


def _reaches(reports: Mapping[Rank, DoctorReport]) -> Iterator[Reach]:
    for _, report in sorted(reports.items()):
        yield from report.reaches
