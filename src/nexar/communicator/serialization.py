"""Encoding of Python values as MessagePack, with large arrays as separate parts.

Every value comes back as its own type, and reading it runs no foreign code. So named tuples, enums and dataclasses are
rejected. Containers are extensions with one flat array, so MessagePack builds no dict or set from unchecked keys:
colliding keys would make that quadratic (`ValueReader._insert`).

A torch tensor comes back on the CPU if torch is loaded, because the receiver chooses the device; other devices' arrays
come back as NumPy arrays. The first part names the encoding and holds the value; the others are its large arrays.
"""

from __future__ import annotations

import pickle as pickling
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta
from time import thread_time
from types import MappingProxyType, NoneType
from typing import Any, Final, NoReturn, TypeAlias

import msgspec
import numpy as np
from msgspec.msgpack import Decoder, Encoder, Ext
from numpy.typing import NDArray

from nexar.arrays import torch_tensors
from nexar.arrays.dtypes import RAW, code_of
from nexar.arrays.operand import adapt, staged_array_of
from nexar.arrays.views import as_bytes, from_bytes
from nexar.errors import UsageError

# Arrays from this size are separate parts and are not copied.
APART_BYTES: Final = 4 << 10
_SMALLEST, _LARGEST = -(1 << 63), (1 << 64) - 1  # of MessagePack's integers
_ATOMS: Final = frozenset((NoneType, bool, float, str))  # native types of MessagePack
# Keys of one dict or set with the same hash. Hashes of numbers and tuples are not keyed, so a sender can make any
# number of equal hashes, and each key is compared with all before it. Honest values have few.
MAX_EQUAL_HASHES: Final = 256
_AT_ONCE: Final = 64  # keys
_LEAST_SECONDS: Final = 1.0  # longer than a pause of the garbage collector
_SECONDS_PER_KEY: Final = 10e-6  # fifty times what honest keys need, without hashing
_Item: TypeAlias = bool | int | float | str | Ext | None
_encode: Final = Encoder().encode
_decode_item: Final = Decoder(_Item).decode
_decode_items: Final = Decoder(list[_Item]).decode
_decode_array: Final = Decoder(tuple[int, tuple[int, ...], bytes]).decode
_decode_place: Final = Decoder(tuple[int, tuple[int, ...], int]).decode
_COMPLEX: Final = struct.Struct("<dd")
_SPAN: Final = struct.Struct("<qqq")

# Numbers are the wire format: never reuse one.
INTEGER, COMPLEX, TUPLE, SET, FROZENSET, PAIRS, BYTEARRAY, ARRAY, ARRAY_APART, NUMBER = range(1, 11)
DATETIME, DATE, TIME, TIMEDELTA, TENSOR, LIST, BYTES = range(11, 18)


class ObjectError(ValueError):
    """The bytes are not an encoded value."""


# ---------------------------------------------------------------- writing


