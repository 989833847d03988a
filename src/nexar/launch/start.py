"""What a launcher tells a process about its place in the world. Pure."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from nexar.errors import ConfigError
from nexar.types import UNKNOWN_NODE, NodeId, Rank

Launcher: TypeAlias = Literal["nexar", "torch", "slurm", "openmpi", "pmi", "kubernetes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How this process was started. A start that exists is consistent: 0 <= rank < size, and so on inside the host.

    What the launcher did not say is None.
    """

    kind: Launcher
    rank: Rank
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    group_rank: int | None = None
    """Which host, counted in the order of ranks."""
    master_addr: str | None = None
    """Where rank 0 runs, as a name or number of a host."""
    master_port: int | None = None
    """The port the launcher gave to torch; ours are derived from it."""
    launcher: NodeId = UNKNOWN_NODE
    """The launcher's own node id, where it is ours."""
    job: str | None = None
    """What all ranks of this start, and no others on their hosts, have in common; None: only the parent process."""

    def __post_init__(self) -> None:
        """Refuse numbers that contradict one another."""
        _check_place("rank", self.rank, "size", self.size)
        if self.local_size is not None:
            _check_place("local rank", self.local_rank or 0, "local size", self.local_size)
            if self.local_size > self.size:
                raise ConfigError(
                    variable="local size", value=self.local_size, allowed=f"at most the size of the world ({self.size})"
                )

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks are known to share this host."""
        return self.size in (1, self.local_size)


def _check_place(name: str, place: int, whole_name: str, whole: int) -> None:
    if whole < 1:
        raise ConfigError(variable=whole_name, value=whole, allowed="a whole number, 1 or more")
    if place >= whole:
        raise ConfigError(variable=name, value=place, allowed=f"0 to {whole - 1}: below the {whole_name} ({whole})")
