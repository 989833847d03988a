"""The command `nexar doctor`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nexar.cli.cluster_options import NO_ENTRY, Ticket, entry_options, ticket_in
from nexar.cli.exit_codes import FAILED, GOOD, exit_code_of, print_message
from nexar.cli.progress_bar import counting
from nexar.environment import effective, inherited
from nexar.errors import ConfigError, UsageError
from nexar.launch.detect import detect
from nexar.transport.address import format_address

if TYPE_CHECKING:
    from nexar.cli.doctor.observations import DoctorFinding, Machine
    from nexar.cli.doctor.probe_session import ProbeResult
    from nexar.cluster.join_client import RankRequest
    from nexar.config import Config
    from nexar.launch.detect import LaunchInfo
    from nexar.security.invitation import Invitation


def doctor(
    *,
    ticket: Ticket = None,
    ticket_file: Annotated[Path | None, typer.Option(help="Read the ticket here (0600); --size writes it.")] = None,
    size: Annotated[int | None, typer.Option(help="Open a cluster of this many doctors, and print the ticket.")] = None,
    listen: Annotated[str | None, typer.Option(help="With --size: HOST:PORT to listen on; port 0: any.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find what prevents a cluster from working, and say what to change.

    Alone: versions, interfaces, ports, limits, round trips inside this machine. Between machines: run `nexar doctor
    --size N` on one of them, which prints the command for the others. The exit code is 0 if there is nothing to change,
    1 if there is.
    """

    def action() -> int:
        from nexar.cli.doctor.machine import inspect_machine  # noqa: PLC0415  # wrong options are rejected without loading it

        _check(size, listen, ticket)
        file_timeout = effective(NO_ENTRY).config.formation_timeout
        config = effective(entry_options(ticket, ticket_file, file_timeout=file_timeout) if size is None else {}).config
        launch_info = detect(inherited())
        own = None if size is None else _OwnSeed(size, listen, ticket_file)
        machine = inspect_machine(config)
        if own is None and not _is_invited(config, launch_info):
            return _report_machine(machine, as_json=as_json)
        with _invited(config, launch_info, own) as (invitation, rank_request):
            from nexar.cli.doctor.probe_session import probe_cluster  # noqa: PLC0415

            return _report_cluster(machine, probe_cluster(config, invitation, rank_request, machine), as_json=as_json)

    raise typer.Exit(exit_code_of(action))


@dataclass(frozen=True, slots=True)
class _OwnSeed:
    size: int
    listen: str | None
    ticket_file: Path | None

    @contextmanager
    def opened(self, config: Config) -> Iterator[Invitation]:
        from nexar.cluster.seed import SeedService  # noqa: PLC0415
        from nexar.security.invitation import parse_ticket  # noqa: PLC0415

        with (
            SeedService(self._listen_address(config), self.size, config=config) as seed,
            nullcontext() if self.ticket_file is None else ticket_in(self.ticket_file, seed.ticket),
        ):
            if self.size > 1:
                self._invite(seed.ticket)
            with counting("doctors", self.size, lambda: seed.board().joined):
                yield parse_ticket(seed.ticket)

    def _invite(self, ticket: str) -> None:
        if self.ticket_file is None:
            print_message(f"waiting for {self.size - 1} more; run this on the other hosts:")
            print_message(f"  nexar doctor --ticket {ticket}")
        else:
            others = "to the other hosts, and run there:"
            print_message(f"waiting for {self.size - 1} more; copy {self.ticket_file} {others}")
            print_message(f"  nexar doctor --ticket-file {self.ticket_file}")

    def _listen_address(self, config: Config) -> str | None:
        """The next port, if the settings fix the member's."""
        if self.listen is not None or not config.port:
            return self.listen
        return format_address(config.bind or "", config.port + 1)


def _check(size: int | None, listen: str | None, ticket: str | None) -> None:
    if size is not None and size < 1:
        raise ConfigError(variable="--size", value=size, allowed="a whole number, 1 or more")
    if size is not None and ticket is not None:
        raise UsageError("--size opens a cluster of doctors, --ticket joins one: give one of them")
    if listen is not None and size is None:
        raise UsageError("--listen says where --size opens the cluster: give both")


def _is_invited(config: Config, launch_info: LaunchInfo | None) -> bool:
    return config.ticket is not None or config.seed is not None or (launch_info is not None and launch_info.size > 1)


@contextmanager
def _invited(
    config: Config, launch_info: LaunchInfo | None, own: _OwnSeed | None
) -> Iterator[tuple[Invitation, RankRequest]]:
    from nexar.cluster.join_client import RankRequest  # noqa: PLC0415
    from nexar.launch.entry import choose_entry  # noqa: PLC0415
    from nexar.launch.init import open_entry  # noqa: PLC0415

    if own is not None:
        with own.opened(config) as invitation:
            yield invitation, RankRequest(rank=0)
        return
    rank_request = RankRequest() if launch_info is None else RankRequest(launch_info.rank, launch_info.launcher)
    with open_entry(choose_entry(launch_info, config, os.getppid()), config) as invitation:
        yield invitation, rank_request


def _report_machine(machine: Machine, *, as_json: bool) -> int:
    from nexar.cli.doctor import report  # noqa: PLC0415
    from nexar.cli.doctor.reachability import machine_findings  # noqa: PLC0415

    findings = machine_findings(machine)
    if as_json:
        print(report.report_json(machine, {}, findings))
    else:
        report.show_machine(machine)
        report.show_findings(findings)
    return _exit_code(findings)


def _report_cluster(machine: Machine, result: ProbeResult, *, as_json: bool) -> int:
    from nexar.cli.doctor import report  # noqa: PLC0415

    if as_json:
        print(report.report_json(machine, result.reports, result.findings))
    elif result.rank == 0 or not result.concluded:
        report.show_cluster(result.reports, result.size)
        report.show_findings(result.findings)
    else:
        verdict = "there is something to change" if _exit_code(result.findings) else "nothing to change"
        print_message(f"this was rank {result.rank} of {result.size}: {verdict}; rank 0 has the table")
    return _exit_code(result.findings)


def _exit_code(findings: list[DoctorFinding] | tuple[DoctorFinding, ...]) -> int:
    return FAILED if any(finding.needed for finding in findings) else GOOD
