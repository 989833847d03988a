"""Detects from the environment which launcher started this process, and its rank. Pure.

The first launcher whose variables are present wins. Incomplete variables are rejected: a guess could put two processes
on one rank, or wait for missing ranks.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from nexar.errors import ConfigError
from nexar.types import UNKNOWN_NODE, NodeId, Rank, parse_node

_MpiKind: TypeAlias = Literal["openmpi", "pmi"]
LauncherKind: TypeAlias = Literal["nexar", "torch", "slurm", _MpiKind, "kubernetes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchInfo:
    """How this process was started. 0 <= rank < size, also for the local rank. ConfigError otherwise."""

    kind: LauncherKind
    rank: Rank
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    master_addr: str | None = None
    """Host name or address of rank 0."""
    master_port: int | None = None
    """The port the launcher gave to torch; nexar derives its own from it."""
    launcher: NodeId = UNKNOWN_NODE
    """The launcher's node id, if it is a nexar launcher."""
    job: str | None = None
    """Identifies this job among those on its hosts; None: only the parent process does."""

    def __post_init__(self) -> None:
        _check_below("rank", self.rank, "size", self.size)
        if self.local_size is not None:
            _check_below("local rank", self.local_rank or 0, "local size", self.local_size)
            if self.local_size > self.size:
                raise ConfigError(
                    variable="local size", value=self.local_size, allowed=f"at most the size of the world ({self.size})"
                )

    @property
    def on_one_host(self) -> bool:
        return self.size in (1, self.local_size)


def _check_below(name: str, number: int, whole_name: str, whole: int) -> None:
    if whole < 1:
        raise ConfigError(variable=whole_name, value=whole, allowed="a whole number, 1 or more")
    if number >= whole:
        raise ConfigError(variable=name, value=number, allowed=f"0 to {whole - 1}: below the {whole_name} ({whole})")


_HOSTS_VARIABLE = "SLURM_STEP_NODELIST"
_TASKS_VARIABLE = "SLURM_STEP_TASKS_PER_NODE"
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def first_slurm_host(hosts: str, variable: str = _HOSTS_VARIABLE) -> str:
    """Return the first host of a Slurm host list (`node[001-004,7],x`), with leading zeros. Raise ConfigError."""
    name = _first_item(hosts.strip())
    expanded = re.sub(r"\[([^\[\]]*)\]", lambda bracket: re.split(r"[-,]", bracket[1], maxsplit=1)[0], name)
    if not re.fullmatch(r"[A-Za-z0-9._-]+", expanded):
        raise ConfigError(variable=variable, value=hosts, allowed="a list of hosts such as node[001-004,7],x")
    return expanded


def _first_item(hosts: str) -> str:
    inside = 0
    for position, character in enumerate(hosts):
        inside += (character == "[") - (character == "]")
        if character == "," and not inside:
            return hosts[:position]
    return hosts


def slurm_tasks_on(node: int, tasks: str, variable: str = _TASKS_VARIABLE) -> int:
    """Return the number of tasks on this node, from Slurm's `2(x3),1`. Raise ConfigError."""
    passed = 0
    for part in tasks.strip().split(","):
        found = _TASKS.fullmatch(part.strip())
        if found is None:
            raise ConfigError(variable=variable, value=tasks, allowed="counts such as 2(x3),1")
        passed += int(found[2] or 1)
        if node < passed:
            return int(found[1])
    raise ConfigError(variable=variable, value=tasks, allowed=f"counts for at least {node + 1} nodes (SLURM_NODEID)")


KNOWN_LAUNCHERS = "torchrun, srun, mpiexec and Kubernetes indexed jobs"
"""The external launchers, for messages."""

LAUNCHER_VARIABLE = "NEXAR_LAUNCHER"
"""Node id of the nexar launcher that started the process. NEXAR_LAUNCH (`launch.plan`) identifies the launch."""

JOINER_VARIABLE = "NEXAR_JOINER"
"""Set by a nexar launcher for a process that joins a formed cluster: it has no rank yet."""

Environment: TypeAlias = Mapping[str, str]


