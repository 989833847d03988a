"""Values as MessagePack, each coming back as the type it was; large arrays beside it, as the memory they are.

Only types that can be read without running anybody's code: what is made of the bytes is made here. Types that are
nearly one of these (a named tuple, an enum, a dataclass) are refused, because something else would come back.

Every container is an extension of its own that holds one flat array: so a decoder builds no dict and no set whose keys
this module has not seen. Keys that collide on purpose would make building one quadratic: see `Reader._insert`.

A tensor of torch, on whatever device, comes back as one on the CPU, if torch is loaded there: to which device it goes
is for the receiver to say. Arrays of other devices come back as NumPy's.

Values that are not arrays: encoded into parts, and decoded again.

The first part says how it was encoded and holds the value; the others are the memory of its large arrays.
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
from nexar.arrays.operand import adapt, mirror_of
from nexar.arrays.views import as_bytes, from_bytes
from nexar.errors import UsageError

APART_BYTES: Final = 4 << 10
"""An array from this size on travels beside the encoded value, without a copy."""
_SMALLEST, _LARGEST = -(1 << 63), (1 << 64) - 1  # of MessagePack's integers
_ATOMS: Final = frozenset((NoneType, bool, float, str))  # MessagePack has them as they are
MAX_EQUAL_HASHES: Final = 256
"""Keys of one dict or set that may have the same hash. Hashes of numbers and tuples are not keyed, so a sender can make
as many equal ones as it likes, and each key is compared with all of those before it. Honest values have a few."""
_AT_ONCE: Final = 64  # keys
_LEAST_SECONDS: Final = 1.0  # longer than a pause of the garbage collector
_SECONDS_PER_KEY: Final = 10e-6  # fifty times what honest keys take, besides their hashes
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
    """Bytes that are no encoded value: whoever sent them speaks something else."""


# ---------------------------------------------------------------- writing


class ValueWriter:
    """Turns one value into what MessagePack can hold. `apart`: the memory of its large arrays, in order."""

    def __init__(self) -> None:
        self.apart: list[memoryview] = []

    def write(self, value: object) -> bytes:
        """UsageError names what cannot be sent, and what to do about it."""
        try:
            return _encode(self._plain(value))
        except RecursionError:
            raise UsageError("the value is nested too deeply, or contains itself; send its parts one by one") from None
        except UnicodeEncodeError as error:
            raise UsageError(f"a text of this value is not Unicode ({error}); send it as bytes") from error

    def _plain(self, value: Any) -> Any:
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
        mirror = mirror_of(value) if hasattr(value, "dtype") and hasattr(value, "shape") else None
        return _refuse(value) if mirror is None else self._array(mirror.read())

    def _within(self, code: int, values: Any) -> Ext:
        # Most lists are of texts and floats alone. To know that takes no walk.
        plain = type(values) is list and _ATOMS.issuperset(map(type, values))
        return Ext(code, _encode(values if plain else [self._plain(each) for each in values]))

    def _array(self, value: NDArray[Any]) -> Ext:
        code, shape = _code_of(value), value.shape
        held = value if value.flags.c_contiguous else np.ascontiguousarray(value)
        if held.nbytes < APART_BYTES:
            return Ext(ARRAY, _encode((code, shape, held.tobytes())))
        self.apart.append(as_bytes(held))
        return Ext(ARRAY_APART, _encode((code, shape, len(self.apart) - 1)))


def _encode_integer(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _code_of(array: NDArray[Any]) -> int:
    try:
        return code_of(array.dtype)
    except TypeError as error:
        raise UsageError(f"{error}; convert it, or pass pickle=True on both ends") from error


def _refuse(value: object) -> NoReturn:
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
        list: lambda writer, value: writer._within(LIST, value),
        dict: lambda writer, value: writer._within(PAIRS, [each for pair in value.items() for each in pair]),
        tuple: lambda writer, value: writer._within(TUPLE, value),
        set: lambda writer, value: writer._within(SET, value),
        frozenset: lambda writer, value: writer._within(FROZENSET, value),
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
    """Reads one value, whose large arrays lie in `apart`: they are used where they are."""

    def __init__(self, apart: Sequence[memoryview]) -> None:
        self._apart = apart
        self._seconds = _LEAST_SECONDS  # of processor time that are left for keys

    def read(self, data: memoryview) -> Any:
        """ObjectError for anything that a Writer would not have written."""
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
        return frozenset(keys)  # as quick: the same keys in the same order

    def _pairs(self, data: memoryview) -> dict[Any, Any]:
        flat, made = self._items(data), dict[Any, Any]()
        keys, values = flat[::2], flat[1::2]
        if len(keys) != len(values):
            raise ValueError("a key without its value")
        self._insert(keys, lambda part: made.update(zip(keys[part], values[part], strict=True)))
        return made

    def _insert(self, keys: list[Any], insert: Callable[[slice], None]) -> None:
        """Call `insert` for one part of the keys after the other. ValueError if too many have the same hash, or if the
        keys of this value take more processor time than so many need. Different hashes collide too, where they lead
        to the same places of a table, one after the other: only the time shows that, whatever Python's tables are like.
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
            self._seconds -= thread_time() - hashed - 4 * (hashed - begin)  # who inserts a tuple hashes it again
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

    def _array_apart(self, data: memoryview) -> NDArray[Any]:
        code, shape, index = _decode_place(data)
        return _array_of(self._apart[_natural(index)], code, shape)


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
        ARRAY_APART: ValueReader._array_apart,
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
_PROTOCOL: Final = 5  # the first that leaves large memory apart


