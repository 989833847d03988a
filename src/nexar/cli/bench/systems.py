"""Hosts, the start of each system's ranks, and the running ranks.

Hosts are this machine, or two network namespaces on it, joined by virtual Ethernet. Each system gets the fastest known
flags.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, NamedTuple, Self, TypeAlias

from nexar.cli.bench.protocol import BenchOrder, BenchReply, parse_hello, parse_reply
from nexar.errors import UsageError

_INTERFACE: Final = "wire"
_COMMAND_TIMEOUT: Final = 30.0


class BenchHost(NamedTuple):
    """A place to start processes, and its address."""

    prefix: tuple[str, ...] = ()
    """Put before a command to run it there."""
    address: str = "127.0.0.1"
    interface: str = "lo"


@contextmanager
def opened_hosts(count: int, mtu: int) -> Iterator[tuple[BenchHost, ...]]:
    """Yield this machine, or two hosts that are removed after the block. Raises UsageError."""
    if count == 1:
        yield (BenchHost(),)
        return
    if count != 2:
        raise UsageError(f"--hosts {count} is not supported; 1: this machine, 2: two network namespaces on it")
    if shutil.which("ip") is None:
        raise UsageError("--hosts 2 needs the tool `ip` (package iproute2) to make network namespaces")
    if os.geteuid() != 0:
        raise UsageError("--hosts 2 makes network namespaces, which only root may: run it with sudo")
    with ExitStack() as stack:
        yield _joined(stack, mtu)


def _joined(stack: ExitStack, mtu: int) -> tuple[BenchHost, BenchHost]:
    first, second = (f"nexar-bench-{os.getpid()}-{number}" for number in range(2))
    for name in (first, second):
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "delete", name)  # its end of the link is deleted too
    near = ("link", "add", _INTERFACE, "mtu", str(mtu), "netns", first, "type", "veth")
    _ip(*near, "peer", "name", _INTERFACE, "mtu", str(mtu), "netns", second)
    for number, name in enumerate((first, second)):
        _ip("-n", name, "address", "add", f"{_address(number)}/16", "dev", _INTERFACE)
        for interface in ("lo", _INTERFACE):
            _ip("-n", name, "link", "set", interface, "up")
    ends = [BenchHost(("ip", "netns", "exec", name), _address(n), _INTERFACE) for n, name in enumerate((first, second))]
    return ends[0], ends[1]


def _address(number: int) -> str:
    return f"10.78.0.{number + 1}"


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False, timeout=_COMMAND_TIMEOUT)
    if done.returncode:
        text = (done.stderr or done.stdout).strip()
        raise UsageError(f"--hosts 2 is not permitted here: `ip {' '.join(arguments)}` failed: {text}")


OTHER_SYSTEMS: Final = ("gloo", "openmpi", "mpich")


@dataclass(frozen=True, slots=True)
class ProcessStart:
    """A rank or a launcher to start."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the inherited one."""


@dataclass(frozen=True, slots=True)
class SystemPlan:
    """The processes of one system."""

    name: str
    starts: tuple[ProcessStart, ...]
    flags: str
    """Printed: what was set to make it fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemSettings:
    """Settings shared by all systems of one run."""

    hosts: tuple[BenchHost, ...]
    ranks: int
    cores: int
    folder: Path
    """Private to this run; visible from all hosts."""
    peers: Path
    """The environments that `make bench-peers` made."""
    python: str
    sources: Path
    """The folder that `nexar` is imported from."""

    @property
    def oversubscribed(self) -> bool:
        return self.ranks > self.cores

    def line(self, name: str) -> str:
        """Return the path of a system's Unix socket."""
        return str(self.folder / f"{name}.socket")


