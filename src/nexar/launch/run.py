"""One host's part of a cluster: a way in, a block of ranks, the processes, and the verdict.

The launcher is known to the seed by a line of its own: it reserves the ranks before it starts them, so that `RANK` is
what a rank will be, and it tells of the children that end. Without a ticket or token it opens the cluster itself, with
the seed as threads of this process.
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
    """What `nexar run` was asked for, checked."""

    count: int
    command: Command
    config: Config
    wishes: SupervisorOptions
    inherited: Mapping[str, str] = field(repr=False)
    first_rank: Rank | None = None
    when_open: Callable[["SeedService"], AbstractContextManager[None]] = lambda _: nullcontext()
    """Entered with the seed of a cluster that is opened here, and left before it closes."""


@dataclass(frozen=True, slots=True)
class ClusterEntry:
    """How the ranks get in: what it means to us, and the variables that tell them."""

    invitation: Invitation
    variables: Mapping[str, str] = field(repr=False)
    own: bool = False
    """The cluster is on this host only, and ours."""


def run_host(request: RunRequest, console: Console) -> int:
    """Run the ranks and wait for them. The exit code of it all; the reasons are on the console."""
    from nexar.cluster.seed_session import LauncherSession  # noqa: PLC0415  # what is wrong with the order is said at once
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
        ) as attendant,
    ):
        host, port = _master(entry, request.inherited)
        block = HostBlock(
            count=request.count,
            first_rank=attendant.first_rank,
            size=attendant.size,
            group_rank=attendant.group_rank or 0,
            launcher=attendant.node,
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
            request.wishes,
            console=console,
            cluster=attendant,
            mark=mark,
            failures=failures,
            alone=entry.own,
            stops=(request.wishes.on_failure or ("continue" if attendant.elastic else "stop")) == "stop",
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

        # Who may come later may come from elsewhere. Otherwise what is advertised concerns the ranks, not the seed.
        listen = None if config.elastic_enabled else f"{_LOOPBACK}:0"
        seen = config if config.elastic_enabled else dataclasses.replace(config, advertise=None)
        with SeedService(listen, request.count, config=seen) as seed, request.when_open(seed):
            yield ClusterEntry(parse_ticket(seed.ticket), {"NEXAR_TICKET": seed.ticket}, own=True)


def _master(entry: ClusterEntry, inherited: Mapping[str, str]) -> tuple[str, int]:
    """What MASTER_ADDR and MASTER_PORT say: a place for a store of torch on the host of rank 0, the same for all hosts.

    What the launcher inherited is passed on. Otherwise it is this host, or the seed's host, which is right
    where the seed runs beside rank 0. nexar itself does not use it.
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
    """Losses first, the failure last: the last lines are what people read."""
    for ending in result.lost:
        console.write("stderr", f"nexar: warning: {ending.who} {_describe_exit(ending)}\n".encode())
    if result.failed is not None:
        errors = supervisor.errors_of(result.failed)
        words = f"nexar: {result.failed.who} {result.failed}"
        console.write(
            "stderr", f"{words}, the first to fail:\n{errors}\n".encode() if errors else f"{words}\n".encode()
        )


def _describe_exit(ending: RankExit) -> str:
    return "came too late: nobody was left to let it in" if ending.came_too_late else f"{ending} and is lost"
