"""`spawn(fn, n)`: n processes on this host run a function on one communicator; their results come back as a list."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, TypeVar

from nexar.config import Config
from nexar.errors import PeerLost, RemoteError, UsageError
from nexar.launch.init import choose_config, install_dump_handler
from nexar.launch.run_result import RankExit
from nexar.launch.seed_process import changed_settings
from nexar.types import Rank, whole

if TYPE_CHECKING:
    from nexar.communicator.communicator import Communicator

_Result = TypeVar("_Result")

_GRACE = 2.0  # between the polite and the impolite signal
_STARTED, _RAISED, _RETURNED = "started", "raised", "returned"


def spawn(
    fn: Callable[[Communicator], _Result], n: int, config: Config | None = None, **settings: Any
) -> list[_Result]:
    """Run `fn(comm)` in n new processes and return what each returned, by rank. Settings as for `init`.

    The first failure ends them all: RemoteError with the traceback of the rank that raised, PeerLost if one died. `fn`
    and what it returns must be picklable; call this below `if __name__ == "__main__":`, as for multiprocessing. When it
    returns or raises, the processes have ended.
    """
    _check(fn, n)
    from nexar.cluster.seed import SeedService  # noqa: PLC0415  # a wrong call is refused without it

    chosen = choose_config(config, {**settings, "ticket": None, "seed": None})  # this cluster is its own
    if chosen.metrics_port is not None:
        from nexar.observe.metrics import check_metrics  # noqa: PLC0415  # only who wants metrics pays for them

        check_metrics(chosen, n)
    with SeedService("127.0.0.1:0", n, config=chosen) as seed:
        team = _RankProcesses(fn, n, seed.ticket, chosen)
        try:
            return team.results()
        finally:
            team.end()


def _check(fn: Callable[..., Any], n: int) -> None:
    if (whole(n) or 0) < 1:
        raise UsageError(f"spawn(fn, n={n!r}): n is how many processes to start, 1 or more")
    if not callable(fn):
        raise UsageError(f"spawn(fn={fn!r}, n): fn is what each process calls with its communicator, a function")
    try:
        ForkingPickler.dumps(fn)
    except Exception as error:  # whatever its __reduce__ raises, the answer is the same
        raise UsageError(
            f"{fn!r} cannot be sent to another process ({error}); pass a function defined at the top of a module, "
            "not a lambda and not one defined inside another function"
        ) from error


@dataclass(frozen=True, slots=True)
class _Task:
    """What one process is told."""

    fn: Callable[..., Any]
    rank: Rank
    size: int
    ticket: str = field(repr=False)
    settings: dict[str, Any] = field(repr=False)


class _RankProcesses:
    """The processes of one spawn."""

    def __init__(self, fn: Callable[..., Any], n: int, ticket: str, config: Config) -> None:
        self._name = getattr(fn, "__qualname__", repr(fn))
        self._processes: list[SpawnProcess] = []
        self._lines: dict[Connection, Rank] = {}
        self._started: set[Rank] = set()
        self._results: dict[Rank, Any] = {}
        settings = changed_settings(config)
        try:
            for rank in range(n):
                self._start(_Task(fn, rank, n, ticket, settings))
        except BaseException:
            self.end()
            raise

    def _start(self, task: _Task) -> None:
        context = get_context("spawn")
        here, there = context.Pipe(duplex=False)
        self._lines[here] = task.rank
        process = context.Process(target=_work, args=(there, task), name=f"nexar-rank-{task.rank}")
        try:
            process.start()
        finally:
            there.close()
        self._processes.append(process)

    def results(self) -> list[Any]:
        """Wait for all, or for the first failure."""
        while len(self._results) < len(self._processes):
            waiting = [line for line, rank in self._lines.items() if rank not in self._results]
            for line in connection.wait(waiting):
                assert isinstance(line, Connection)
                self._hear(line, self._lines[line])
        return [self._results[rank] for rank in range(len(self._processes))]

    def _hear(self, line: Connection, rank: Rank) -> None:
        try:
            kind, content = line.recv()
        except EOFError:
            raise self._lost(rank) from None
        if kind == _RAISED:
            raise RemoteError(rank=rank, function=self._name, traceback=content)
        if kind == _RETURNED:
            self._results[rank] = content
        else:
            self._started.add(rank)

    def _lost(self, rank: Rank) -> PeerLost | UsageError:
        process = self._processes[rank]
        process.join(_GRACE)  # its line closes a moment before it has ended
        ending = "closed its line" if process.exitcode is None else str(RankExit(rank, process.exitcode))
        if rank in self._started or (process.exitcode or 0) < 0:
            return PeerLost(rank=rank, cause=ending, operation=self._name)
        return UsageError(
            f"rank {rank} {ending} before it could run {self._name}; what it wrote is above. "
            'Is the call of spawn below `if __name__ == "__main__":`?'
        )

    def end(self) -> None:
        """End whoever still runs. Idempotent."""
        if len(self._results) < len(self._processes):
            for process in self._processes:
                process.terminate()
        deadline = time.monotonic() + _GRACE
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
            process.close()
        for line in self._lines:
            line.close()
        self._processes.clear()
        self._lines.clear()


# -- in the new process ------------------------------------------------------------------------------------------------


def _work(line: Connection, task: _Task) -> None:
    """The whole life of a rank."""
    threading.Thread(target=_end_with_parent, name="nexar-parent", daemon=True).start()
    with line:
        line.send((_STARTED, None))
        try:
            line.send((_RETURNED, _run(line, task)))
        except BaseException:  # noqa: BLE001  # the parent raises it
            _tell(line)


def _run(line: Connection, task: _Task) -> Any:
    from nexar.launch.create import join_cluster  # noqa: PLC0415  # a failing import is told like any other
    from nexar.security.invitation import parse_ticket  # noqa: PLC0415

    config, invitation = Config(**task.settings), parse_ticket(task.ticket)
    install_dump_handler()
    with join_cluster(config, invitation, rank=task.rank, size=task.size, local_rank=task.rank) as communicator:
        try:
            return task.fn(communicator)
        except BaseException:
            _tell(line)  # before the others are told by leaving: what they raise then is not the first failure
            raise


def _tell(line: Connection) -> None:
    with suppress(OSError):  # a parent that has heard of a failure listens no longer
        line.send((_RAISED, traceback.format_exc()))


def _end_with_parent() -> None:
    """Nobody is left who wants the result."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
