"""For each system: what to start so that its ranks come, and the flags it is known to be fastest with. Pure.

Flags are printed with the table: who knows better ones can say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from nexar.cli.bench.hosts import Host
from nexar.errors import UsageError

RIVALS: Final = ("gloo", "openmpi", "mpich")


@dataclass(frozen=True, slots=True)
class Start:
    """One process to start; ranks come from it or are it."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """What is added to the inherited one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A system: how its ranks are started."""

    name: str
    starts: tuple[Start, ...]
    flags: str
    """For people: what was set to make it fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all systems have in common in one run."""

    hosts: tuple[Host, ...]
    ranks: int
    cores: int
    folder: Path
    """Private to this run; seen from all hosts."""
    peers: Path
    """Where `make bench-peers` has put the environments of the others."""
    python: str
    sources: Path
    """The folder that `nexar` is imported from."""

    @property
    def crowded(self) -> bool:
        """Some ranks share a core."""
        return self.ranks > self.cores

    def line(self, name: str) -> str:
        """The Unix socket of a system's ranks."""
        return str(self.folder / f"{name}.socket")


def plan_ours(setting: Setting, variables: Mapping[str, str]) -> Plan:
    """nexar: `nexar run` on each host; where there are two, a seed on the first."""
    flags = " ".join(f"{name}={value}" for name, value in sorted(variables.items())) or "none"
    each = setting.ranks // len(setting.hosts)
    nexar = (setting.python, "-m", "nexar")
    target = ("-m", "nexar.cli.bench.our_rank", setting.line("nexar"))
    if len(setting.hosts) == 1:
        return Plan("nexar", (Start((*nexar, "run", "-n", str(each), *target), variables),), flags)
    ticket = ("--ticket-file", str(setting.folder / "ticket"))
    seed = (*setting.hosts[0].prefix, *nexar, "seed", "--size", str(setting.ranks), *ticket)
    runs = [(*host.prefix, *nexar, "run", "-n", str(each), *ticket, *target) for host in setting.hosts]
    return Plan("nexar", tuple(Start(command, variables) for command in (seed, *runs)), flags)


def plan_rival(name: str, setting: Setting) -> Plan:
    """One of the others. UsageError where it is not installed, or cannot run on these hosts."""
    if name not in RIVALS:
        raise UsageError(f"--against {name}: there is no such system; known: {', '.join(RIVALS)}")
    python = setting.peers / name / "bin" / "python"
    if not python.exists():
        raise UsageError(f"--against {name}: {python} does not exist; `make bench-peers` makes it, --peers says where")
    return _plan_gloo(setting, str(python)) if name == "gloo" else _plan_mpi(name, setting, str(python))


def _plan_gloo(setting: Setting, python: str) -> Plan:
    store, script = setting.folder / "gloo.store", setting.peers / "scripts" / "gloo.py"
    each = setting.ranks // len(setting.hosts)
    starts = []
    for rank in range(setting.ranks):
        host = setting.hosts[rank // each]
        arguments = (str(script), setting.line("gloo"), str(rank), str(setting.ranks), str(store))
        variables = {"GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1", **_importing(setting)}
        starts.append(Start((*host.prefix, python, *arguments), variables))
    return Plan("gloo", tuple(starts), f"GLOO_SOCKET_IFNAME={setting.hosts[0].interface} OMP_NUM_THREADS=1")


def _plan_mpi(name: str, setting: Setting, python: str) -> Plan:
    if len(setting.hosts) > 1:
        raise UsageError(f"--against {name}: runs on one host only here; with --hosts 2 compare with gloo")
    flags, variables = _FASTEST[name]
    if setting.crowded:
        more_flags, more_variables = _FASTEST_CROWDED[name]
        flags, variables = (*flags, *more_flags), {**variables, **more_variables}
    script = (str(setting.peers / "scripts" / "mpi.py"), setting.line(name))
    root = ("--allow-run-as-root",) if name == "openmpi" else ()
    mpiexec = str(Path(python).with_name("mpiexec"))
    command = (mpiexec, *root, *flags, "-n", str(setting.ranks), python, *script)
    shown = [*(f"{key}={value}" for key, value in variables.items()), *flags]
    return Plan(name, (Start(command, {**variables, **_importing(setting)}),), " ".join(shown) or "none")


_Flags: TypeAlias = tuple[tuple[str, ...], Mapping[str, str]]

# Measured on two cores with 2 and 4 ranks. Ranks bound to a core wait for it where something else runs there; free ones
# move. Both libraries copy large payloads once, by the kernel (CMA): MPICH does by default. Other components of Open
# MPI would be polled in vain. The shared-memory collectives of either (coll sm, device collectives) are slower.
_FASTEST: Final[Mapping[str, _Flags]] = {
    "openmpi": (("--bind-to", "none", "--mca", "btl", "self,sm", "--mca", "smsc", "cma"), {}),
    "mpich": ((), {}),
}
_FASTEST_CROWDED: Final[Mapping[str, _Flags]] = {
    "openmpi": (("--oversubscribe", "--mca", "mpi_yield_when_idle", "1"), {}),
    "mpich": ((), {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}),
}


def _importing(setting: Setting) -> dict[str, str]:
    """What measures is imported from our sources, which need nothing but NumPy there."""
    return {"PYTHONPATH": str(setting.sources), "PYTHONDONTWRITEBYTECODE": "1"}
