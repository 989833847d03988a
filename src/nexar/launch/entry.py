"""Chooses how a process gets its invitation, from its settings and its launcher alone. Pure.

A ticket, or the seed's address with the token, is used first. Otherwise rank 0 starts a seed. On one host the ticket
passes through a private file, named after the job. On several hosts all ranks compute the same seed port, and the token
is the secret.

The port is the first known of: the last port of NEXAR_PORT_RANGE (members take the first free one), NEXAR_PORT + 1,
MASTER_PORT + 1 (torch's store has MASTER_PORT), a port in 20000..29999 derived from the job, so that two jobs on one
host seldom collide, and 29501 (a pod does not share its host).
"""

import hashlib
from dataclasses import dataclass, field
from typing import TypeAlias

from nexar.config import Config
from nexar.errors import ConfigError, UsageError
from nexar.launch.detect import KNOWN_LAUNCHERS, LaunchInfo
from nexar.types import Rank

_LAST_PORT = 65535
_DEFAULT_PORT = 29_501


@dataclass(frozen=True, slots=True)
class ByTicket:
    """The ticket is set."""

    ticket: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ByToken:
    """The seed's address and the token are set."""

    token: str = field(repr=False)
    address: str


@dataclass(frozen=True, slots=True)
class ByFile:
    """Rank 0 writes the ticket to this file."""

    name: str
    size: int
    starts_seed: bool


@dataclass(frozen=True, slots=True)
class BySeedOfRankZero:
    """Rank 0 opens the cluster at this address."""

    token: str = field(repr=False)
    host: str
    port: int
    size: int
    starts_seed: bool


Entry: TypeAlias = ByTicket | ByToken | ByFile | BySeedOfRankZero


def choose_entry(launch_info: LaunchInfo | None, config: Config, parent: int) -> Entry:
    """Raise ConfigError or UsageError, with the remedy, if the process cannot join. `parent`: parent process id."""
    if config.ticket is not None:
        return ByTicket(config.ticket)
    if config.seed is not None:
        return ByToken(needed_token(config, "NEXAR_SEED"), config.seed)
    if launch_info is None:
        raise _no_launcher(config)
    if launch_info.kind == "nexar":
        allowed = "what the launcher set: it reaches the ranks through their environment"
        raise ConfigError(variable="NEXAR_TICKET", value="", allowed=allowed, hint="do not clear it in the script")
    starts_seed = launch_info.rank == _SEED_RANK
    if launch_info.on_one_host:
        return ByFile(_file_name(launch_info, parent), launch_info.size, starts_seed)
    token = needed_token(config, f"ranks on several hosts, started by {launch_info.kind}")
    return BySeedOfRankZero(
        token, _host(launch_info), rank_zero_port(launch_info, config), launch_info.size, starts_seed
    )


_SEED_RANK: Rank = 0


def rank_zero_port(launch_info: LaunchInfo, config: Config) -> int:
    """Equal on every rank of a job."""
    if config.port_range is not None:
        return config.port_range[1]
    taken = config.port or launch_info.master_port
    if taken:
        return taken + 1 if taken < _LAST_PORT else taken - 1
    if launch_info.job is None:
        return _DEFAULT_PORT
    digest = hashlib.sha256(launch_info.job.encode()).digest()
    return 20_000 + int.from_bytes(digest[:4], "big") % 10_000


def _file_name(launch_info: LaunchInfo, parent: int) -> str:
    """Equal for all ranks of one launch, and for no other launch of this user here."""
    identity = launch_info.job or f"parent {parent}"
    return hashlib.sha256(f"{launch_info.kind} {launch_info.size} {identity}".encode()).hexdigest()[:32]


def _host(launch_info: LaunchInfo) -> str:
    if launch_info.master_addr is None:
        allowed = "the name or address of the host of rank 0"
        hint = "or start a seed there with `nexar seed` and set NEXAR_SEED=HOST:PORT"
        raise ConfigError(variable="MASTER_ADDR", value="", allowed=allowed, hint=hint)
    return launch_info.master_addr


def needed_token(config: Config, reason: str) -> str:
    """Return the token. Raise ConfigError with `reason` if it is not set."""
    if config.cluster_token is None:
        allowed = f"the cluster's secret, the same for all ranks, needed with {reason}"
        hint = "make one with `python3 -c 'import secrets; print(secrets.token_hex(32))'`"
        raise ConfigError(variable="NEXAR_CLUSTER_TOKEN", value="", allowed=allowed, hint=hint)
    return config.cluster_token


def _no_launcher(config: Config) -> ConfigError | UsageError:
    if config.cluster_token is not None:
        allowed = "HOST:PORT of the seed, needed beside NEXAR_CLUSTER_TOKEN"
        return ConfigError(variable="NEXAR_SEED", value="", allowed=allowed, hint="start one with `nexar seed`")
    return UsageError(
        "no launcher started this process, and it has no ticket: start it with `nexar run -n 4 SCRIPT` "
        f"({KNOWN_LAUNCHERS} are known too), or set NEXAR_TICKET to what `nexar seed` printed"
    )
