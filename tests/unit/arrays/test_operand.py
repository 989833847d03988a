"""Allocations of a call: what cannot be had is replaced by a placeholder, and the failure is kept."""

import array
import ctypes
import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nexar.arrays.devices import DeviceRegistry
from nexar.arrays.dtypes import DTYPES
from nexar.arrays.operand import Allocations, adapt, number_of, numpy_array_of
from nexar.errors import UsageError
from tests.packages.slate.nexar_slate import Engine, Slate, SlateAdapter

HUGE = 1 << 56  # elements: more than a process can address


def refused() -> NDArray[Any]:
    raise MemoryError("on purpose")


def test_what_can_be_had_is_what_was_asked_for() -> None:
    memory = Allocations()
    array = np.arange(6.0).reshape(2, 3)
    assert memory.copy(array).tolist() == array.tolist()
    assert memory.empty(4, np.dtype(np.int8)).shape == (4,)
    assert memory.adapt(array.T).array.tolist() == array.T.tolist()
    room = memory.allocate(adapt(array), (5, 3))
    assert (room.array.shape, room.array.dtype) == ((5, 3), array.dtype)
    assert memory.error is None


def test_a_failed_allocation_becomes_a_placeholder_and_the_first_error_stands() -> None:
    memory = Allocations()
    found = memory.take(refused, (2, 3), np.dtype(np.float32))
    assert (found.shape, found.dtype, found.nbytes) == ((2, 3), np.float32, 24)
    first = memory.error
    room = memory.allocate(adapt(np.zeros(1)), (HUGE,))
    assert room.array.size == HUGE
    assert room.array.reshape(-1)[3:5].shape == (2,)
    assert first is not None
    assert memory.error is first


def test_an_array_that_cannot_be_copied_keeps_its_shape() -> None:
    memory = Allocations()
    columns = np.broadcast_to(np.float16(1), (HUGE, 3))  # not contiguous, so it would be copied
    given = memory.adapt(columns)
    assert (given.array.shape, given.array.dtype) == ((HUGE, 3), np.float16)
    assert not given.shares
    assert isinstance(memory.error, MemoryError)


def test_a_placeholder_cannot_be_written() -> None:
    found = Allocations().take(refused, (2,), np.dtype(np.int8))
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1


def test_a_masked_array_is_refused_because_its_mask_would_be_lost() -> None:
    with pytest.raises(UsageError, match="masked elements have no meaning"):
        numpy_array_of(np.ma.masked_array([1, 2], [True, False]), writable=False)


def test_a_buffer_of_something_else_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot be sent or reduced|does not hold numbers"):
        adapt(memoryview(b"abc").cast("c"))
    with pytest.raises(UsageError, match=r"a buffer of format .* does not hold numbers"):
        adapt(memoryview((ctypes.c_void_p * 2)()))


class Odd:
    """On a device that NumPy cannot read."""

    def __dlpack__(self, **_: object) -> Any:
        raise BufferError("on another device")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def test_what_dlpack_cannot_give_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match=r"DLPack cannot convert a Odd \(.*\); copy it to a NumPy array on the CPU"):
        numpy_array_of(Odd(), writable=False)


@pytest.mark.parametrize("value", [None, "3", [3], np.zeros(1), np.zeros(())])
def test_what_is_no_number_is_none(value: object) -> None:
    assert number_of(value) is None


@pytest.mark.parametrize("value", [np.longdouble(1), np.datetime64("2020-01-01"), np.str_("a")])
def test_numbers_that_cannot_travel_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match="cannot be sent or reduced"):
        number_of(value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (3, 0, 2)])
def test_a_contiguous_array_is_used_as_it_lies(dtype: Any, shape: tuple[int, ...]) -> None:
    given = np.ones(shape, dtype)
    operand = adapt(given, writable=True)
    assert operand.array is given
    operand.commit()
    assert operand.result() is given


