"""Plans the processes of this host: command lines and environments. Pure.

The variables are torchrun's, so programs for torchrun work. Members assign the rank of a process that joins a formed
cluster.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from nexar.errors import ConfigError, UsageError
from nexar.launch.detect import JOINER_VARIABLE, LAUNCHER_VARIABLE
from nexar.types import NodeId, Rank, format_node

MARK_VARIABLE = "NEXAR_LAUNCH"
"""Holds the same random text in every process of one launch, by which the guard finds them. NEXAR_LAUNCHER
(`launch.detect`) names the launcher.
"""

EXIT_PIPE_VARIABLE = "NEXAR_EXIT_PIPE"
"""Descriptor and inode of the pipe of `exit_report`."""

Form: TypeAlias = Literal["script", "module", "program"]


@dataclass(frozen=True, slots=True)
class Command:
    """The command that the user asked to run."""

    form: Form
    target: str
    arguments: tuple[str, ...] = ()

    def line(self, python: str) -> tuple[str, ...]:
        """Python runs unbuffered, so a dying rank's last output is not lost."""
        before = {"script": (python, "-u"), "module": (python, "-u", "-m"), "program": ()}[self.form]
        return (*before, self.target, *self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBlock:
    """`count` ranks from `first_rank`; None: all of them join later."""

    count: int
    first_rank: Rank | None = 0
    size: int
    group_rank: int = 0
    launcher: NodeId
    master_addr: str
    master_port: int

    @property
    def group_size(self) -> int:
        """If all hosts start as many ranks."""
        return max(-(-self.size // self.count), self.group_rank + 1)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One process to start."""

    rank: Rank | None
    """The rank of its first start; None: it joins a formed cluster."""
    local_rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)  # it holds the ticket
    restart: int = 0
    """How often it was restarted before."""

    @property
    def name(self) -> str:
        name = f"joiner {self.local_rank}" if self.rank is None else f"rank {self.rank}"
        return f"{name} restart {self.restart}" if self.restart else name

    @property
    def joins(self) -> bool:
        return JOINER_VARIABLE in self.environment

    @property
    def prefix(self) -> str:
        return f"[{self.name}] "

    def log_name(self, stream: Literal["stdout", "stderr"]) -> str:
        """Has the rank, so that hosts can share a directory."""
        return f"{self.name.replace(' ', '_')}.{stream}.log"

    def replacement_plan(self, *, as_joiner: bool) -> "RankPlan":
        """`as_joiner`: its rank is no longer free."""
        environment = _without_rank(self.environment) if as_joiner else self.environment
        return replace(self, environment=environment, restart=self.restart + 1)


def plan_ranks(
    block: HostBlock,
    command: Command,
    *,
    python: str,
    inherited: Mapping[str, str],
    entry: Mapping[str, str],
    mark: str,
) -> list[RankPlan]:
    """`entry`: the invitation's variables, which replace every inherited one."""
    base = {name: text for name, text in inherited.items() if name not in _INVITATION_VARIABLES} | dict(entry)
    return [_plan_rank(block, command.line(python), base, mark, local_rank) for local_rank in range(block.count)]


_INVITATION_VARIABLES = frozenset({"NEXAR_TICKET", "NEXAR_SEED", "NEXAR_CLUSTER_TOKEN"})


_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", LAUNCHER_VARIABLE)
"""Only processes that form the cluster have these."""


def _plan_rank(
    block: HostBlock, line: tuple[str, ...], base: Mapping[str, str], mark: str, local_rank: int
) -> RankPlan:
    rank = None if block.first_rank is None else block.first_rank + local_rank
    names = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": block.size,
        "LOCAL_WORLD_SIZE": block.count,
        "GROUP_RANK": block.group_rank,
        "GROUP_WORLD_SIZE": block.group_size,
        "MASTER_ADDR": block.master_addr,
        "MASTER_PORT": block.master_port,
        LAUNCHER_VARIABLE: format_node(block.launcher),
        MARK_VARIABLE: mark,
    }
    environment = {**base, **{name: str(value) for name, value in names.items()}}
    return RankPlan(rank, local_rank, line, _without_rank(environment) if rank is None else environment)


def _without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environment.items() if name not in _RANK_VARIABLES} | {JOINER_VARIABLE: "1"}


def parse_filter(text: str | None, count: int) -> frozenset[int]:
    """Parse local ranks such as `0,2`. Raise ConfigError."""
    if text is None:
        return frozenset(range(count))
    parts = [part.strip() for part in text.split(",")]
    chosen = frozenset(int(part) for part in parts if part.isascii() and part.isdigit())
    if len(chosen) < len(set(parts)) or not chosen or max(chosen) >= count:
        allowed = f"local ranks from 0 to {count - 1}, separated by commas"
        raise ConfigError(variable="--local-ranks-filter", value=text, allowed=allowed)
    return chosen


def choose_form(*, module: bool, no_python: bool) -> Form:
    """UsageError if both are given."""
    if module and no_python:
        raise UsageError("-m runs a module of Python, --no-python something that is not Python: give one of them")
    return "module" if module else "program" if no_python else "script"


def without_outer_launch(inherited: Mapping[str, str]) -> dict[str, str]:
    """Remove the outer cluster's variables and ticket, which a launcher started by a rank inherits."""
    if MARK_VARIABLE not in inherited:
        return dict(inherited)
    return {name: text for name, text in inherited.items() if name not in _LAUNCH_VARIABLES}


_LAUNCH_VARIABLES = _INVITATION_VARIABLES | {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    LAUNCHER_VARIABLE,
    JOINER_VARIABLE,
    MARK_VARIABLE,
    EXIT_PIPE_VARIABLE,
}
