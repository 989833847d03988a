"""From who reached whom to what to change between hosts. Pure.

Ranks of one host share its network, so advice is about hosts: "a cannot be reached from b" is said once, however many
ranks found it out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from nexar.cli.doctor.advice import machine_findings
from nexar.cli.doctor.observations import Finding, Reach, Report
from nexar.transport.address import parse_address
from nexar.types import Rank

PROTOCOLS: Final = {"quic": "UDP", "tls": "TCP"}
"""What a firewall calls them."""
NOT_OFFERED: Final = "not offered"
"""The problem of a reach where the other side does not have the transport, or this one: no firewall is to blame."""
_SKEW: Final = 60.0
"""Certificates allow ten minutes; beyond this, logs of two hosts cannot be read side by side either."""


def cluster_findings(reports: Mapping[Rank, Report], size: int) -> list[Finding]:
    """What to change in a cluster of `size` ranks, of which these have reported; the gravest first."""
    hosts = _Hosts(reports)
    found = [
        *_about_silent(reports, size),
        *_about_pairs(hosts),
        *_about_clocks(reports),
        *(finding for host in hosts.names for finding in machine_findings(hosts.first(host).machine)),
    ]
    unique = dict.fromkeys((finding.text, finding.needed) for finding in found)
    return sorted((Finding(*each) for each in unique), key=lambda finding: not finding.needed)


def skews(reports: Mapping[Rank, Report]) -> dict[Rank, float]:
    """Seconds by which each rank's clock is ahead of rank 0's, as far as anybody could tell."""
    seen: dict[Rank, tuple[float, float]] = {}
    for reach in _reaches(reports):
        if reach.skew is None or reach.round_trip is None or 0 not in (reach.source, reach.dest):
            continue
        rank, ahead = (reach.dest, reach.skew) if reach.source == 0 else (reach.source, -reach.skew)
        if rank not in seen or reach.round_trip < seen[rank][0]:  # the shorter the trip, the less can hide in it
            seen[rank] = reach.round_trip, ahead
    return {0: 0.0} | {rank: ahead for rank, (_, ahead) in sorted(seen.items())}


class _Hosts:
    """Reports by host, in the order of ranks."""

    def __init__(self, reports: Mapping[Rank, Report]) -> None:
        self._reports = reports
        self.names: dict[str, list[Rank]] = {}
        for rank, report in sorted(reports.items()):
            self.names.setdefault(report.machine.host, []).append(rank)

    def first(self, host: str) -> Report:
        return self._reports[self.names[host][0]]

    def label(self, host: str) -> str:
        """Its name; with the id where two have the same."""
        name = self.first(host).machine.name
        alike = [other for other in self.names if self.first(other).machine.name == name]
        return f"{name} ({host})" if len(alike) > 1 else name

    def pairs(self) -> Iterator[tuple[str, str]]:
        names = list(self.names)
        return ((a, b) for index, a in enumerate(names) for b in names[index + 1 :])

    def failures(self, source: str, dest: str) -> dict[str, Reach]:
        """The first failed reach of each transport that both sides have."""
        failed: dict[str, Reach] = {}
        for reach in self._between(source, dest):
            if reach.round_trip is None and reach.problem != NOT_OFFERED:
                failed.setdefault(reach.scheme, reach)
        return failed

    def reached(self, source: str, dest: str) -> bool:
        return any(reach.round_trip is not None for reach in self._between(source, dest))

    def _between(self, source: str, dest: str) -> list[Reach]:
        dests = set(self.names[dest])
        return [reach for rank in self.names[source] for reach in self._reports[rank].reaches if reach.dest in dests]


def _about_pairs(hosts: _Hosts) -> Iterator[Finding]:
    for one, other in hosts.pairs():
        if not hosts.reached(one, other) and not hosts.reached(other, one):
            yield _parted(hosts, one, other)
        else:
            yield from _one_way(hosts, one, other)
            yield from _one_way(hosts, other, one)


def _parted(hosts: _Hosts, one: str, other: str) -> Finding:
    names = f"{hosts.label(one)} and {hosts.label(other)}"
    reasons = "; ".join(
        f"{PROTOCOLS.get(scheme, scheme)}: {reach.problem}" for scheme, reach in hosts.failures(one, other).items()
    )
    remedy = f"open {_port(hosts.first(other))} for UDP or TCP there, or choose the network with NEXAR_IFACE"
    return Finding(f"{names} cannot reach each other ({reasons or 'no transport in common'}): {remedy}")


def _one_way(hosts: _Hosts, source: str, dest: str) -> Iterator[Finding]:
    whole = hosts.reached(source, dest)
    for scheme, reach in hosts.failures(source, dest).items():
        protocol = PROTOCOLS.get(scheme, scheme)
        remedy = f"open {_port(hosts.first(dest))} for {protocol} there"
        if whole and scheme == "quic":
            remedy += ", or set NEXAR_TRANSPORTS=shm,tls"
        text = (
            f"{hosts.label(dest)} cannot be reached over {protocol} from {hosts.label(source)} "
            f"({reach.problem}): {remedy}"
        )
        # TCP is the way out where UDP is closed: without it all is well as long as UDP gets through.
        yield Finding(text, needed=scheme == "quic" or not whole)


def _port(report: Report) -> str:
    if report.fixed_port:
        return f"port {parse_address(report.address)[1]}"
    return "a port (fix it with NEXAR_PORT or NEXAR_PORT_RANGE)"


def _about_silent(reports: Mapping[Rank, Report], size: int) -> Iterator[Finding]:
    for rank in range(size):
        if rank not in reports:
            text = f"rank {rank} sent no report: see what its own doctor printed"
            yield Finding(text)


def _about_clocks(reports: Mapping[Rank, Report]) -> Iterator[Finding]:
    off: dict[str, float] = {}
    for rank, ahead in skews(reports).items():
        if abs(ahead) > _SKEW and rank in reports:
            off.setdefault(reports[rank].machine.name, ahead)
    for name, ahead in off.items():
        side = "ahead of" if ahead > 0 else "behind"
        first = reports[0].machine.name if 0 in reports else "rank 0"
        text = f"the clock of {name} is {abs(ahead):.0f} s {side} that of {first}: let both keep time by NTP"
        yield Finding(text)


def _reaches(reports: Mapping[Rank, Report]) -> Iterator[Reach]:
    for _, report in sorted(reports.items()):
        yield from report.reaches