class ValueWriter:
    """Converts one value to MessagePack. `large_arrays`: separate parts, in order."""

    def __init__(self) -> None:
        self.large_arrays: list[memoryview] = []

    def write(self, value: object) -> bytes:
        """UsageError names the value that cannot be sent, and the remedy."""
        try:
            return _encode(self._encodable(value))
        except RecursionError:
            raise UsageError("the value is nested too deeply, or contains itself; send its parts one by one") from None
        except UnicodeEncodeError as error:
            raise UsageError(f"a text of this value is not Unicode ({error}); send it as bytes") from error

    def _encodable(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is int:
            return value if _SMALLEST <= value <= _LARGEST else Ext(INTEGER, _encode_integer(value))
        writing = _WRITING.get(kind)
        if writing is not None:
            return writing(self, value)
        if isinstance(value, np.generic):
            array = np.asarray(value)
            return Ext(NUMBER, bytes((_code_of(array),)) + array.tobytes())
        if torch_tensors.is_tensor(value):
            return Ext(TENSOR, _encode(self._array(adapt(value).array)))
        staged = staged_array_of(value) if hasattr(value, "dtype") and hasattr(value, "shape") else None
        return _reject(value) if staged is None else self._array(staged.read())

    def _container(self, code: int, values: Any) -> Ext:
        # Most lists hold only str and float, which this finds without a Python loop.
        plain = type(values) is list and _ATOMS.issuperset(map(type, values))
        return Ext(code, _encode(values if plain else [self._encodable(each) for each in values]))

    def _array(self, value: NDArray[Any]) -> Ext:
        code, shape = _code_of(value), value.shape
        held = value if value.flags.c_contiguous else np.ascontiguousarray(value)
        if held.nbytes < APART_BYTES:
            return Ext(ARRAY, _encode((code, shape, held.tobytes())))
        self.large_arrays.append(as_bytes(held))
        return Ext(ARRAY_APART, _encode((code, shape, len(self.large_arrays) - 1)))


def _encode_integer(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _code_of(array: NDArray[Any]) -> int:
    try:
        return code_of(array.dtype)
    except TypeError as error:
        raise UsageError(f"{error}; convert it, or pass pickle=True on both ends") from error


def _reject(value: object) -> NoReturn:
    kind = type(value)
    remedy = "turn it into one of these"
    if hasattr(kind, "__dataclass_fields__"):
        remedy = "send dataclasses.asdict(value)"
    elif isinstance(value, tuple | list | dict | set | str | int | float):
        base = next(each.__name__ for each in kind.__mro__ if each.__module__ == "builtins")
        remedy = f"send it as a {base}, which is what would come back"
    elif isinstance(value, np.ndarray):
        remedy = "send numpy.asarray(value)"
    raise UsageError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be sent as an object; {remedy}, or pass pickle=True on both "
        "ends. Objects are None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, "
        "dates and times, NumPy arrays and numbers, torch tensors, arrays of devices"
    )


def _moment(value: datetime | time) -> bytes:
    return bytes((value.fold,)) + value.isoformat().encode()


_WRITING: Final[MappingProxyType[type, Callable[[ValueWriter, Any], Any]]] = MappingProxyType(
    {
        list: lambda writer, value: writer._container(LIST, value),
        dict: lambda writer, value: writer._container(PAIRS, [each for pair in value.items() for each in pair]),
        tuple: lambda writer, value: writer._container(TUPLE, value),
        set: lambda writer, value: writer._container(SET, value),
        frozenset: lambda writer, value: writer._container(FROZENSET, value),
        np.ndarray: ValueWriter._array,
        bytes: lambda _, value: Ext(BYTES, value),
        bytearray: lambda _, value: Ext(BYTEARRAY, value),
        complex: lambda _, value: Ext(COMPLEX, _COMPLEX.pack(value.real, value.imag)),
        datetime: lambda _, value: Ext(DATETIME, _moment(value)),
        date: lambda _, value: Ext(DATE, value.isoformat().encode()),
        time: lambda _, value: Ext(TIME, _moment(value)),
        timedelta: lambda _, value: Ext(TIMEDELTA, _SPAN.pack(value.days, value.seconds, value.microseconds)),
    }
)


# ---------------------------------------------------------------- reading


class ValueReader:
    """Reads one value, with large arrays in the given memory."""

    def __init__(self, large_arrays: Sequence[memoryview]) -> None:
        self._large_arrays = large_arrays
        self._seconds = _LEAST_SECONDS  # processor time left for keys

    def read(self, data: memoryview) -> Any:
        """ObjectError for bytes that ValueWriter does not write."""
        try:
            return self._value(_decode_item(data))
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, IndexError, struct.error) as error:
            raise ObjectError(f"not an encoded object: {error}") from error
        except RecursionError:
            raise ObjectError("not an encoded object: it is nested too deeply") from None

    def _value(self, item: _Item) -> Any:
        if type(item) is not Ext:
            return item
        return _READING[item.code](self, memoryview(item.data)) if item.code in _READING else _unknown(item.code)

    def _items(self, data: memoryview) -> list[Any]:
        return [self._value(item) if type(item) is Ext else item for item in _decode_items(data)]

    def _set(self, data: memoryview) -> set[Any]:
        keys, made = self._items(data), set[Any]()
        self._insert(keys, lambda part: made.update(keys[part]))
        return made

    def _frozenset(self, data: memoryview) -> frozenset[Any]:
        keys, trial = self._items(data), set[Any]()
        self._insert(keys, lambda part: trial.update(keys[part]))
        return frozenset(keys)  # as fast: the same keys in the same order

    def _pairs(self, data: memoryview) -> dict[Any, Any]:
        flat, made = self._items(data), dict[Any, Any]()
        keys, values = flat[::2], flat[1::2]
        if len(keys) != len(values):
            raise ValueError("a key without its value")
        self._insert(keys, lambda part: made.update(zip(keys[part], values[part], strict=True)))
        return made

    def _insert(self, keys: list[Any], insert: Callable[[slice], None]) -> None:
        """Calls `insert` for slices of the keys. ValueError if too many hashes are equal or if it takes too much
        processor time, because different hashes can collide too.
        """
        if len(keys) <= MAX_EQUAL_HASHES:
            return insert(slice(None))
        equal = Counter[int]()
        self._seconds += _SECONDS_PER_KEY * len(keys)
        for start in range(0, len(keys), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            begin = thread_time()
            hashes = [hash(key) for key in keys[part]]
            hashed = thread_time()
            equal.update(hashes)
            if (most := max(map(equal.__getitem__, hashes))) > MAX_EQUAL_HASHES:
                raise ValueError(f"{most} keys with the same hash; allowed are {MAX_EQUAL_HASHES}")
            insert(part)
            self._seconds -= thread_time() - hashed - 4 * (hashed - begin)  # inserting a tuple hashes it again
            if self._seconds < 0:
                raise ValueError(f"a dict or set of {len(keys)} keys that collide")
        return None

    def _array(self, data: memoryview) -> NDArray[Any]:
        code, shape, content = _decode_array(data)
        return _array_of(memoryview(bytearray(content)), code, shape)

    def _tensor(self, data: memoryview) -> Any:
        array = self._value(_decode_item(data))
        if not isinstance(array, np.ndarray):
            raise TypeError("a tensor without its values")
        return torch_tensors.tensor_of(array) if torch_tensors.is_loaded() else array

    def _large_array(self, data: memoryview) -> NDArray[Any]:
        code, shape, index = _decode_place(data)
        return _array_of(self._large_arrays[_natural(index)], code, shape)


def _array_of(data: memoryview, code: int, shape: Sequence[int]) -> NDArray[Any]:
    if code == RAW:
        raise ValueError("an array without a dtype")
    return from_bytes(data, code, tuple(_natural(extent) for extent in shape))


def _natural(number: int) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is neither an index nor an extent")
    return number


def _read_moment(kind: type[datetime | time], data: memoryview) -> Any:
    return kind.fromisoformat(str(data[1:], "ascii")).replace(fold=data[0])


def _unknown(code: int) -> NoReturn:
    raise ValueError(f"extension {code}, which this version does not know")


_READING: Final[MappingProxyType[int, Callable[[ValueReader, memoryview], Any]]] = MappingProxyType(
    {
        INTEGER: lambda _, data: int.from_bytes(data, "little", signed=True),
        COMPLEX: lambda _, data: complex(*_COMPLEX.unpack(data)),
        LIST: ValueReader._items,
        BYTES: lambda _, data: bytes(data),
        TUPLE: lambda reader, data: tuple(reader._items(data)),
        SET: ValueReader._set,
        FROZENSET: ValueReader._frozenset,
        PAIRS: ValueReader._pairs,
        BYTEARRAY: lambda _, data: bytearray(data),
        ARRAY: ValueReader._array,
        ARRAY_APART: ValueReader._large_array,
        TENSOR: ValueReader._tensor,
        NUMBER: lambda _, data: _array_of(memoryview(bytes(data[1:])), data[0], ())[()],
        DATETIME: lambda _, data: _read_moment(datetime, data),
        DATE: lambda _, data: date.fromisoformat(str(data, "ascii")),
        TIME: lambda _, data: _read_moment(time, data),
        TIMEDELTA: lambda _, data: timedelta(*_SPAN.unpack(data)),
    }
)

# The first byte of the first part. Numbers are the wire format: never reuse one.
_VALUES: Final = 1
_PICKLE: Final = 2
_PROTOCOL: Final = 5  # the first with out-of-band buffers


def encode_object(value: object, *, pickle: bool = False) -> list[memoryview]:
    """Return the parts of a value. Large arrays are not copied: do not change them until they are sent.

    Raises MemoryError, or UsageError for a value that cannot be sent; with `pickle`, nearly every value can.
    """
    if pickle:
        return _encode_pickle(value)
    writer = ValueWriter()
    data = writer.write(value)
    return [memoryview(bytes((_VALUES,)) + data), *writer.large_arrays]


def _encode_pickle(value: object) -> list[memoryview]:
    large_arrays: list[pickling.PickleBuffer] = []
    try:
        data = pickling.dumps(value, protocol=_PROTOCOL, buffer_callback=large_arrays.append)
    except MemoryError:
        raise  # not the value's fault
    except Exception as error:  # any exception of a user's __reduce__
        raise UsageError(f"a {type(value).__qualname__} cannot be pickled: {error}") from error
    return [memoryview(bytes((_PICKLE,)) + data), *(buffer.raw() for buffer in large_arrays)]


def decode_object(parts: Sequence[memoryview], *, pickle: bool = False) -> Any:
    """Return the value, with large arrays in the memory of their parts.

    Raises MemoryError; ObjectError if the parts are invalid; UsageError for a pickled value without `pickle`, because
    reading it runs code that the sender chose.
    """
    how = parts[0][0] if parts and len(parts[0]) else 0
    if how == _VALUES:
        return ValueReader(parts[1:]).read(parts[0][1:])
    if how != _PICKLE:
        raise ObjectError(f"not an encoded object: it begins with {how}")
    if not pickle:
        raise UsageError(
            "the object was pickled, and reading it would run code that its sender chose; nothing was read. Send it "
            "without pickle=True, or pass pickle=True here too, if you trust its sender to run code in this process"
        )
    try:
        return pickling.loads(parts[0][1:], buffers=parts[1:])  # noqa: S301 - both sides passed pickle=True
    except MemoryError:
        raise  # not the sender's fault
    except Exception as error:  # any exception of a constructor that the sender chose
        raise ObjectError(f"not a pickled object that can be read here: {error!r}") from error
