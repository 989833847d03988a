import dataclasses
import enum
import math
import pickle
import sys
from collections import OrderedDict, namedtuple
from datetime import UTC, date, datetime, time, timedelta, timezone
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack
from msgspec.msgpack import Ext

from nexar.arrays.devices import DeviceRegistry
from nexar.arrays.dtypes import DTYPES
from nexar.communicator.serialization import (
    APART_BYTES,
    ARRAY,
    ARRAY_APART,
    FROZENSET,
    INTEGER,
    MAX_EQUAL_HASHES,
    NUMBER,
    PAIRS,
    SET,
    TENSOR,
    ObjectError,
    ValueReader,
    ValueWriter,
    decode_object,
    encode_object,
)
from nexar.errors import UsageError
from tests.hostile.colliding_keys import colliding_keys
from tests.packages.slate.nexar_slate import Engine, Slate, SlateAdapter


class Trap:
    """Says so when somebody reads it."""

    sprung = False

    @staticmethod
    def spring() -> None:
        Trap.sprung = True

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return Trap.spring, ()


@pytest.mark.parametrize("pickled", [False, True])
def test_a_value_and_its_arrays_come_back(pickled: bool) -> None:
    value = {"weights": np.arange(10_000.0), "names": ("a", 2), "few": np.ones(3, np.float16)}
    parts = encode_object(value, pickle=pickled)
    assert sum(len(part) for part in parts[1:]) >= 80_000
    got = decode_object(parts, pickle=pickled)
    assert np.array_equal(got["weights"], value["weights"])
    assert got["few"].dtype == np.float16
    assert got["names"] == ("a", 2)


def test_a_pickled_value_is_not_even_looked_at_by_who_did_not_ask() -> None:
    parts = encode_object(Trap(), pickle=True)
    with pytest.raises(UsageError, match="nothing was read"):
        decode_object(parts)
    assert not Trap.sprung
    decode_object(parts, pickle=True)
    assert Trap.sprung


def test_who_allows_pickle_takes_values_without_it_too() -> None:
    assert decode_object(encode_object([1, (2,)]), pickle=True) == [1, (2,)]


def test_pickle_takes_what_values_do_not() -> None:
    assert decode_object(encode_object({1j: range(3)}, pickle=True), pickle=True) == {1j: range(3)}
    with pytest.raises(UsageError, match="cannot be pickled"):
        encode_object(lambda: None, pickle=True)


@given(st.lists(st.binary(max_size=64), max_size=3))
def test_any_parts_are_a_value_or_an_error(parts: list[bytes]) -> None:
    try:
        decode_object([memoryview(bytearray(part)) for part in parts])
    except (ObjectError, UsageError):
        return


@pytest.mark.parametrize("parts", [[], [b""], [b"\x00"], [b"\x07abc"], [b"\x01"]])
def test_what_is_no_object_is_refused(parts: list[bytes]) -> None:
    with pytest.raises(ObjectError):
        decode_object([memoryview(part) for part in parts], pickle=True)


def test_a_pickle_that_cannot_be_read_here_says_so() -> None:
    unreadable = b"\x02" + pickle.dumps(Trap()).replace(b"Trap", b"Trop")
    with pytest.raises(ObjectError, match="can be read here"):
        decode_object([memoryview(unreadable)], pickle=True)


hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")) | st.binary()
    | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
    | st.datetimes(timezones=st.none() | st.just(UTC)) | st.dates() | st.times()
    | st.timedeltas(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
values = st.recursive(
    hashable | st.floats() | st.complex_numbers(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.sets(hashable, max_size=3)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.binary().map(bytearray)
    ),
    max_leaves=12,
)


def again(value: object) -> object:
    writer = ValueWriter()
    data = writer.write(value)
    return ValueReader([memoryview(bytearray(part)) for part in writer.large_arrays]).read(memoryview(data))


def same(left: Any, right: Any) -> bool:
    """Equal, and of the same types all the way; nan is nan."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    return bool(left == right) if isinstance(left, set | frozenset) else repr(left) == repr(right)


@given(values)
def test_a_value_comes_back_as_it_was(value: object) -> None:
    assert same(again(value), value)


@pytest.mark.parametrize("number", [2**63, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 10**400, -(10**400)])
def test_integers_have_no_limit(number: int) -> None:
    assert again([number, {number: 1}, (number,)]) == [number, {number: 1}, (number,)]


def test_not_a_number_stays_one_also_as_a_key() -> None:
    (key,) = again({math.nan: 1})  # type: ignore[misc]
    assert math.isnan(key)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (40, 200)])
def test_arrays_of_every_dtype_come_back_with_their_shape(dtype: object, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)  # type: ignore[arg-type]
    got = again({"array": array})["array"]  # type: ignore[index]
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert got.tobytes() == array.tobytes()
    assert got.flags.writeable


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_numpy_come_back_as_what_they_were(dtype: object) -> None:
    number = np.ones(1, dtype)[0]  # type: ignore[call-overload]
    got = again(number)
    assert type(got) is type(number)
    assert got == number


def test_arrays_with_gaps_are_sent_in_their_own_order() -> None:
    array = np.arange(20_000.0).reshape(100, 200)
    for gappy in (array.T, array[:, ::3], np.asfortranarray(array)):
        assert np.array_equal(again(gappy), gappy)  # type: ignore[arg-type]


def test_large_arrays_are_not_copied() -> None:
    array = np.zeros(APART_BYTES, np.uint8)
    writer = ValueWriter()
    data = writer.write([array, array[: APART_BYTES - 1], (array,)])
    assert [len(part) for part in writer.large_arrays] == [APART_BYTES] * 2
    array[5] = 9
    got = ValueReader(writer.large_arrays).read(memoryview(data))
    assert got[0][5] == got[2][0][5] == 9


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int = 1


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (Point(), "dataclasses.asdict"),
        (namedtuple("Pair", "a b")(1, 2), "send it as a tuple"),  # noqa: PYI024
        (OrderedDict(a=1), "send it as a dict"),
        (Colour.RED, "send it as a int"),
        (object(), "turn it into"),
        (memoryview(b"x"), "turn it into"),
        (np.ma.masked_array([1]), "numpy.asarray"),
        (np.array(["text"]), "convert it"),
        (np.array([None]), "convert it"),
        (np.datetime64("2020-01-01"), "convert it"),
        (len, "turn it into"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused_with_a_remedy(value: object, remedy: str) -> None:
    for holder in (value, [value], {"a": (value,)}):
        with pytest.raises(UsageError, match=remedy) as raised:
            ValueWriter().write(holder)
        assert "pickle=True" in str(raised.value)


def test_what_contains_itself_is_refused() -> None:
    ring: list[object] = []
    ring.append(ring)
    with pytest.raises(UsageError, match="contains itself"):
        ValueWriter().write(ring)
    with pytest.raises(UsageError, match="not Unicode"):
        ValueWriter().write(["\ud800"])


# ---------------------------------------------------------------- bytes of somebody else


def extension(code: int, content: object) -> bytes:
    data = content if isinstance(content, bytes) else msgspec.msgpack.encode(content)
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, data))


@given(st.binary(max_size=200) | st.builds(extension, st.integers(-128, 127), st.binary(max_size=50)))
def test_any_bytes_are_a_value_or_an_error(data: bytes) -> None:
    try:
        ValueReader([memoryview(bytearray(16))]).read(memoryview(data))
    except ObjectError:
        return


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        extension(99, b""),
        extension(PAIRS, [1, 2, 3]),
        extension(PAIRS, [[1], 2]),
        extension(SET, [[1]]),
        extension(SET, 5),
        extension(ARRAY, (12, (2,), bytes(8))),
        extension(ARRAY, (12, (-1,), bytes(8))),
        extension(ARRAY, (0, (8,), bytes(8))),
        extension(ARRAY, (200, (1,), bytes(8))),
        extension(ARRAY, (12, (2**62, 2**62), bytes(8))),
        extension(ARRAY, 7),
        extension(ARRAY_APART, (12, (1,), 1)),
        extension(ARRAY_APART, (12, (1,), -1)),
        extension(ARRAY_APART, (12, (1,), "0")),
        extension(NUMBER, b""),
        extension(NUMBER, bytes((12, 1))),
        b"\x91" * 5000,
    ],
)
def test_bytes_that_no_writer_wrote_are_refused(data: bytes) -> None:
    with pytest.raises(ObjectError):
        ValueReader([memoryview(bytearray(8))]).read(memoryview(data))


def test_values_within_values_end_somewhere() -> None:
    data = b"\xc0"
    for _ in range(2000):
        data = extension(3, b"\x91" + data)
    with pytest.raises(ObjectError):
        ValueReader([]).read(memoryview(data))


def test_moments_keep_their_offset_and_their_side_of_the_hour() -> None:
    zone = timezone(timedelta(hours=5, minutes=45))
    moments = [datetime(2024, 2, 29, 1, 2, 3, 4, zone), time(1, 2, fold=1), date(1, 1, 1), timedelta(-1, 5)]
    got = again(moments)
    assert got == moments
    assert got[1].fold == 1  # type: ignore[index]


def test_an_array_of_a_device_arrives_as_one_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = DeviceRegistry()
    adapters.add(SlateAdapter())
    monkeypatch.setattr("nexar.arrays.operand.ADAPTERS", adapters)
    for shape in ((3,), (100, 100)):
        writer = ValueWriter()
        data = writer.write({"a": Slate(np.ones(shape, np.float32), Engine())})
        found = ValueReader(writer.large_arrays).read(memoryview(data))["a"]
        assert type(found) is np.ndarray
        assert np.array_equal(found, np.ones(shape, np.float32))


def test_a_tensor_arrives_as_an_array_where_torch_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ValueWriter()
    data = msgspec.msgpack.encode(msgspec.msgpack.Ext(TENSOR, msgspec.msgpack.encode(writer._encodable(np.arange(3)))))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert ValueReader(()).read(memoryview(data)).tolist() == [0, 1, 2]


def test_a_tensor_without_values_is_no_object() -> None:
    with pytest.raises(ObjectError, match="a tensor without its values"):
        ValueReader(()).read(memoryview(msgspec.msgpack.encode(msgspec.msgpack.Ext(TENSOR, msgspec.msgpack.encode(3)))))


def _colliding(count: int) -> list[Ext]:
    """Different integers of one hash: Python takes them modulo this prime."""
    prime = 2**61 - 1
    return [Ext(INTEGER, (number * prime).to_bytes(12, "little", signed=True)) for number in range(1, count + 1)]


@pytest.mark.parametrize("code", [SET, FROZENSET, PAIRS])
def test_keys_that_collide_on_purpose_are_refused(code: int) -> None:
    keys = _colliding(MAX_EQUAL_HASHES + 1)
    items = keys if code != PAIRS else [each for key in keys for each in (key, None)]
    with pytest.raises(ObjectError, match="same hash"):
        ValueReader(()).read(memoryview(msgpack.encode(Ext(code, msgpack.encode(items)))))


def test_a_few_keys_may_collide_by_chance() -> None:
    few = msgpack.encode(Ext(SET, msgpack.encode(_colliding(MAX_EQUAL_HASHES))))
    assert len(ValueReader(()).read(memoryview(few))) == MAX_EQUAL_HASHES
    many = {complex(real, imaginary) for real in range(100) for imaginary in range(100)}
    assert ValueReader(()).read(memoryview(ValueWriter().write(many))) == many


def test_keys_whose_different_hashes_collide_on_purpose_are_refused() -> None:
    """Half a megabyte that took 17 s, and twice as many keys take four times as long."""
    keys = colliding_keys(17)
    assert len({hash(key) for key in keys}) == len(keys)
    assert len(ValueReader(()).read(memoryview(ValueWriter().write(dict.fromkeys(range(len(keys))))))) == len(keys)
    items = [each for key in keys for each in (key, None)]
    with pytest.raises(ObjectError, match="that collide"):
        ValueReader(()).read(memoryview(msgpack.encode(Ext(PAIRS, msgpack.encode(items)))))


@pytest.mark.parametrize("value", [set(range(1000)), frozenset(range(1000)), {n: str(n) for n in range(1000, 0, -1)}])
def test_many_keys_come_back_as_they_were(value: set[int] | frozenset[int] | dict[int, str]) -> None:
    back = ValueReader(()).read(memoryview(ValueWriter().write(value)))
    assert type(back) is type(value)
    assert back == value
    if isinstance(value, dict):
        assert list(back) == list(value)


def test_a_key_without_its_value_is_no_object() -> None:
    with pytest.raises(ObjectError, match="without its value"):
        ValueReader(()).read(memoryview(msgpack.encode(Ext(PAIRS, msgpack.encode([1, 2, 3])))))


@pytest.mark.parametrize("value", [{1: 2}, {(1, 2): 3}, [1, 2], b"bytes"])
def test_no_container_is_built_by_the_decoder_itself(value: object) -> None:
    """Its keys would be compared before anybody has seen them."""
    with pytest.raises(ObjectError):
        ValueReader(()).read(memoryview(msgpack.encode(value)))
