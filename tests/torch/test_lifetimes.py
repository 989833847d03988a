"""What process groups leave behind when they have ended: nothing, however many there were."""

import gc
import os
import time
import weakref
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import nexar
from nexar.torch import communicator_of
from tests.leaks import SETTLE_SECONDS, Stock, leaked_since
from tests.torch.processes import EVENT_TIMEOUT, on_ranks

GROUPS = 100
CLUSTERS = 5
MARK = "WHO_STARTED_THIS"


def initialise(folder: Path, rank: int, size: int, name: object = "store") -> None:
    where = f"file://{folder}/{name}"
    dist.init_process_group(
        "nexar", init_method=where, rank=rank, world_size=size, timeout=timedelta(seconds=EVENT_TIMEOUT)
    )


def use(group: dist.ProcessGroup | None = None) -> "weakref.ref[nexar.Communicator]":
    """Both ways of a call; returns a look at what the group stands on."""
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()
    return weakref.ref(communicator_of(group))


def alive(seen: list["weakref.ref[nexar.Communicator]"], patience: float = SETTLE_SECONDS) -> int:
    """How many somebody still holds. A thread that ends may hold the last one for a moment."""
    deadline = time.monotonic() + patience
    while (found := _held(seen)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def _held(seen: list["weakref.ref[nexar.Communicator]"]) -> int:
    gc.collect()
    return sum(each() is not None for each in seen)


def test_a_hundred_groups_that_were_destroyed_leave_nothing(tmp_path):
    def task(rank, size):
        before = Stock.take()
        initialise(tmp_path, rank, size)
        use()
        seen = []
        for _ in range(GROUPS):
            group = dist.new_group([0, 1])
            seen.append(use(group))
            dist.destroy_process_group(group)
            del group
        dist.destroy_process_group()
        return alive(seen), leaked_since(before), _zombies()

    assert on_ranks(tmp_path, 2, task, initialise=False) == [(0, [], [])] * 2


def test_clusters_that_were_left_leave_nothing_and_neither_do_their_seeds(tmp_path):
    def task(rank, size):
        os.environ[MARK] = str(tmp_path)
        before = Stock.take()
        seen = []
        for number in range(CLUSTERS):
            initialise(tmp_path, rank, size, number)
            seen.append(use())
            dist.destroy_process_group()
        return alive(seen), leaked_since(before), _zombies()

    assert on_ranks(tmp_path, 2, task, initialise=False) == [(0, [], [])] * 2
    deadline = time.monotonic() + EVENT_TIMEOUT
    while running := _marked(str(tmp_path)):
        assert time.monotonic() < deadline, f"seeds that still run: {running}"
        time.sleep(0.01)


def test_a_group_may_be_destroyed_while_a_call_is_in_flight(tmp_path):
    def task(rank, size):
        group, other = dist.new_group([0, 1]), dist.new_group([0, 1])
        if rank:
            dist.barrier()
            return ""
        message = dist.irecv(torch.zeros(3), 1, group=other)
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        future = work.get_future()
        for each in (group, other):
            dist.destroy_process_group(each)
        dist.barrier()  # the world is none the worse
        return _error(work.wait), _error(future.wait), _error(message.wait)

    works = on_ranks(tmp_path, 2, task)[0]
    assert works[0].startswith("UsageError: this communicator is closed")
    assert works[1].startswith("RuntimeError: ")
    assert "this communicator is closed" in works[1]
    assert "communicator of rank 0 was closed" in works[2]


def made_directly(folder: Path, rank: int, size: int) -> dist.ProcessGroup:
    """A group that torch does not know of, as libraries make them that replace groups while they train."""
    store = dist.FileStore(f"{folder}/store", size)
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout = timedelta(seconds=EVENT_TIMEOUT)
    made = dist.Backend._plugins["NEXAR"].creator_fn(options, None)
    if isinstance(made, dist.ProcessGroup):
        return made
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, made)
    return group


def test_a_group_that_is_dropped_leaves_and_the_next_one_meets_in_the_same_store(tmp_path):
    def task(rank, size):
        before = Stock.take()
        totals, seen = [], []
        for _ in range(2):
            group = made_directly(tmp_path, rank, size)
            tensor = torch.ones(1)
            group.allreduce(tensor).wait()
            totals.append(tensor.item())
            seen.append(weakref.ref(communicator_of(group)))
            del group
        return totals, alive(seen, EVENT_TIMEOUT), leaked_since(before), _zombies()  # they leave in other threads

    assert on_ranks(tmp_path, 2, task, initialise=False) == [([2.0] * 2, 0, [], [])] * 2


def test_the_others_are_notified_at_once_of_a_group_that_was_dropped(tmp_path):
    def task(rank, size):
        group = made_directly(tmp_path, rank, size)
        group.barrier().wait()
        if rank == 0:
            del group
            while not (tmp_path / "told").exists():  # the process goes on, so its end is not the signal
                time.sleep(0.01)
            return ""
        found = _error(group.allreduce(torch.ones(1)).wait)
        (tmp_path / "told").touch()
        return found

    assert "rank 0" in on_ranks(tmp_path, 2, task, initialise=False)[1]


def _error(call: object) -> str:
    try:
        call()  # type: ignore[operator]
    except Exception as error:  # noqa: BLE001  # to be looked at
        return f"{type(error).__name__}: {error}"
    return ""


def _zombies() -> list[str]:
    """Children that have ended and wait for somebody to take note."""
    children = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    return [pid for pid in children if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()]


def _marked(mark: str) -> list[str]:
    """Processes that were started with the mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append(entry.name)
        except OSError:  # it has gone
            continue
    return found