LAYOUTS = {
    "a column": lambda: np.arange(12.0).reshape(3, 4)[:, 1],
    "every second": lambda: np.arange(12.0)[::2],
    "backwards": lambda: np.arange(12.0)[::-1],
    "Fortran order": lambda: np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "transposed": lambda: np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_read_in_c_order_and_written_back(layout: str) -> None:
    given = LAYOUTS[layout]()
    before = given.copy()
    operand = adapt(given, writable=True)
    assert operand.array.flags.c_contiguous
    assert np.array_equal(operand.array, before)
    operand.array += 100
    operand.commit()
    assert np.array_equal(given, before + 100)
    assert operand.result() is given


def test_it_reports_whether_what_is_written_is_seen_at_once() -> None:
    assert adapt(np.arange(4.0), writable=True).shares
    assert adapt(bytearray(8), writable=True).shares
    assert not adapt(np.arange(8.0)[::2], writable=True).shares
    assert not adapt(3.0, writable=True).shares


def test_what_is_only_read_is_never_written_back() -> None:
    given = np.arange(12.0)[::2]
    given.flags.writeable = False
    operand = adapt(given)
    operand.array[:] = 0
    operand.commit()
    assert given[1] == 2


@pytest.mark.parametrize("make", [lambda: np.arange(4.0), lambda: np.arange(8.0)[::2]])
def test_a_read_only_array_is_refused_where_it_would_be_written(make: Any) -> None:
    given = make()
    given.flags.writeable = False
    with pytest.raises(UsageError, match="read-only, but the operation writes to it; give a copy, or"):
        adapt(given, writable=True)
    assert np.array_equal(adapt(given).array, given)


def test_a_subclass_is_used_as_a_plain_array_of_the_same_memory() -> None:
    given = np.arange(6.0).reshape(2, 3).view(type("Mine", (np.ndarray,), {}))
    operand = adapt(given, writable=True)
    assert type(operand.array) is np.ndarray
    assert np.shares_memory(operand.array, given)
    assert operand.result() is given


@pytest.mark.parametrize("dtype", ["O", "U4", "M8[s]", ">f4", ">i2", "f4,i4", np.longdouble])
def test_a_dtype_that_cannot_travel_is_refused(dtype: Any) -> None:
    with pytest.raises(UsageError, match=r"cannot be sent or reduced; allowed: bool, .*, in native byte order"):
        adapt(np.zeros(3, dtype))


@pytest.mark.parametrize(("number", "dtype"), [(True, bool), (3, np.int64), (2.5, np.float64), (1j, np.complex128)])
def test_a_number_of_python_comes_back_as_a_new_one(number: Any, dtype: Any) -> None:
    operand = adapt(number, writable=True)
    assert operand.array.shape == ()
    assert operand.array.dtype == dtype
    operand.array[...] = operand.array * 2
    operand.commit()
    assert type(operand.result()) is type(number)
    assert operand.result() == type(number)(number * 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_number_of_numpy_comes_back_as_a_new_one_of_its_dtype(dtype: Any) -> None:
    number = np.ones((), dtype)[()]
    operand = adapt(number, writable=True)
    assert operand.array.dtype == np.dtype(dtype)
    assert type(operand.result()) is type(number)
    assert operand.result() == number


@pytest.mark.parametrize("number", [3, 2.5, np.float32(1)])
def test_several_results_of_a_number_are_an_array(number: Any) -> None:
    result = np.arange(3)
    assert adapt(number).like(result) is result


def test_an_integer_that_does_not_fit_is_refused_rather_than_of_another_dtype() -> None:
    with pytest.raises(UsageError, match="does not fit into 64 bits"):
        adapt(1 << 63)


BUFFERS = {
    "bytearray": lambda: bytearray(b"abcd"),
    "memoryview": lambda: memoryview(bytearray(b"abcd")),
    "array.array": lambda: array.array("h", [1, 2, 3]),
    "part of a memoryview": lambda: memoryview(bytearray(b"abcdefgh"))[::2],
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_are_written_in_place(kind: str) -> None:
    given = BUFFERS[kind]()
    operand = adapt(given, writable=True)
    operand.array += 1
    operand.commit()
    assert memoryview(given).tolist() == [each + 1 for each in memoryview(BUFFERS[kind]()).tolist()]
    assert operand.result() is given


def test_bytes_can_be_read_and_not_written() -> None:
    assert adapt(b"abc").array.tolist() == [97, 98, 99]
    with pytest.raises(UsageError, match="read-only"):
        adapt(b"abc", writable=True)


class Interface:
    def __init__(self, held: Any) -> None:
        self._held = held
        self.__array_interface__ = held.__array_interface__


class Capsule:
    def __init__(self, held: Any) -> None:
        self._held = held

    def __dlpack__(self, **options: Any) -> Any:
        return self._held.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._held.__dlpack_device__()
        return device


@pytest.mark.parametrize("wrap", [Interface, Capsule])
def test_foreign_arrays_are_used_in_their_own_memory(wrap: Any) -> None:
    held = np.arange(6.0).reshape(2, 3)
    operand = adapt(wrap(held), writable=True)
    operand.array += 1
    operand.commit()
    assert held.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert isinstance(operand.result(), wrap)


def test_what_only_makes_arrays_can_be_read_and_not_written() -> None:
    class Made:
        def __array__(self, *_: object, **__: object) -> Any:
            return np.arange(3)

    assert adapt(Made()).array.tolist() == [0, 1, 2]
    with pytest.raises(UsageError, match="expected an array, got Made; use "):
        adapt(Made(), writable=True)


@pytest.mark.parametrize("value", [None, "text", [1, 2], {"a": 1}, object()])
def test_what_is_no_array_is_refused_with_what_is(value: object) -> None:
    name = type(value).__name__
    with pytest.raises(
        UsageError, match=rf"expected an array, got {name}; .*allowed: NumPy arrays, numbers, .*torch tensors"
    ):
        adapt(value)


def test_an_array_of_numpy_is_given_back_as_it_is() -> None:
    result = np.arange(3)
    assert adapt(np.zeros(2)).like(result) is result


def test_messages_name_every_dtype_that_is_allowed() -> None:
    with pytest.raises(UsageError, match=re.escape(", ".join(str(dtype) for dtype in DTYPES))):
        adapt(np.zeros(1, object))


@pytest.fixture
def slates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is known."""
    adapters = DeviceRegistry()
    adapters.add(SlateAdapter())
    monkeypatch.setattr("nexar.arrays.operand.ADAPTERS", adapters)


@pytest.mark.usefixtures("slates")
def test_arrays_that_may_share_memory_are_distinguished_from_others() -> None:
    whole, slate = np.arange(6.0), Slate([1.0])
    assert adapt(whole).may_share_memory(adapt(whole[2:]))
    assert not adapt(whole[:2]).may_share_memory(adapt(whole[2:]))
    assert adapt(slate).may_share_memory(adapt(slate, writable=True, read=False))
    assert not adapt(slate).may_share_memory(adapt(Slate([1.0])))
    assert not adapt(slate).may_share_memory(adapt(whole))


@pytest.mark.usefixtures("slates")
def test_an_array_of_a_device_is_staged_and_written_when_it_is_committed() -> None:
    slate = Slate([[1.0, 2.0]], Engine())
    operand = adapt(slate, writable=True)
    assert not operand.shares
    operand.array[...] += 1
    assert slate.values().tolist() == [[1, 2]]
    operand.commit()
    assert slate.values().tolist() == [[2, 3]]
    assert operand.result() is slate
    room = operand.allocate((3,), np.dtype(np.float64))
    room[:] = 7
    made = operand.like(room)
    assert isinstance(made, Slate)
    assert made.values().tolist() == [7, 7, 7]


@pytest.mark.usefixtures("slates")
def test_what_will_be_written_anyway_is_not_copied_from_the_device() -> None:
    slate = Slate([1.0, 2.0], Engine())
    operand = adapt(slate, writable=True, read=False)
    operand.array[:] = 5
    operand.commit()
    assert slate.values().tolist() == [5, 5]
    assert slate.engine.begun == ["stage_in"]


@pytest.mark.usefixtures("slates")
def test_a_dtype_of_a_device_that_cannot_travel_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be sent or reduced"):
        adapt(Slate(np.array(["text"])))
