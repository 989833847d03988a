"""`nexar run` on one host: joins or opens a cluster, runs the ranks, and reports the result.

The launcher reserves ranks at the seed before it starts them, so `RANK` is right. Without a ticket or token it runs
the seed itself.
"""

import dataclasses
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nexar.config import Config
from nexar.errors import ConfigError
from nexar.launch.entry import needed_token
from nexar.launch.event_sources import Mailbox
from nexar.launch.output import Console
from nexar.launch.plan import Command, HostBlock, plan_ranks
from nexar.launch.run_result import LaunchResult, RankExit
from nexar.launch.stop_policy import RankFailure
from nexar.launch.supervisor import Supervisor, SupervisorOptions
from nexar.security.invitation import Invitation, invitation_from_token, parse_ticket
from nexar.transport.address import parse_address
from nexar.types import Rank

if TYPE_CHECKING:
    from nexar.cluster.seed import SeedService
    from nexar.wire.join import RunFailed

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """The checked arguments of `nexar run`."""

    count: int
    command: Command
    config: Config
    options: SupervisorOptions
    inherited: Mapping[str, str] = field(repr=False)
    first_rank: Rank | None = None
    when_open: Callable[["SeedService"], AbstractContextManager[None]] = lambda _: nullcontext()
    """Entered with the seed if the cluster is opened here, and left before the seed closes."""


@dataclass(frozen=True, slots=True)
class ClusterEntry:
    """The invitation, and the variables that pass it to the ranks."""

    invitation: Invitation
    variables: Mapping[str, str] = field(repr=False)
    own: bool = False
    """This launcher opened the cluster, for this host only."""


def run_host(request: RunRequest, console: Console) -> int:
    """Run the ranks to their end. Returns the exit code."""
    from nexar.cluster.seed_session import LauncherSession  # noqa: PLC0415  # wrong arguments are rejected without loading it
    from nexar.cluster.wait_notice import tell_on_stderr  # noqa: PLC0415

    failures: Mailbox[RankFailure] = Mailbox()
    with (
        failures,
        _opened(request) as entry,
        LauncherSession(
            entry.invitation,
            request.count,
            request.config,
            first_rank=request.first_rank,
            tell=tell_on_stderr,
            on_run_failed=lambda message: failures.put(_failure(message)),
        ) as session,
    ):
        host, port = _master(entry, request.inherited)
        block = HostBlock(
            count=request.count,
            first_rank=session.first_rank,
            size=session.size,
            group_rank=session.group_rank or 0,
            launcher=session.node,
            master_addr=host,
            master_port=port,
        )
        mark = secrets.token_hex(8)
        plans = plan_ranks(
            block,
            request.command,
            python=sys.executable,
            inherited=request.inherited,
            entry=entry.variables,
            mark=mark,
        )
        supervisor = Supervisor(
            plans,
            request.options,
            console=console,
            cluster=session,
            mark=mark,
            failures=failures,
            alone=entry.own,
            stops=(request.options.on_failure or ("continue" if session.elastic else "stop")) == "stop",
        )
        result = supervisor.run()
    _explain(result, supervisor, console)
    return result.exit_code


def _failure(message: "RunFailed") -> RankFailure:
    return RankFailure(
        message.rank, f"rank {message.rank}", message.cause, message.code, message.consequence, host=message.host
    )


@contextmanager
def _opened(request: RunRequest) -> Iterator[ClusterEntry]:
    config = request.config
    if config.ticket is not None:
        yield ClusterEntry(parse_ticket(config.ticket), {"NEXAR_TICKET": config.ticket})
    elif config.seed is not None:
        token = needed_token(config, "NEXAR_SEED")
        variables = {"NEXAR_SEED": config.seed, "NEXAR_CLUSTER_TOKEN": token}
        yield ClusterEntry(invitation_from_token(token, [config.seed]), variables)
    else:
        from nexar.cluster.seed import SeedService  # noqa: PLC0415  # only the host that opens the cluster needs it

        # Joiners of an elastic cluster may come from other hosts. Otherwise the advertised address is for the ranks,
        # not for the seed.
        listen = None if config.elastic_enabled else f"{_LOOPBACK}:0"
        seen = config if config.elastic_enabled else dataclasses.replace(config, advertise=None)
        with SeedService(listen, request.count, config=seen) as seed, request.when_open(seed):
            yield ClusterEntry(parse_ticket(seed.ticket), {"NEXAR_TICKET": seed.ticket}, own=True)


def _master(entry: ClusterEntry, inherited: Mapping[str, str]) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT for torch's store on rank 0's host. Inherited values win. The seed's host is right
    if the seed runs beside rank 0.
    """
    if entry.own:
        host, port = _LOOPBACK, _free_port()
    else:
        host, seed_port = parse_address(entry.invitation.addresses[0])
        port = min(seed_port + 1, 65535)
    return inherited.get("MASTER_ADDR") or host, _port(inherited.get("MASTER_PORT"), port)


def _port(text: str | None, default: int) -> int:
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        raise ConfigError(variable="MASTER_PORT", value=text, allowed="a port, 1 to 65535")
    return int(text)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _explain(result: LaunchResult, supervisor: Supervisor, console: Console) -> None:
    """The failure last: users read the last lines."""
    for ending in result.lost:
        console.write("stderr", f"nexar: warning: {ending.who} {_describe_exit(ending)}\n".encode())
    if result.failed is not None:
        errors = supervisor.errors_of(result.failed)
        headline = f"nexar: {result.failed.who} {result.failed}"
        console.write(
            "stderr", f"{headline}, the first to fail:\n{errors}\n".encode() if errors else f"{headline}\n".encode()
        )


def _describe_exit(ending: RankExit) -> str:
    return "came too late: no member was left to admit it" if ending.came_too_late else f"{ending} and is lost"
