"""Which door a process comes in by: decided from its settings and its launcher alone. Pure.

A ticket, or the seed's address with the token, is a door whoever started the process. Without them somebody has to open
one, and that is rank 0, with a seed in a process of its own:

- all ranks on one host: its ticket passes through a private file, whose name all ranks derive from the job;
- more hosts: it listens on the host of rank 0, on a port all ranks compute alike, and the secret is the token.

The port, which must be free on the host of rank 0 and open between the hosts, is the first of these that is known: the
last port of NEXAR_PORT_RANGE (members take the first free one), NEXAR_PORT + 1 (a member takes that), MASTER_PORT + 1
(torch's store takes that), a port in 20000..29999 that follows from the job's identity, so that two jobs on one host
seldom meet, and where the launcher gives no identity (a pod has its host for itself) 29501.
"""

import hashlib
from dataclasses import dataclass, field
from typing import TypeAlias

from nexar.config import Config
from nexar.errors import ConfigError, UsageError
from nexar.launch.detect import LaunchInfo
from nexar.types import Rank

_LAST_PORT = 65535
_USUAL_PORT = 29_501


@dataclass(frozen=True, slots=True)
class ByTicket:
    """The cluster has a seed, and this is its ticket."""

    ticket: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ByToken:
    """The cluster has a seed at this address, and this is the secret."""

    token: str = field(repr=False)
    address: str


@dataclass(frozen=True, slots=True)
class ByFile:
    """All ranks are here. Rank 0 opens the cluster and leaves the ticket in a file of this name."""

    name: str
    size: int
    opens: bool


@dataclass(frozen=True, slots=True)
class ByRankZero:
    """Rank 0 opens the cluster at an address all ranks know."""

    token: str = field(repr=False)
    host: str
    port: int
    size: int
    opens: bool


Entry: TypeAlias = ByTicket | ByToken | ByFile | ByRankZero


def choose_entry(start: LaunchInfo | None, config: Config, parent: int) -> Entry:
    """The door for this process. `parent`: the id of the process that started it.

    ConfigError or UsageError, with the remedy, where there is none.
    """
    if config.ticket is not None:
        return ByTicket(config.ticket)
    if config.seed is not None:
        return ByToken(needed_token(config, "NEXAR_SEED"), config.seed)
    if start is None:
        raise _nobody(config)
    if start.kind == "nexar":
        allowed = "what the launcher set: it reaches the ranks through their environment"
        raise ConfigError(variable="NEXAR_TICKET", value="", allowed=allowed, hint="do not clear it in the script")
    opens = start.rank == _OPENER
    if start.on_one_host:
        return ByFile(_file_name(start, parent), start.size, opens)
    token = needed_token(config, f"ranks on several hosts, started by {start.kind}")
    return ByRankZero(token, _host(start), rank_zero_port(start, config), start.size, opens)


_OPENER: Rank = 0


def rank_zero_port(start: LaunchInfo, config: Config) -> int:
    """The port of the seed that rank 0 opens; the same on every rank of a job."""
    if config.port_range is not None:
        return config.port_range[1]
    taken = config.port or start.master_port
    if taken:
        return taken + 1 if taken < _LAST_PORT else taken - 1
    if start.job is None:
        return _USUAL_PORT
    digest = hashlib.sha256(start.job.encode()).digest()
    return 20_000 + int.from_bytes(digest[:4], "big") % 10_000


def _file_name(start: LaunchInfo, parent: int) -> str:
    """The same for all ranks of one start, and for no other start of this user on this host."""
    identity = start.job or f"parent {parent}"
    return hashlib.sha256(f"{start.kind} {start.size} {identity}".encode()).hexdigest()[:32]


def _host(start: LaunchInfo) -> str:
    if start.master_addr is None:
        allowed = "the name or address of the host of rank 0"
        hint = "or start a seed there with `nexar seed` and set NEXAR_SEED=HOST:PORT"
        raise ConfigError(variable="MASTER_ADDR", value="", allowed=allowed, hint=hint)
    return start.master_addr


def needed_token(config: Config, reason: str) -> str:
    """The cluster's token, needed with `reason`. ConfigError if there is none."""
    if config.cluster_token is None:
        allowed = f"the cluster's secret, the same for all ranks, needed with {reason}"
        hint = "make one with `python3 -c 'import secrets; print(secrets.token_hex(32))'`"
        raise ConfigError(variable="NEXAR_CLUSTER_TOKEN", value="", allowed=allowed, hint=hint)
    return config.cluster_token


def _nobody(config: Config) -> ConfigError | UsageError:
    if config.cluster_token is not None:
        allowed = "HOST:PORT of the seed, needed beside NEXAR_CLUSTER_TOKEN"
        return ConfigError(variable="NEXAR_SEED", value="", allowed=allowed, hint="start one with `nexar seed`")
    return UsageError(
        "no launcher started this process, and it has no ticket: start it with `nexar run -n 4 SCRIPT` (torchrun, "
        "srun, mpiexec and Kubernetes indexed jobs are known too), or set NEXAR_TICKET to what `nexar seed` printed"
    )
