"""`spawn(fn, n)`: run a function in n processes on this host."""

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

_GRACE = 2.0  # seconds between SIGTERM and SIGKILL
_STARTED, _RAISED, _RETURNED = "started", "raised", "returned"


def spawn(
    fn: Callable[[Communicator], _Result], n: int, config: Config | None = None, **settings: Any
) -> list[_Result]:
    """Run `fn(comm)` in n new processes and return the results by rank. Settings as for `init`.

    The first failure ends all: RemoteError with the traceback of the rank that raised, PeerLost if one died. `fn` and
    its result must be picklable; call this below `if __name__ == "__main__":`. The processes have ended when it
    returns or raises.
    """
    _check(fn, n)
    from nexar.cluster.seed import SeedService  # noqa: PLC0415  # a wrong call is rejected without loading it

    chosen = choose_config(config, {**settings, "ticket": None, "seed": None})  # this cluster is separate
    if chosen.metrics_port is not None:
        from nexar.observe.metrics import check_metrics  # noqa: PLC0415  # loaded only if metrics are enabled

        check_metrics(chosen, n)
    with SeedService("127.0.0.1:0", n, config=chosen) as seed:
        processes = _RankProcesses(fn, n, seed.ticket, chosen)
        try:
            return processes.results()
        finally:
            processes.end()


def _check(fn: Callable[..., Any], n: int) -> None:
    if (whole(n) or 0) < 1:
        raise UsageError(f"spawn(fn, n={n!r}): n is how many processes to start, 1 or more")
    if not callable(fn):
        raise UsageError(f"spawn(fn={fn!r}, n): fn is what each process calls with its communicator, a function")
    try:
        ForkingPickler.dumps(fn)
    except Exception as error:  # __reduce__ may raise anything
        raise UsageError(
            f"{fn!r} cannot be sent to another process ({error}); pass a function defined at the top of a module, "
            "not a lambda and not one defined inside another function"
        ) from error


@dataclass(frozen=True, slots=True)
class _Task:
    fn: Callable[..., Any]
    rank: Rank
    size: int
    ticket: str = field(repr=False)
    settings: dict[str, Any] = field(repr=False)


class _RankProcesses:
    def __init__(self, fn: Callable[..., Any], n: int, ticket: str, config: Config) -> None:
        self._name = getattr(fn, "__qualname__", repr(fn))
        self._processes: list[SpawnProcess] = []
        self._pipes: dict[Connection, Rank] = {}
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
        read_end, write_end = context.Pipe(duplex=False)
        self._pipes[read_end] = task.rank
        process = context.Process(target=_run_rank, args=(write_end, task), name=f"nexar-rank-{task.rank}")
        try:
            process.start()
        finally:
            write_end.close()
        self._processes.append(process)

    def results(self) -> list[Any]:
        while len(self._results) < len(self._processes):
            waiting = [pipe for pipe, rank in self._pipes.items() if rank not in self._results]
            for pipe in connection.wait(waiting):
                assert isinstance(pipe, Connection)
                self._receive(pipe, self._pipes[pipe])
        return [self._results[rank] for rank in range(len(self._processes))]

    def _receive(self, pipe: Connection, rank: Rank) -> None:
        try:
            kind, content = pipe.recv()
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
        process.join(_GRACE)  # its connection closes a moment before it has ended
        ending = "closed its connection" if process.exitcode is None else str(RankExit(rank, process.exitcode))
        if rank in self._started or (process.exitcode or 0) < 0:
            return PeerLost(rank=rank, cause=ending, operation=self._name)
        return UsageError(
            f"rank {rank} {ending} before it could run {self._name}; its output is above. "
            'Is the call of spawn below `if __name__ == "__main__":`?'
        )

    def end(self) -> None:
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
        for pipe in self._pipes:
            pipe.close()
        self._processes.clear()
        self._pipes.clear()


# -- in the new process
# --------------------------------------------------------------------------------------------------


def _run_rank(pipe: Connection, task: _Task) -> None:
    threading.Thread(target=_end_with_parent, name="nexar-parent", daemon=True).start()
    with pipe:
        pipe.send((_STARTED, None))
        try:
            pipe.send((_RETURNED, _run(pipe, task)))
        except BaseException:  # noqa: BLE001  # the parent raises it
            _send_failure(pipe)


def _run(pipe: Connection, task: _Task) -> Any:
    from nexar.launch.create import join_cluster  # noqa: PLC0415  # the parent reports a failing import like any other failure
    from nexar.security.invitation import parse_ticket  # noqa: PLC0415

    config, invitation = Config(**task.settings), parse_ticket(task.ticket)
    install_dump_handler()
    with join_cluster(config, invitation, rank=task.rank, size=task.size, local_rank=task.rank) as communicator:
        try:
            return task.fn(communicator)
        except BaseException:
            _send_failure(pipe)  # before this rank leaves: what the others raise then is not the first failure
            raise


def _send_failure(pipe: Connection) -> None:
    with suppress(OSError):  # after the first failure the parent does not read
        pipe.send((_RAISED, traceback.format_exc()))


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
