"""One doctor's visit to a cluster of doctors: join, dial everybody, and let rank 0 conclude."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nexar.cli.doctor.consultation import Consultation, patience
from nexar.cli.doctor.observations import Finding, Machine, Report
from nexar.cli.doctor.reachability import cluster_findings
from nexar.cluster.node import Node
from nexar.cluster.wait_notice import tell_on_stderr
from nexar.cluster.worker import Place, Worker
from nexar.config import Config
from nexar.security.invitation import Invitation
from nexar.types import Rank

_FIRST: Final[Rank] = 0
_GRACE: Final = 5.0


@dataclass(frozen=True, slots=True)
class Visit:
    """What came of it. `reports` are those this doctor has: of all at rank 0, of itself elsewhere."""

    rank: Rank
    size: int
    reports: Mapping[Rank, Report]
    findings: tuple[Finding, ...]
    concluded: bool
    """By rank 0. If not, it could not be told, and the findings are this doctor's alone."""


def visit(config: Config, invitation: Invitation, place: Place, machine: Machine) -> Visit:
    """JoinRefused, SeedUnreachable, FormationTimeout if there is no cluster to visit."""
    with Node(config) as node:
        consultation = Consultation(node)
        node.listen(consultation)
        joined = Worker(node, invitation, timeout=config.formation_timeout, tell=tell_on_stderr).join(place)
        try:
            rank, size = consultation.adopt(joined.membership), joined.membership.size
            address = next(iter(node.addresses().values()))[0]
            fixed = bool(config.port or config.port_range)
            report = Report(rank, machine, address, fixed, consultation.examine(rank))
            return _conclude(consultation, report, size) if rank == _FIRST else _hand_over(consultation, report, size)
        finally:
            consultation.close()
            joined.line.leave("the doctor is done")


def _conclude(consultation: Consultation, report: Report, size: int) -> Visit:
    reports = consultation.collect(report, patience(size))
    findings = tuple(cluster_findings(reports, size))
    consultation.conclude(findings)
    return Visit(report.rank, size, reports, findings, concluded=True)


def _hand_over(consultation: Consultation, report: Report, size: int) -> Visit:
    reports = {report.rank: report}
    findings = consultation.hand_over(report, patience(size) + _GRACE)
    if findings is not None:
        return Visit(report.rank, size, reports, findings, concluded=True)
    lonely = Finding("rank 0 could not be told: neither it nor this doctor reaches the other, see the table above")
    return Visit(report.rank, size, reports, (lonely, *cluster_findings(reports, 0)), concluded=False)
