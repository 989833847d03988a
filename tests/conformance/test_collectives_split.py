"""Parts of communicators: who is in which, by themselves, nested, and all at once from different threads."""

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nexar.communicator.communicator import Communicator
from nexar.errors import CollectiveMismatch, NexarError, OperationTimeout, UsageError
from tests.conformance.worlds import TOPOLOGY, ranks_over
from tests.processes.scale import sized
from tests.ranks import EVENT_TIMEOUT, on_every

ROWS = 2
SIZE = 2 * ROWS
ROUNDS = sized(100, 1000)


@pytest.fixture(params=["memory", "shm", "tls"])
def world(request: pytest.FixtureRequest) -> Iterator[list[Communicator]]:
    with ranks_over(request.param, SIZE, collective_timeout=EVENT_TIMEOUT) as made:
        yield made


def part(comm: Communicator, color: int, key: int = 0) -> Communicator:
    made = comm.split(color, key, timeout=EVENT_TIMEOUT)
    assert made is not None
    return made


# ---------------------------------------------------------------- who is in which


def test_ranks_of_one_colour_become_a_communicator_ordered_by_key(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> tuple[Any, ...]:
        team = part(comm, comm.rank % 2, key=-comm.rank)
        found = team.rank, team.size, team.all_gather(comm.rank).tolist(), team.id, team.membership.size
        team.close()
        return found

    found = on_every(world, run)
    assert [each[:3] for each in found] == [(1, 2, [2, 0]), (1, 2, [3, 1]), (0, 2, [2, 0]), (0, 2, [3, 1])]
    assert found[0][3] == found[2][3] != found[1][3] == found[3][3]


def test_ties_of_keys_keep_the_order_of_ranks_and_no_colour_takes_part_in_none(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> list[int] | None:
        team = comm.split(None if comm.rank == 1 else 7, key=5)
        if team is None:
            return None
        with team:
            return list(team.all_gather(comm.rank))

    assert on_every(world, run) == [[0, 2, 3], None, [0, 2, 3], [0, 2, 3]]


def test_a_group_is_made_by_its_members_alone_in_the_order_given(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> list[int] | None:
        if comm.rank == 3:
            return None  # it need not even ask
        team = comm.group([2, 0])
        if team is None:
            return None
        with team, comm.group([2, 0]) as again:  # type: ignore[union-attr]
            assert team.id != again.id
            assert again.all_reduce(1) == 2
            return list(team.all_gather(comm.rank))

    assert on_every(world, run) == [[2, 0], None, [2, 0], None]
    assert on_every(world, lambda comm: comm.all_reduce(1)) == [SIZE] * SIZE


def test_parts_have_parts_and_every_one_has_the_whole_api(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> None:
        half = part(comm, comm.rank // ROWS)
        alone = part(half, half.rank)
        again = part(half, 0, -half.rank)
        assert (alone.size, again.rank) == (1, 1 - half.rank)
        assert alone.all_reduce(5) == 5
        assert again.all_gather(half.rank).tolist() == [1, 0]
        assert half.neighbors == ((1 - half.rank,) if TOPOLOGY == "full_mesh" else ())
        other = 1 - half.rank
        assert half.sendrecv(np.array([half.rank]), other, source=other).tolist() == [other]
        assert again.start.all_reduce(2).wait(EVENT_TIMEOUT) == 4
        half.barrier()
        assert half.stats()["in_flight"] == 0
        for each in (alone, again, half):
            each.close()

    on_every(world, run)
    assert on_every(world, lambda comm: comm.all_reduce(1)) == [SIZE] * SIZE


# ---------------------------------------------------------------- isolation


def test_messages_of_one_communicator_are_not_received_on_another(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> None:
        team = part(comm, 0)
        if comm.rank == 0:
            comm.send(np.array([1]), 1, tag=5)
            team.send(np.array([2]), 1, tag=5)
        elif comm.rank == 1:
            assert team.recv(source=0, tag=5).tolist() == [2]
            with pytest.raises(OperationTimeout):
                team.recv(source=0, tag=5, timeout=0.02)
            assert comm.recv(source=0, tag=5).tolist() == [1]
        team.barrier()  # a receive from a rank that has closed it raises Revoked
        team.close()

    on_every(world, run)


def test_what_goes_wrong_in_a_part_does_not_touch_the_others(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> None:
        row, column = part(comm, comm.rank // ROWS), part(comm, comm.rank % ROWS)
        if comm.rank // ROWS == 0:
            with pytest.raises(CollectiveMismatch):
                row.all_reduce(np.ones(comm.rank + 1), timeout=EVENT_TIMEOUT)
            with pytest.raises(CollectiveMismatch):
                row.barrier(timeout=EVENT_TIMEOUT)
        else:
            assert row.all_reduce(1) == 2
        assert column.all_reduce(1) == 2
        assert comm.all_reduce(1) == SIZE
        row.close()
        assert column.all_reduce(2) == 4
        with pytest.raises(UsageError, match="closed"):
            row.barrier()
        column.close()

    on_every(world, run)


def test_a_part_that_some_never_make_times_out_and_leaves_nothing_behind(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> str:
        if comm.rank == 1:
            for other in (0, 2, 3):  # arrives after the notice of the timeout; a split before that could succeed here
                comm.recv_object(other, timeout=EVENT_TIMEOUT)
            return ""
        with pytest.raises(NexarError) as raised:
            comm.split(0, timeout=0.2)
        comm.send_object(None, 1, timeout=EVENT_TIMEOUT)
        return type(raised.value).__name__

    ends = on_every(world, run)
    assert set(ends) <= {"", "CollectiveTimeout", "Cancelled"}
    with pytest.raises(NexarError):
        world[1].split(0, timeout=EVENT_TIMEOUT)
    assert on_every(world, lambda comm: comm.all_reduce(1)) == [SIZE] * SIZE


def test_closing_a_part_ends_what_is_in_flight_there_alone(world: list[Communicator]) -> None:
    teams = on_every(world, lambda comm: part(comm, 0))
    pending = teams[0].start.all_reduce(1)
    kept = world[0].start.all_reduce(1)
    teams[0].close()
    with pytest.raises(NexarError):
        pending.wait(EVENT_TIMEOUT)
    on_every(world[1:], lambda comm: comm.all_reduce(1))
    assert kept.wait(EVENT_TIMEOUT) == SIZE
    for team in teams:
        team.close()


# ---------------------------------------------------------------- all at once


class Grid:
    """One rank of a grid: its world, its row and its column."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.row = part(comm, comm.rank // ROWS)
        self.column = part(comm, comm.rank % ROWS)

    def on_the_world(self) -> None:
        comm = self.comm
        for turn in range(ROUNDS):
            assert (comm.all_reduce(np.full(1 + turn % 500, comm.rank)) == sum(range(SIZE))).all()
            if turn % 10 == 0:
                comm.barrier()

    def on_the_row(self) -> None:
        row = self.row
        for turn in range(ROUNDS):
            got = row.all_gather(np.full(1 + turn % 300, self.comm.rank))
            assert got[:, 0].tolist() == [self.comm.rank // ROWS * ROWS + index for index in range(ROWS)]
            assert row.start.broadcast(np.array([turn + row.rank]), turn % 2).wait()[0] == turn + turn % 2

    def on_the_column(self) -> None:
        column = self.column
        for turn in range(ROUNDS):
            got = column.reduce_scatter(np.arange(2 * ROWS) + turn)
            assert got.tolist() == [2 * (2 * column.rank + each + turn) for each in range(2)]
            other = 1 - column.rank
            assert column.sendrecv(np.array([turn]), other, source=other)[0] == turn

    def close(self) -> None:
        self.row.close()
        self.column.close()


@pytest.mark.timeout(600)
def test_rows_columns_and_the_world_run_different_collectives_at_once(world: list[Communicator]) -> None:
    grids = on_every(world, Grid)
    tasks = [task for grid in grids for task in (grid.on_the_world, grid.on_the_row, grid.on_the_column)]
    on_every(tasks, lambda task: task())
    for grid in grids:
        assert grid.comm.stats()["in_flight"] == 0
        grid.close()


def test_many_parts_are_made_and_closed_and_leave_no_threads(world: list[Communicator]) -> None:
    def run(comm: Communicator, turns: int = 20) -> None:
        for turn in range(turns):
            with part(comm, (comm.rank + turn) % 2) as team:
                assert team.all_reduce(1) == 2

    on_every(world, lambda comm: run(comm, turns=2))  # a node starts what it needs once
    before = threading.active_count()
    on_every(world, run)
    assert threading.active_count() <= before


# ---------------------------------------------------------------- dropped


def _held() -> tuple[int, int]:
    """Descriptors and mappings of this process."""
    return len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())


def _use_and_drop(comm: Communicator) -> None:
    team = part(comm, 0)
    assert team.all_reduce(1) == SIZE
    team.barrier()


def _settled(world: list[Communicator], most: tuple[int, int] = (1 << 30, 1 << 30)) -> tuple[int, int]:
    """Wait until what was dropped is closed, and no more is held than that."""
    deadline = time.monotonic() + EVENT_TIMEOUT
    while True:
        gc.collect()
        held = _held()
        parts = sum(len(comm._runtime.successors._generations) for comm in world) - len(world)
        if not parts and held[0] <= most[0] and held[1] <= most[1]:
            return held
        assert time.monotonic() < deadline, f"{parts} parts left, held {held}, expected {most}"
        time.sleep(0.01)


@pytest.mark.full
def test_parts_that_are_dropped_without_close_free_what_they_held(world: list[Communicator]) -> None:
    if TOPOLOGY != "full_mesh":
        pytest.skip("the ranks are themselves a part there")
    on_every(world, _use_and_drop)
    before = _settled(world)
    for _ in range(10):
        on_every(world, _use_and_drop)
    _settled(world, (before[0], before[1] + 10))  # the allocator maps some memory of its own


def test_a_part_that_is_dropped_while_a_request_uses_it_goes_on(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> int:
        request = part(comm, 0).start.all_reduce(1)
        gc.collect()
        return int(request.wait(EVENT_TIMEOUT))

    assert on_every(world, run) == [SIZE] * SIZE