def plan_nexar(setting: SystemSettings, variables: Mapping[str, str]) -> SystemPlan:
    """With two hosts the plan includes a seed on the first."""
    flags = " ".join(f"{name}={value}" for name, value in sorted(variables.items())) or "none"
    each = setting.ranks // len(setting.hosts)
    nexar = (setting.python, "-m", "nexar")
    target = ("-m", "nexar.cli.bench.rank", setting.line("nexar"))
    if len(setting.hosts) == 1:
        return SystemPlan("nexar", (ProcessStart((*nexar, "run", "-n", str(each), *target), variables),), flags)
    ticket = ("--ticket-file", str(setting.folder / "ticket"))
    seed = (*setting.hosts[0].prefix, *nexar, "seed", "--size", str(setting.ranks), *ticket)
    runs = [(*host.prefix, *nexar, "run", "-n", str(each), *ticket, *target) for host in setting.hosts]
    return SystemPlan("nexar", tuple(ProcessStart(command, variables) for command in (seed, *runs)), flags)


def plan_other(name: str, setting: SystemSettings) -> SystemPlan:
    """Raises UsageError if the system is not installed, or impossible on these hosts."""
    if name not in OTHER_SYSTEMS:
        raise UsageError(f"--against {name}: there is no such system; known: {', '.join(OTHER_SYSTEMS)}")
    python = setting.peers / name / "bin" / "python"
    if not python.exists():
        raise UsageError(f"--against {name}: {python} does not exist; `make bench-peers` makes it, --peers says where")
    return _plan_gloo(setting, str(python)) if name == "gloo" else _plan_mpi(name, setting, str(python))


