"""A rank without memory for a collective: its call raises MemoryError, and the others are notified at once."""

import gc
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nexar import Int8
from nexar.communicator.communicator import Communicator
from nexar.errors import Cancelled
from nexar.launch.spawn import spawn
from tests.processes.scale import MIB, schemes
from tests.processes.talk import await_that
from tests.processes.test_messages_without_memory import address_space

pytestmark = pytest.mark.full

SIZE = 3
POOR = 1  # the rank without memory
BLOCK = 144 * MIB  # bytes that the poor rank cannot have
SPARE = 64 * MIB  # less than half of that, enough for all else, threads included
STACK = 2 * MIB  # address space of a thread; with the usual 8 MiB, threads that start together could exceed SPARE
TIMEOUT = 30.0
FOLDER = "TEST_LIMITS_FOLDER"

Verb = Callable[[Any, int], Any]
"""A collective, called on a communicator or on its `start`, with so many bytes as the poor rank's result."""

VERBS: dict[str, Verb] = {
    "all_gather": lambda verbs, size: verbs.all_gather(np.zeros(size // SIZE, np.uint8)),
    "gather": lambda verbs, size: verbs.gather(np.zeros(size // SIZE, np.uint8), root=POOR),
    "all_to_all": lambda verbs, size: verbs.all_to_all(_rows(size)),
    "reduce_scatter_v": lambda verbs, size: verbs.reduce_scatter_v(np.zeros(size, np.uint8), [0, size, 0]),
    "scan": lambda verbs, size: verbs.scan(np.zeros(size, np.uint8)),
    "all_reduce of columns": lambda verbs, size: verbs.all_reduce(np.zeros((2, size), np.uint8).T),
    "all_reduce_bucketed": lambda verbs, size: verbs.all_reduce_bucketed([np.zeros(size, np.uint8)] * 2),
    "all_reduce_compressed": lambda verbs, size: verbs.all_reduce_compressed(np.zeros(size // 4, np.float32), Int8()),
    "all_gather_v": lambda verbs, size: verbs.all_gather_v(np.zeros(size // 2, np.uint8)),
    "gather_v": lambda verbs, size: verbs.gather_v(np.zeros(size // 2, np.uint8), root=POOR),
    "all_to_all_v": lambda verbs, size: verbs.all_to_all_v([np.zeros(size // 2, np.uint8)] * SIZE),
    "all_gather_object": lambda verbs, size: verbs.all_gather_object(np.zeros(size // 2, np.uint8)),
    "gather_object": lambda verbs, size: verbs.gather_object(np.zeros(size // 2, np.uint8), root=POOR),
    "pickled": lambda verbs, size: verbs.all_gather_object(bytes(size // 2), pickle=True),
    "broadcast_object": lambda verbs, size: verbs.broadcast_object(np.zeros(size, np.uint8), root=0),
}


def _rows(size: int) -> Any:
    return np.zeros(size - size % SIZE, np.uint8)


def call_all(comm: Communicator, *, started: bool) -> list[str]:
    """The verbs of which a rank did not raise what it should, and what it raised."""
    for verb in VERBS.values():
        verb(comm, 3 * 1024)  # links, threads and regions are made while there is memory for them
    wrong = []
    for number, (name, verb) in enumerate(VERBS.items()):
        found = _outcome(comm, verb, Path(os.environ[FOLDER]) / str(number), started=started)
        if found not in _expected(comm, name):
            wrong.append(f"{name}: {found}")
        assert comm.all_reduce(number) == SIZE * number  # nobody is out of step
    return wrong


def _expected(comm: Communicator, name: str) -> set[str]:
    """A rank that only sends, as the root of a broadcast does, may have ended before another one gives up."""
    if comm.rank == POOR:
        return {"MemoryError"}
    only_sends = name.startswith("gather") or (name == "broadcast_object" and comm.rank == 0)
    return {f"Cancelled by {POOR}", *(["fine"] if only_sends else [])}


def _outcome(comm: Communicator, verb: Verb, limited: Path, *, started: bool) -> str:
    """`limited`: appears when the poor rank has its limit. An array that came before would find memory there."""
    try:
        if comm.rank != POOR:
            await_that(limited.exists, "the limit of the poor rank")
            _perform(comm, verb, started=started)
        else:
            _perform_without_memory(comm, verb, limited, started=started)
    except MemoryError:
        return "MemoryError"
    except Cancelled as error:
        return f"Cancelled by {error.rank}"
    except Exception as error:  # noqa: BLE001 - reported, so that the other verbs are tried too
        return repr(error)
    return "fine"


def _perform(comm: Communicator, verb: Verb, *, started: bool) -> None:
    if started:
        verb(comm.start, BLOCK).wait()
    else:
        verb(comm, BLOCK)


def _perform_without_memory(comm: Communicator, verb: Verb, reached: Path, *, started: bool) -> None:
    """The limit is set inside, when the caller's own array is there."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    limited = _Limited(comm.start if started else comm, before[1], reached)
    try:
        request = verb(limited, BLOCK)
        if started:
            request.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class _Limited:
    """The same verbs; memory ends as one of them is called."""

    def __init__(self, verbs: Any, most: int, reached: Path) -> None:
        self._verbs = verbs
        self._most = most
        self._reached = reached
        self._arguments: tuple[Any, ...] = ()

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._verbs, name)

        def call(*arguments: Any, **options: Any) -> Any:
            gc.collect()  # what is freed later would be memory beyond SPARE
            resource.setrlimit(resource.RLIMIT_AS, (address_space() + SPARE, self._most))
            self._reached.touch()
            self._arguments = arguments  # an array that is freed while the call runs would be memory beyond SPARE
            return verb(*arguments, **options)

        return call


def call_blocking(comm: Communicator) -> list[str]:
    return call_all(comm, started=False)


def call_started(comm: Communicator) -> list[str]:
    return call_all(comm, started=True)


@pytest.fixture
def small_stacks() -> Iterator[None]:
    """Processes started meanwhile give their threads stacks of STACK bytes."""
    before = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_STACK, before)


@pytest.mark.timeout(len(VERBS) * TIMEOUT)
@pytest.mark.usefixtures("small_stacks")
@pytest.mark.parametrize("calls", [call_blocking, call_started])
@schemes("tls", "shm")
def test_a_rank_without_memory_for_a_collective_gives_it_up_for_all(
    scheme: str, calls: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise the others would raise CollectiveTimeout after their own timeout."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    # The C library reserves address space for each thread and keeps freed memory; a large array would find room there.
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(MIB))
    transports = ("shm", "tls") if scheme == "shm" else (scheme,)
    assert (
        spawn(calls, SIZE, transports=transports, collective_timeout=TIMEOUT, buffer_profile="inference") == [[]] * SIZE
    )
