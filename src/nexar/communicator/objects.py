"""Values that are not arrays: encoded into parts, and decoded again.

The first part says how it was encoded and holds the value; the others are the memory of its large arrays.
"""

from __future__ import annotations

import pickle as pickling
from collections.abc import Sequence
from typing import Any, Final

from nexar.communicator.values import ObjectError, Reader, Writer
from nexar.errors import UsageError

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
    writer = Writer()
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
        return Reader(parts[1:]).read(parts[0][1:])
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
