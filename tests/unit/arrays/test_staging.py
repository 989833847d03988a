"""Host memory of device arrays: used again, never too early; and errors of a device are DeviceErrors."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.arrays.device_adapter import Outline
from nexar.arrays.staging import HostMemory, StagedArray, Staging, gather, rounded, scatter
from nexar.errors import DeviceError, UsageError
from tests.packages.slate.nexar_slate import Engine, Slate, SlateAdapter

KIB = 1 << 10


class Switch:
    """Copies that are done when somebody says so."""

    def __init__(self) -> None:
        self.over = False

    def done(self) -> bool:
        return self.over


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory(SlateAdapter(), kept_bytes=64 * KIB)


@pytest.fixture
def staging() -> Staging:
    return Staging(SlateAdapter())


def slate(values: Any, patience: int = 3) -> Slate:
    return Slate(values, Engine(patience))


@given(st.integers(0, 1 << 40))
def test_sizes_are_rounded_up_by_an_eighth_at_most(size: int) -> None:
    assert size <= rounded(size) <= max(4 * KIB, size + size // 8 + 64)
    assert rounded(rounded(size)) == rounded(size)


def test_memory_that_nobody_sees_any_more_is_used_again(memory: HostMemory) -> None:
    first = memory.take(1000)
    assert (len(first), first.flags.writeable) == (1000, True)
    first[:] = 7
    del first
    assert memory.take(500)[:3].tolist() == [7, 7, 7]
    assert memory.stats()[:2] == (1, 1)


KEEPERS: dict[str, Callable[[Any], Any]] = {
    "a slice": lambda array: array[10:20],
    "another dtype": lambda array: array.view(np.float32).reshape(2, -1),
    "its bytes": lambda array: array.data[4:],
    "a view of a view": lambda array: array[1:][1:].data.cast("B"),
}


@pytest.mark.parametrize("keeper", KEEPERS)
def test_memory_that_somebody_sees_is_never_handed_out_again(memory: HostMemory, keeper: str) -> None:
    array = memory.take(4096)
    array[:] = 1
    kept = KEEPERS[keeper](array)
    del array
    for _ in range(5):
        memory.take(4096)[:] = 2
    assert set(bytes(kept)) == {1}
    del kept
    gc.collect()
    assert memory.stats().free_bytes == 2 * 4096


def test_memory_that_the_device_reads_is_not_handed_out_before_it_has(memory: HostMemory) -> None:
    switch = Switch()
    array = memory.take(100)
    array[:] = 1
    assert memory.mark_in_use(array[5:].view(np.uint8), switch)
    del array
    other = memory.take(100)
    other[:] = 2
    assert memory.stats().misses == 2
    switch.over = True
    assert memory.take(100)[0] == 1


def test_memory_of_others_is_known_as_such(memory: HostMemory) -> None:
    assert not memory.owns(np.zeros(3))
    assert not memory.mark_in_use(np.zeros(3)[1:], Switch())
    assert memory.owns(memory.take(10)[3:])


def test_memory_with_which_the_device_failed_is_let_go(memory: HostMemory) -> None:
    engine = Engine()
    array = memory.take(100)
    memory.mark_in_use(array, engine.begin("stage_in", lambda: None))
    engine.broken = "done"
    del array
    assert memory.stats().free_bytes == 0
    memory.take(100)
    assert memory.stats().misses == 2


def test_no_more_is_kept_than_was_agreed_and_the_newest_stays(memory: HostMemory) -> None:
    arrays = [memory.take(size * KIB) for size in (40, 20, 30)]
    for array in arrays:
        array[:4] = len(array) // KIB
    del array
    while arrays:
        del arrays[0]
    assert memory.stats().free_bytes == 50 * KIB
    assert memory.take(30 * KIB)[0] == 30


def test_an_array_is_read_and_written_in_order(staging: Staging) -> None:
    given = slate(np.arange(12.0).reshape(3, 4))
    staged = staging.stage(given)
    assert (staged.size, staged.nbytes, staged.dtype) == (12, 96, np.float64)
    array = staged.read()
    assert np.array_equal(array, np.arange(12.0).reshape(3, 4))
    array *= 2
    staged.write(array)
    del array
    for _ in range(4):
        staging.allocate(12, np.dtype(np.float64), "slate:0")[:] = -1  # must not be what the device still reads
    assert given.values().tolist() == (np.arange(12.0).reshape(3, 4) * 2).tolist()


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3)])
def test_a_new_array_is_made_beside_the_first(staging: Staging, shape: tuple[int, ...]) -> None:
    staged = staging.stage(slate([1]))
    values = np.ones(shape, np.int16)
    values.flags.writeable = False
    made = staged.new_array(values)
    assert isinstance(made, Slate)
    assert (made.shape, made.dtype) == (shape, np.int16)
    assert np.array_equal(made.values(), values)
    assert staged.stream.begun == ["stage_in"]


def test_a_new_array_of_staging_memory_is_not_copied_once_more(staging: Staging) -> None:
    staged = staging.stage(slate([1]))
    room = staged.allocate((2, 3), np.dtype(np.float32))
    room[...] = 5
    made = staged.new_array(room)
    assert staging.memory.stats().misses == 1
    assert made.values().tolist() == [[5, 5, 5]] * 2


def test_pieces_are_gathered_and_scattered_by_one_copy_each(staging: Staging) -> None:
    engine = Engine()
    slates = [Slate(np.full(shape, number, np.float32), engine) for number, shape in enumerate([(2,), (2, 2), ()])]
    staged_arrays = [staging.stage(each) for each in slates]
    flat = staged_arrays[0].allocate((7,), np.dtype(np.float32))
    gather(staged_arrays, flat).wait()
    assert flat.tolist() == [0, 0, 1, 1, 1, 1, 2]
    flat += 10
    scatter(staged_arrays, flat)
    assert engine.begun == ["stage_out", "stage_in"]
    assert [each.values().reshape(-1).tolist() for each in slates] == [[10, 10], [11] * 4, [12]]


def test_memory_that_is_not_ours_is_waited_for(staging: Staging) -> None:
    given, values = slate([0.0, 0.0]), np.array([1.0, 2.0])
    staging.stage(given).write(values)
    values[:] = -1
    assert given.values().tolist() == [1, 2]


@pytest.mark.parametrize(("broken", "act"), [
    ("stage_out", StagedArray.read),
    ("done", StagedArray.read),
    ("stage_in", lambda staged: staged.write(np.zeros(2))),
    ("stage_in", lambda staged: staged.new_array(np.zeros(2))),
])  # fmt: skip
def test_errors_of_the_device_say_which_one_and_what_it_did(staging: Staging, broken: str, act: Any) -> None:
    staged = staging.stage(slate([1.0, 2.0]))
    staged.stream.broken = broken
    with pytest.raises(
        DeviceError, match=r"stage_(in|out) on device slate:0 failed: RuntimeError: the chalk"
    ) as raised:
        act(staged)
    assert (raised.value.device, isinstance(raised.value.__cause__, RuntimeError)) == ("slate:0", True)
    assert "pass a host array" in str(raised.value)


def test_no_memory_for_the_host_is_an_error_of_the_device(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object, size: int) -> Any:
        raise MemoryError

    monkeypatch.setattr(SlateAdapter, "host_memory", refuse)
    with pytest.raises(DeviceError, match="host_memory on device slate:0 failed: MemoryError;"):
        staging.stage(slate([1.0])).read()


def test_arrays_that_cannot_be_compared_are_an_error_of_the_device(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Any:
        raise RuntimeError("the chalk is wet")

    monkeypatch.setattr(SlateAdapter, "overlap", refuse)
    one, other = staging.stage(slate([1.0])), staging.stage(slate([2.0]))
    with pytest.raises(DeviceError, match="comparing two arrays on device slate:0 failed: RuntimeError: the chalk"):
        one.overlaps(other)


@pytest.mark.parametrize(
    ("method", "gives", "says"),
    [
        ("outline", None, "looking at an array on device slate failed: TypeError: .*expected an Outline"),
        ("outline", Outline("float64", (1,), "d"), "expected an Outline with a NumPy dtype"),  # type: ignore[arg-type]
        ("outline", Outline(np.dtype(float), (-1,), "d"), r"the shape \(-1,\)"),
        ("outline", Outline(np.dtype(float), 1, "d"), "TypeError"),  # type: ignore[arg-type]
        ("host_memory", np.empty(64, np.uint8), "64 bytes; 4096 bytes were asked for"),
        ("host_memory", b"bytes", "returned bytes; 4096 bytes"),
        ("stage_out", None, "stage_out on device slate:0 failed: TypeError: it returned None"),
        ("stage_in", None, "stage_in on device slate:0 failed: TypeError: it returned None"),
        ("recognises", np.zeros(2), "recognising an array on device slate failed: ValueError"),
    ],
)
def test_what_an_adapter_gives_that_is_wrong_is_an_error_of_the_device(
    staging: Staging, monkeypatch: pytest.MonkeyPatch, method: str, gives: Any, says: str
) -> None:
    monkeypatch.setattr(SlateAdapter, method, lambda *_: gives)

    def use() -> None:
        array = slate([1.0])
        if staging.recognises(array):
            staged = staging.stage(array)
            staged.write(staged.read())

    with pytest.raises(DeviceError, match=says):
        use()


def test_an_array_that_can_never_be_staged_is_the_callers_mistake(staging: Staging) -> None:
    with pytest.raises(UsageError, match="write numbers on it"):
        staging.stage(slate(np.array([None])))
