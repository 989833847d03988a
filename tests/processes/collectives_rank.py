"""One rank of the collectives' tests: `nexar run -n N collectives_rank.py TASK HOSTS TRANSPORTS [NUMBERS…]`.

HOSTS is how many ranks each host has, `2+1`: this rank takes the host id of its own, so ranks of different hosts never
share memory. It prints one line: what became of the task.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

import nexar
from nexar.communicator.communicator import Communicator
from nexar.communicator.request import wait_all
from tests.conformance.collectives.cases import Case, every_algorithm, every_dtype_and_operation, every_verb, run_cases
from tests.processes.scale import MIB

SMALL = 8  # elements
GIB = 1 << 30


def sample(size: int, hosts: int) -> list[Case]:
    """The same on all ranks, and in the test that asks them."""
    cases = every_verb(size, [0, size + 1, 20_001], ("float32", "int64", "bfloat16"))
    cases += every_dtype_and_operation(size, every=13)
    cases += every_algorithm(size, [997])
    cases += [Case("all_reduce", dtype, op, (40_000,)) for dtype in ("float32", "float16") for op in ("avg", "max")]
    if 1 < hosts < size:
        ways = ("two_level", "ring", "recursive_doubling")
        counts = (1, size + 1, 200_001)
        cases += [Case("all_reduce", "int32", "sum", (n,), more=(("algorithm", way),)) for way in ways for n in counts]
        cases += [
            Case("all_reduce", dtype, "avg", (100_001,), more=(("algorithm", "two_level"),))
            for dtype in ("float64", "float16", "bfloat16")
        ]
    return cases + random_cases(size)


def random_cases(size: int) -> list[Case]:
    """Shapes, roots, dtypes and operations by chance, the same each time."""
    random = np.random.default_rng(size)
    verbs = ["all_reduce", "reduce", "broadcast", "gather", "all_gather", "reduce_scatter", "scan", "scatter_v"]
    found = []
    for _ in range(40):
        shape = tuple(int(each) for each in random.integers(0, 40, random.integers(1, 4)))
        dtype, op = str(random.choice(["int16", "uint64", "bool"])), str(random.choice(["sum", "max", "lxor", "prod"]))
        found.append(Case(str(random.choice(verbs)), dtype, op, shape, int(random.integers(size))))
    return found


def cases(comm: Communicator) -> Any:
    """Every verb against NumPy."""
    judged = run_cases(comm, sample(comm.size, len(comm.hosts)))
    schemes = sorted({scheme for link in comm._group.links().values() for scheme in link.schemes})
    return {"judged": judged, "schemes": schemes, "arena": comm._context.region is not None, "hosts": len(comm.hosts)}


# -- in a row ------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def timed(count: int, turn: Callable[[int], None]) -> dict[str, float]:
    """So many turns: seconds of a turn in the first and in the last tenth, and how much memory grew after the first."""
    tenth = count // 10
    marks = []
    grown_from = 0
    for number in range(count):
        if number % tenth == 0:
            marks.append(time.perf_counter())
            if number == tenth:
                grown_from = resident_bytes()
        turn(number)
    marks.append(time.perf_counter())
    tenths = [(after - before) / tenth for before, after in pairwise(marks)]
    grown = resident_bytes() - grown_from
    return {"first": tenths[0], "last": tenths[-1], "median": sorted(tenths)[5], "grown_mib": grown / MIB}


def in_a_row(comm: Communicator, count: str) -> Any:
    """Small all_reduces, one after the other."""
    array, ones = np.ones(SMALL, np.float32), np.ones(SMALL, np.float32)

    def turn(_: int) -> None:
        np.copyto(array, ones)
        comm.all_reduce(array)
        assert array[-1] == comm.size

    return timed(int(count), turn)


def in_flight(comm: Communicator, count: str) -> Any:
    """Small all_reduces, eight at a time."""
    arrays = [np.ones(SMALL, np.float32) for _ in range(8)]
    flying = [comm.start.all_reduce(array) for array in arrays]

    def turn(number: int) -> None:
        slot = number % 8
        flying[slot].wait()
        assert arrays[slot][-1] == comm.size
        arrays[slot][:] = 1
        flying[slot] = comm.start.all_reduce(arrays[slot])

    found = timed(int(count), turn)
    wait_all(flying)
    return found


# -- large ---------------------------------------------------------------------------------------------------------


def large(comm: Communicator, count: str) -> Any:
    """An all_reduce of so many float32, whose sums are whole: how many came wrong, and how long it took."""
    pattern = np.arange(int(count), dtype=np.float32) % 1000
    array = pattern + comm.rank
    seconds = _measure(comm, lambda: comm.all_reduce(array))
    pattern *= comm.size
    pattern += sum(range(comm.size))
    return {"wrong": int((array != pattern).sum()), "seconds": seconds}


def huge(comm: Communicator, size: str) -> Any:
    """An all_reduce of so many bytes, which wrap."""
    array = np.empty(int(size), np.uint8)
    piece = 64 * MIB
    for start in range(0, len(array), piece):
        array[start : start + piece] = _bytes(start, min(piece, len(array) - start)) + np.uint8(comm.rank)
    seconds = _measure(comm, lambda: comm.all_reduce(array, timeout=120))
    wrong = 0
    for start in range(0, len(array), piece):
        expected = _bytes(start, min(piece, len(array) - start)) * np.uint8(comm.size) + np.uint8(sum(range(comm.size)))
        wrong += int((array[start : start + piece] != expected).sum())
    return {"wrong": wrong, "seconds": seconds}


def _bytes(start: int, count: int) -> np.ndarray:
    """Other ones in every stretch of 256, so that one that is displaced shows."""
    numbers = np.arange(start, start + count, dtype=np.uint64)
    return ((numbers ^ (numbers >> np.uint64(8)) ^ (numbers >> np.uint64(27))) & np.uint64(255)).astype(np.uint8)


def _measure(comm: Communicator, call: Callable[[], Any]) -> float:
    comm.barrier(timeout=120)
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


# -- ctrl-c --------------------------------------------------------------------------------------------------------


def interrupted(comm: Communicator) -> Any:
    """Rank 0 is interrupted while it waits for the last one, which comes only then."""
    last, said = comm.size - 1, ""
    begin = time.perf_counter()
    if comm.rank == last:
        comm.recv(source=0, tag=1)
    if comm.rank == 0:
        threading.Thread(target=_interrupt_when_in_flight, args=(comm,)).start()
    try:
        right = (comm.all_reduce(np.ones(100_000), timeout=20) == comm.size).all()
        said = f"the {'right' if right else 'wrong'} result"
    except KeyboardInterrupt:
        said = "KeyboardInterrupt"
        comm.send(np.zeros(1), last, tag=1)
    except nexar.Cancelled as error:
        said = f"Cancelled by rank {error.rank}"
    return {"said": said, "seconds": time.perf_counter() - begin, "after": comm.all_reduce(1)}


def _interrupt_when_in_flight(comm: Communicator) -> None:
    deadline = time.monotonic() + 20
    while not comm.stats()["in_flight"] and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)  # it is in flight a moment before its thread sleeps
    os.kill(os.getpid(), signal.SIGINT)


TASKS: dict[str, Callable[..., Any]] = {
    "cases": cases,
    "in_a_row": in_a_row,
    "in_flight": in_flight,
    "large": large,
    "huge": huge,
    "interrupted": interrupted,
}


def host_of(rank: int, hosts: str) -> str:
    """Its id."""
    counts = [int(each) for each in hosts.split("+")]
    return next(f"host-{index}" for index in range(len(counts)) if rank < sum(counts[: index + 1]))


def main() -> None:
    task, hosts, transports, *numbers = sys.argv[1:]
    rank = int(os.environ["RANK"])
    with nexar.init(host_id=host_of(rank, hosts), transports=tuple(transports.split(","))) as comm:
        facts = {"rank": comm.rank, "got": TASKS[task](comm, *numbers)}
        comm.barrier(timeout=120)
    print(json.dumps(facts), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