def _plan_gloo(setting: SystemSettings, python: str) -> SystemPlan:
    store, script = setting.folder / "gloo.store", setting.peers / "scripts" / "gloo.py"
    each = setting.ranks // len(setting.hosts)
    starts = []
    for rank in range(setting.ranks):
        host = setting.hosts[rank // each]
        arguments = (str(script), setting.line("gloo"), str(rank), str(setting.ranks), str(store))
        variables = {"GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1", **_importing(setting)}
        starts.append(ProcessStart((*host.prefix, python, *arguments), variables))
    return SystemPlan("gloo", tuple(starts), f"GLOO_SOCKET_IFNAME={setting.hosts[0].interface} OMP_NUM_THREADS=1")


def _plan_mpi(name: str, setting: SystemSettings, python: str) -> SystemPlan:
    if len(setting.hosts) > 1:
        raise UsageError(f"--against {name}: runs on one host only here; with --hosts 2 compare with gloo")
    flags, variables = _FASTEST[name]
    if setting.oversubscribed:
        more_flags, more_variables = _FASTEST_OVERSUBSCRIBED[name]
        flags, variables = (*flags, *more_flags), {**variables, **more_variables}
    script = (str(setting.peers / "scripts" / "mpi.py"), setting.line(name))
    root = ("--allow-run-as-root",) if name == "openmpi" else ()
    mpiexec = str(Path(python).with_name("mpiexec"))
    command = (mpiexec, *root, *flags, "-n", str(setting.ranks), python, *script)
    shown = [*(f"{key}={value}" for key, value in variables.items()), *flags]
    return SystemPlan(name, (ProcessStart(command, {**variables, **_importing(setting)}),), " ".join(shown) or "none")


_Flags: TypeAlias = tuple[tuple[str, ...], Mapping[str, str]]

# Measured on two cores with 2 and 4 ranks. Ranks bound to a core wait for it if something else runs there; free ones
# move. Both libraries copy large payloads once, by the kernel (CMA): MPICH does by default. Open MPI would poll its
# other components in vain. The shared-memory collectives of either (coll sm, device collectives) are slower.
_FASTEST: Final[Mapping[str, _Flags]] = {
    "openmpi": (("--bind-to", "none", "--mca", "btl", "self,sm", "--mca", "smsc", "cma"), {}),
    "mpich": ((), {}),
}
_FASTEST_OVERSUBSCRIBED: Final[Mapping[str, _Flags]] = {
    "openmpi": (("--oversubscribe", "--mca", "mpi_yield_when_idle", "1"), {}),
    "mpich": ((), {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}),
}


def _importing(setting: SystemSettings) -> dict[str, str]:
    return {"PYTHONPATH": str(setting.sources), "PYTHONDONTWRITEBYTECODE": "1"}


_FORMATION: Final = 90.0
_ENDING: Final = 10.0
_TAIL_LINES: Final = 15


class SystemFailed(Exception):
    """Ranks did not start, died, or were late. Contains their output."""


class SystemRanks:
    """A system's ranks, waiting for orders. Leaving the block ends its processes."""

    def __init__(
        self, plan: SystemPlan, ranks: int, *, path: str, environment: Mapping[str, str], folder: Path
    ) -> None:
        """`path`: the Unix socket for its ranks; `folder`: for their output."""
        self.plan = plan
        self.version = ""
        self._ranks = ranks
        self._path = path
        self._environment = environment
        self._output = folder / f"{plan.name}.output"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[_RankSocket] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(self._path)
            listener.listen(self._ranks)
            output = self._stack.enter_context(self._output.open("wb"))
            self._stack.callback(self._end)
            for start in self.plan.starts:
                self._processes.append(self._start(start.command, start.environment, output))
            self._admit(listener)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def ask(self, order: BenchOrder, reply_timeout: float) -> list[BenchReply]:
        """Return the replies by rank. Raises SystemFailed if one is late."""
        deadline = time.monotonic() + reply_timeout
        for line in self._sockets:
            line.send(order.line())
        replies = []
        for rank, line in enumerate(self._sockets):
            answer = line.read(deadline)
            if answer is None:
                raise self._failed(f"rank {rank} did not answer within {reply_timeout:.0f} s")
            if not answer:
                self._await_endings(_ENDING)  # its launcher passes on its last output
                raise self._failed(f"rank {rank} is gone")
            replies.append(parse_reply(answer))
        return replies

    def _start(
        self, command: tuple[str, ...], variables: Mapping[str, str], output: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        environment = {**self._environment, **variables}
        try:
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # killed together with everything it starts
            )
        except OSError as error:
            raise self._failed(f"{command[0]} cannot be started: {error.strerror}") from error

    def _admit(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + _FORMATION
        found: dict[int, _RankSocket] = {}
        while len(found) < self._ranks:
            self._check_processes(len(found))
            if time.monotonic() > deadline:
                raise self._failed(f"only {len(found)} of {self._ranks} ranks came within {_FORMATION:.0f} s")
            # The socket does not show that a process has ended, so they are polled.
            if not select.select([listener], [], [], 0.1)[0]:
                continue
            line = _RankSocket(self._stack.enter_context(listener.accept()[0]))
            text = line.read(deadline)
            if not text:
                raise self._failed(f"a rank disconnected without a hello when {len(found)} of {self._ranks} had come")
            hello = parse_hello(text)
            found[hello.rank] = line
            self.version = hello.version
        self._sockets = [found[rank] for rank in range(self._ranks)]

    def _check_processes(self, connected: int) -> None:
        for process in self._processes:
            code = process.poll()
            if code:
                program = " ".join(str(word) for word in list(process.args)[:4])  # type: ignore[arg-type]
                raise self._failed(
                    f"`{program} …` ended with code {code} when {connected} of {self._ranks} ranks had come"
                )

    def _failed(self, what: str) -> SystemFailed:
        lines = self._output.read_text(errors="replace").splitlines() if self._output.exists() else []
        text = "\n".join(f"  | {line}" for line in lines[-_TAIL_LINES:])
        return SystemFailed(f"{self.plan.name}: {what}" + (f"; its last output:\n{text}" if text else ""))

    def _end(self) -> None:
        """Closing the connections ends the ranks; late ones are killed."""
        for line in self._sockets:
            line.close()
        self._await_endings(_ENDING if self._sockets else 0.0)
        for process in self._processes:
            with suppress(ProcessLookupError):  # all processes of that session have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(_ENDING)

    def _await_endings(self, reply_timeout: float) -> None:
        deadline = time.monotonic() + reply_timeout
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


class _RankSocket:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._read = b""

    def send(self, line: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # `read` reports that the rank is gone
            self._connection.sendall(line)

    def read(self, deadline: float) -> bytes | None:
        """Empty: the rank closed the connection; None: the deadline."""
        while b"\n" not in self._read:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self._connection.recv(1 << 20)
            except TimeoutError:
                return None
            except ConnectionResetError:
                return b""
            if not data:
                return b""
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return line

    def close(self) -> None:
        self._connection.close()
