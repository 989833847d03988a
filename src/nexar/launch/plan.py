"""What to start on this host: for each rank a command line and an environment. Pure.

The names are those torchrun sets, so that programs written for it find their place. Ours come on top: the way in
(a ticket, or the token and the seed's address), the launcher's node id, and a mark that all processes of one launch
share and no others have. Who is to join a cluster that has formed gets no rank: its members give it one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from nexar.errors import ConfigError, UsageError
from nexar.launch.detect import JOINER_VARIABLE, LAUNCHER_VARIABLE
from nexar.types import NodeId, Rank, format_node

MARK_VARIABLE = "NEXAR_LAUNCH"
"""The same random text in every process of one launch."""

EXIT_PIPE_VARIABLE = "NEXAR_EXIT_PIPE"
"""The descriptor by which a rank tells the launcher how it ends, and its inode: see `exit_report`."""

Form: TypeAlias = Literal["script", "module", "program"]


@dataclass(frozen=True, slots=True)
class Command:
    """What the user asked to run."""

    form: Form
    target: str
    arguments: tuple[str, ...] = ()

    def line(self, python: str) -> tuple[str, ...]:
        """The command line. Python runs unbuffered: what a rank printed last before it died must not be lost."""
        before = {"script": (python, "-u"), "module": (python, "-u", "-m"), "program": ()}[self.form]
        return (*before, self.target, *self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBlock:
    """The ranks of one host: `count` of them from `first_rank`, in a world of `size`. None: all are to join later."""

    count: int
    first_rank: Rank | None = 0
    size: int
    group_rank: int = 0
    launcher: NodeId
    master_addr: str
    master_port: int

    @property
    def group_size(self) -> int:
        """How many hosts there are, if all start as many ranks as this one; nobody knows before all have come."""
        return max(-(-self.size // self.count), self.group_rank + 1)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One process to start."""

    rank: Rank | None
    """That it was first started with; None: it is to join a cluster that has formed."""
    local_rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)  # it holds the ticket
    restart: int = 0
    """How many were started in its place before."""

    @property
    def name(self) -> str:
        """What people know it by."""
        name = f"joiner {self.local_rank}" if self.rank is None else f"rank {self.rank}"
        return f"{name} restart {self.restart}" if self.restart else name

    @property
    def joins(self) -> bool:
        """Whether it comes in without a rank, after the cluster has formed."""
        return JOINER_VARIABLE in self.environment

    @property
    def prefix(self) -> str:
        """What its lines begin with."""
        return f"[{self.name}] "

    def log_name(self, stream: Literal["stdout", "stderr"]) -> str:
        """The name of the file that keeps what it wrote; the rank, so that the files of all hosts fit in one folder."""
        return f"{self.name.replace(' ', '_')}.{stream}.log"

    def again(self, *, as_joiner: bool) -> "RankPlan":
        """What to start in its place. `as_joiner`: its rank is given to others, so it comes in without one."""
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
    """Everything to start, in the order of ranks.

    `inherited`: the launcher's own environment; `entrance`: the variables that let a rank in, which replace inherited
    ones of all other ways in.
    """
    base = {name: text for name, text in inherited.items() if name not in _WAYS_IN} | dict(entry)
    return [_plan_rank(block, command.line(python), base, mark, local_rank) for local_rank in range(block.count)]


_WAYS_IN = frozenset({"NEXAR_TICKET", "NEXAR_SEED", "NEXAR_CLUSTER_TOKEN"})


_PLACES = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", LAUNCHER_VARIABLE)
"""What only those have that form the cluster."""


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
    return {name: text for name, text in environment.items() if name not in _PLACES} | {JOINER_VARIABLE: "1"}


def parse_filter(text: str | None, count: int) -> frozenset[int]:
    """The local ranks whose output is shown, from `0,2`; all of them when no filter is given."""
    if text is None:
        return frozenset(range(count))
    parts = [part.strip() for part in text.split(",")]
    chosen = frozenset(int(part) for part in parts if part.isascii() and part.isdigit())
    if len(chosen) < len(set(parts)) or not chosen or max(chosen) >= count:
        allowed = f"local ranks from 0 to {count - 1}, separated by commas"
        raise ConfigError(variable="--local-ranks-filter", value=text, allowed=allowed)
    return chosen


def choose_form(*, module: bool, no_python: bool) -> Form:
    """The form of a command line's first word."""
    if module and no_python:
        raise UsageError("-m runs a module of Python, --no-python something that is not Python: give one of them")
    return "module" if module else "program" if no_python else "script"


def without_outer_launch(inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment as it was before an outer launcher of ours wrote its names into it.

    A rank may start a launcher. The ticket it inherits is the outer cluster's: it was meant for the rank.
    """
    if MARK_VARIABLE not in inherited:
        return dict(inherited)
    return {name: text for name, text in inherited.items() if name not in _OUTER}


_OUTER = _WAYS_IN | {
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
