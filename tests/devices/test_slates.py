"""Every operation with arrays of a device that no built-in adapter knows, and whose copies take their time."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nexar.arrays.devices import DeviceRegistry
from nexar.collectives.requests import HALF_WRITTEN
from nexar.communicator.communicator import Communicator
from nexar.errors import DeviceError, NexarError, UsageError
from tests.devices.operations import OPERATIONS, Device, numbers, total
from tests.packages.slate.nexar_slate import Engine, Slate, SlateAdapter
from tests.ranks import on_every

DEVICE = Device(lambda values: Slate(values, Engine()), Slate.values, Slate, np.ndarray)


@pytest.fixture(autouse=True)
def adapters(monkeypatch: pytest.MonkeyPatch) -> DeviceRegistry:
    """Those of a process in which the package is known."""
    adapters = DeviceRegistry()
    adapters.add(SlateAdapter())
    monkeypatch.setattr("nexar.arrays.operand.ADAPTERS", adapters)
    return adapters


def test_every_verb_takes_arrays_of_a_device_and_gives_them_back(world: list[Communicator]) -> None:
    for operation in OPERATIONS:
        on_every(world, lambda comm: operation(comm, DEVICE))  # noqa: B023


def test_a_team_restores_arrays_of_a_device(pair: list[Communicator]) -> None:
    def run(comm: Communicator) -> None:
        team, given = comm.resilient(), DEVICE.make(numbers(comm.rank))
        assert team.all_reduce(given) is given
        assert DEVICE.equal(given, total(2))
        assert DEVICE.equal(team.scan(given, out=given), total(2) * (comm.rank + 1))

    on_every(pair, run)


def test_host_memory_is_used_again(adapters: DeviceRegistry, pair: list[Communicator]) -> None:
    def run(comm: Communicator) -> None:
        given = DEVICE.make(numbers(comm.rank))
        for _ in range(50):
            comm.all_reduce(given)

    on_every(pair, run)
    stats = adapters.stats()["slate"]
    assert stats.hits + stats.misses == 100
    assert stats.misses < 20


def raised_by(task: Callable[[], Any]) -> BaseException | None:
    try:
        task()
    except NexarError as error:
        return error
    return None


@pytest.mark.parametrize("broken", ["stage_out", "stage_in", "done"])
def test_a_device_that_fails_raises_device_error_and_leaves_the_array_as_it_was(
    pair: list[Communicator], broken: str
) -> None:
    def run(comm: Communicator) -> tuple[BaseException | None, Slate]:
        given = DEVICE.make(numbers(comm.rank))
        given.engine.broken = broken if comm.rank == 1 else None
        return raised_by(lambda: comm.all_reduce(given, timeout=0.5)), given

    (_, _), (error, given) = on_every(pair, run)
    assert isinstance(error, DeviceError)
    assert error.device == "slate:0"
    assert not any(HALF_WRITTEN in note for note in getattr(error, "__notes__", ()))
    given.engine.broken = None
    assert DEVICE.equal(given, numbers(1))


def test_a_receive_into_what_is_neither_is_refused_as_ever(pair: list[Communicator]) -> None:
    with pytest.raises(UsageError, match="nothing can be received into list"):
        pair[0].recv([1, 2], source=1)
