"""Ranks in processes of their own, for the tests of `nexar_native.shm`."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy as np
from nexar_native import shm

LIMIT = 60  # seconds; a test that needs more has failed
ALL_REDUCE_CODE, BARRIER_CODE = 1, 2
FAST = (np.ndarray, ALL_REDUCE_CODE, 9, (BARRIER_CODE, 0, 0, 0, 0, 0))
SUM, MAX = 1, 4
FLOAT32, UINT8 = 11, 6


class Member:
    """One rank: its group, and the line to the test."""

    def __init__(self, group: shm.Group, rank: int, size: int, line: Connection | None = None) -> None:
        self.group = group
        self.rank = rank
        self.size = size
        self.line = line

    def post(self, kind: int, op: int = 0, dtype: int = 0, count: int = 0, **arguments: Any) -> shm.Pending:
        """The next call."""
        sequence, order = self.group.take(1)
        fingerprint = (10 + kind, dtype, count, 0, op, 0)
        return self.group.post(order, sequence, fingerprint, kind, op, dtype, **arguments)

    def run(self, kind: int, op: int = 0, dtype: int = 0, **arguments: Any) -> None:
        status = self.post(kind, op, dtype, **arguments).wait(LIMIT)
        assert status == shm.DONE, status

    def reduce(self, array: np.ndarray[Any, Any], op: str = "sum") -> None:
        """By the fast path, as far as it gets."""
        done = self.group.all_reduce(array, op)
        if isinstance(done, shm.Pending):
            assert done.wait(LIMIT) == shm.DONE, (done.status, done.rank)
        else:
            assert done

    def tell(self, value: object = None) -> None:
        assert self.line is not None
        self.line.send((True, value))

    def listen(self) -> Any:
        assert self.line is not None
        assert self.line.poll(LIMIT)
        return self.line.recv()


Body = Callable[[Member], Any]


def fork() -> int:
    """`os.fork`. Python 3.12 warns of it in a process with threads; our children run nothing that waits for those."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


class Process:
    """A forked process that runs one rank."""

    def __init__(self, body: Body, region: shm.Region, rank: int, options: dict[str, Any]) -> None:
        self._line, theirs = Pipe()
        self.pid = fork()
        if self.pid == 0:
            _run(body, region, rank, theirs, options)
        theirs.close()
        self.status: int | None = None

    def hear(self) -> Any:
        """What the rank tells, or its result. Raises AssertionError with its traceback."""
        assert self._line.poll(LIMIT), "the rank is silent"
        good, value = self._line.recv()
        assert good, value
        return value

    def say(self, value: object = None) -> None:
        self._line.send(value)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.join()

    def join(self) -> int:
        if self.status is None:
            _, self.status = os.waitpid(self.pid, 0)
        return self.status

    def close(self) -> None:
        if self.status is None:
            self.kill()
        self._line.close()


def _run(body: Body, parents: shm.Region, rank: int, line: Connection, options: dict[str, Any]) -> NoReturn:
    code, size = 1, parents.ranks
    try:
        signal.alarm(2 * LIMIT)
        group = shm.Group(shm.Region.open(parents.offer, size), rank, **{"fast": FAST, **options})
        value = body(Member(group, rank, size, line))
        line.send((True, value))
        code = 0
    except BaseException:  # noqa: BLE001 - the test shows it
        line.send((False, f"rank {rank}: {traceback.format_exc()}"))
    finally:
        os._exit(code)


@contextmanager
def world(size: int, body: Body | Sequence[Body], *, chunk_bytes: int = 0, **options: Any) -> Iterator[list[Process]]:
    """Runs a body in each rank. One body for all, or one for each."""
    bodies = body if isinstance(body, Sequence) else [body] * size
    region = shm.Region.create(size, chunk_bytes)
    processes: list[Process] = []
    try:
        for rank, each in enumerate(bodies):
            processes.append(Process(each, region, rank, options))
        yield processes
    finally:
        for process in processes:
            process.close()
        region.close()


def results(size: int, body: Body | Sequence[Body], **options: Any) -> list[Any]:
    """The results of all ranks."""
    with world(size, body, **options) as processes:
        return [process.hear() for process in processes]


def members(size: int, chunk_bytes: int = 0, **options: Any) -> list[Member]:
    """All ranks in this process, for threads and for tests of one rank."""
    region = shm.Region.create(size, chunk_bytes)
    found = [Member(shm.Group(region, rank, **{"fast": FAST, **options}), rank, size) for rank in range(size)]
    region.close()
    return found