def encode_object(value: object, *, pickle: bool = False) -> list[memoryview]:
    """The parts of a value; large arrays are not copied, so leave them alone until they are sent.

    UsageError names what cannot be sent. `pickle` takes nearly everything, but only for receivers who ask for it too.
    MemoryError if there is no memory for the parts.
    """
    if pickle:
        return _encode_pickle(value)
    writer = ValueWriter()
    data = writer.write(value)
    return [memoryview(bytes((_VALUES,)) + data), *writer.apart]


def _encode_pickle(value: object) -> list[memoryview]:
    apart: list[pickling.PickleBuffer] = []
    try:
        data = pickling.dumps(value, protocol=_PROTOCOL, buffer_callback=apart.append)
    except MemoryError:
        raise  # says nothing about the value
    except Exception as error:  # whatever the __reduce__ of somebody's class raises
        raise UsageError(f"a {type(value).__qualname__} cannot be pickled: {error}") from error
    return [memoryview(bytes((_PICKLE,)) + data), *(buffer.raw() for buffer in apart)]


def decode_object(parts: Sequence[memoryview], *, pickle: bool = False) -> Any:
    """The value. Its large arrays use the memory of their parts.

    ObjectError for parts that are none. UsageError for a pickled value that was not asked for: nothing of it is read,
    since reading it runs code that the sender chose. MemoryError if there is no memory for the value.
    """
    how = parts[0][0] if parts and len(parts[0]) else 0
    if how == _VALUES:
        return ValueReader(parts[1:]).read(parts[0][1:])
    if how != _PICKLE:
        raise ObjectError(f"not an encoded object: it begins with {how}")
    if not pickle:
        raise UsageError(
            "the object was pickled, and reading it would run code of its sender's choice; nothing was read. Send it "
            "without pickle=True, or pass pickle=True here too, if you trust who sent it with your process"
        )
    try:
        return pickling.loads(parts[0][1:], buffers=parts[1:])  # noqa: S301 - both ends have asked for it
    except MemoryError:
        raise  # says nothing about what was sent
    except Exception as error:  # whatever a constructor raises that the sender chose
        raise ObjectError(f"not a pickled object that can be read here: {error!r}") from error