def detect(environ: Environment) -> LaunchInfo | None:
    """Return None without a launcher. Raise ConfigError for inconsistent variables."""
    present = {name: text.strip() for name, text in environ.items() if text.strip()}
    if JOINER_VARIABLE in present:
        return None  # the variables of an outer launcher do not apply to it
    return next((launch_info for detector in _LAUNCHERS if (launch_info := detector(present)) is not None), None)


# -- one function per launcher: None if its variables are missing
# --------------------------------------------------------


def _nexar(environ: Environment) -> LaunchInfo | None:
    if LAUNCHER_VARIABLE not in environ:
        return None
    return _from_torch_variables(
        environ, LaunchInfo(kind="nexar", rank=0, size=1, launcher=_node(environ, LAUNCHER_VARIABLE))
    )


def _torch(environ: Environment) -> LaunchInfo | None:
    if "RANK" in environ:
        return _from_torch_variables(environ, LaunchInfo(kind="torch", rank=0, size=1, job=_torch_job(environ)))
    if "WORLD_SIZE" in environ and not _has_other_launcher(environ):
        raise _missing("RANK", "WORLD_SIZE")
    return None


def _slurm(environ: Environment) -> LaunchInfo | None:
    if "SLURM_PROCID" not in environ or _is_batch_script(environ) or _mpi_numbers_differ(environ):
        return None
    size_variable = _first_of(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", present="SLURM_PROCID")
    hosts_variable = _first_of(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", present="SLURM_PROCID")
    tasks_variable = "SLURM_STEP_TASKS_PER_NODE"
    node = _number(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else None
    knows_tasks = tasks_variable in environ and node is not None
    rank, size = _rank_and_size(environ, "SLURM_PROCID", size_variable)
    return LaunchInfo(
        kind="slurm",
        rank=rank,
        size=size,
        local_rank=_optional(environ, "SLURM_LOCALID"),
        local_size=slurm_tasks_on(node or 0, environ[tasks_variable]) if knows_tasks else None,
        master_addr=environ.get("MASTER_ADDR") or first_slurm_host(environ[hosts_variable], hosts_variable),
        master_port=_optional(environ, "MASTER_PORT"),
        job=_join(environ, "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    )


def _openmpi(environ: Environment) -> LaunchInfo | None:
    return _mpi(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "openmpi")


def _pmi(environ: Environment) -> LaunchInfo | None:
    return _mpi(environ, "PMI_RANK", "PMI_SIZE", "pmi")


def _kubernetes(environ: Environment) -> LaunchInfo | None:
    if "JOB_COMPLETION_INDEX" not in environ:
        return None
    if "WORLD_SIZE" not in environ:
        raise _missing("WORLD_SIZE", "JOB_COMPLETION_INDEX", "set it to the job's completions in the manifest")
    rank, size = _rank_and_size(environ, "JOB_COMPLETION_INDEX", "WORLD_SIZE")
    return LaunchInfo(
        kind="kubernetes",
        rank=rank,
        size=size,
        master_addr=environ.get("MASTER_ADDR"),
        master_port=_optional(environ, "MASTER_PORT"),
    )


_LAUNCHERS: tuple[Callable[[Environment], LaunchInfo | None], ...] = (
    _nexar,
    _torch,
    _slurm,
    _openmpi,
    _pmi,
    _kubernetes,
)


# -- shared by several launchers
# -----------------------------------------------------------------------------------------


def _from_torch_variables(environ: Environment, known: LaunchInfo) -> LaunchInfo:
    if "RANK" not in environ:
        raise _missing("RANK", LAUNCHER_VARIABLE)
    if "WORLD_SIZE" not in environ:
        raise _missing("WORLD_SIZE", "RANK")
    rank, size = _rank_and_size(environ, "RANK", "WORLD_SIZE")
    local_rank, local_size = _local_rank_and_size(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return LaunchInfo(
        kind=known.kind,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        master_addr=environ.get("MASTER_ADDR"),
        master_port=_optional(environ, "MASTER_PORT"),
        launcher=known.launcher,
        job=known.job,
    )


def _torch_job(environ: Environment) -> str | None:
    """torchrun's run id may be "none"; its store's address is unique on the host."""
    return _join(environ, "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")


_LOCAL_NAMES: Mapping[_MpiKind, tuple[tuple[str, str], ...]] = {
    "openmpi": (("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),),
    "pmi": (("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")),
}
_JOB_NAMES: Mapping[_MpiKind, tuple[str, ...]] = {
    "openmpi": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
    "pmi": ("PMI_JOBID", "PALS_APID"),
}


def _mpi(environ: Environment, rank_variable: str, size_variable: str, kind: _MpiKind) -> LaunchInfo | None:
    if rank_variable not in environ and size_variable not in environ:
        return None
    rank, size = _rank_and_size(environ, rank_variable, size_variable)
    names = next((pair for pair in _LOCAL_NAMES[kind] if pair[0] in environ), _LOCAL_NAMES[kind][0])
    local_rank, local_size = _local_rank_and_size(environ, *names)
    return LaunchInfo(
        kind=kind,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        master_addr=environ.get("MASTER_ADDR"),
        master_port=_optional(environ, "MASTER_PORT"),
        job=_join(environ, *_JOB_NAMES[kind]),
    )


def _is_batch_script(environ: Environment) -> bool:
    """sbatch sets SLURM_PROCID=0 for its script too; only srun makes steps."""
    return environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environ


def _mpi_numbers_differ(environ: Environment) -> bool:
    """Whether an MPI launcher set other numbers. mpiexec starts its daemons with srun, and ranks inherit the daemon's
    Slurm variables. With srun --mpi=pmi2 both agree.
    """
    theirs = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")
    slurm = environ["SLURM_PROCID"], environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS")
    return any(rank in environ and (environ[rank], environ.get(size)) != slurm for rank, size in theirs)


def _has_other_launcher(environ: Environment) -> bool:
    return any(name in environ for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "JOB_COMPLETION_INDEX"))


# -- reading -----------------------------------------------------------------------------------------------------------


def _rank_and_size(environ: Environment, rank_variable: str, size_variable: str) -> tuple[int, int]:
    for here, other in ((rank_variable, size_variable), (size_variable, rank_variable)):
        if here not in environ:
            raise _missing(here, other)
    rank, size = _number(environ, rank_variable), _number(environ, size_variable)
    if size < 1:
        raise ConfigError(variable=size_variable, value=environ[size_variable], allowed="a whole number, 1 or more")
    if rank >= size:
        allowed = f"0 to {size - 1}: below {size_variable} ({size})"
        raise ConfigError(variable=rank_variable, value=environ[rank_variable], allowed=allowed)
    return rank, size


def _local_rank_and_size(environ: Environment, rank_variable: str, size_variable: str) -> tuple[int | None, int | None]:
    if size_variable not in environ:
        return _optional(environ, rank_variable), None
    if rank_variable not in environ:
        return None, _number(environ, size_variable)
    return _rank_and_size(environ, rank_variable, size_variable)


def _optional(environ: Environment, variable: str) -> int | None:
    return _number(environ, variable) if variable in environ else None


def _number(environ: Environment, variable: str) -> int:
    text = environ[variable]
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigError(variable=variable, value=text, allowed="a whole number, 0 or more")
    return int(text)


def _node(environ: Environment, variable: str) -> NodeId:
    try:
        return parse_node(environ[variable])
    except ValueError:
        allowed = "a node id of 16 hexadecimal digits; only a launcher of nexar sets it"
        raise ConfigError(variable=variable, value=environ[variable], allowed=allowed) from None


def _first_of(environ: Environment, *variables: str, present: str) -> str:
    found = next((variable for variable in variables if variable in environ), None)
    if found is None:
        raise _missing(variables[-1], present)
    return found


def _join(environ: Environment, *variables: str) -> str | None:
    return " ".join(f"{name}={environ[name]}" for name in variables if name in environ) or None


def _missing(variable: str, present: str, remedy: str = "") -> ConfigError:
    hint = remedy or f"{present} alone does not say enough: set both, or unset both"
    return ConfigError(variable=variable, value="", allowed=f"a whole number, needed beside {present}", hint=hint)
