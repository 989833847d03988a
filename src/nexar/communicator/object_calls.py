"""Values that are not arrays, as calls of collectives: each travels as one row of bytes, whose size only its owner
knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.allocations import Allocations
from nexar.collectives.all_gather import all_gather_v
from nexar.collectives.assembly import Assembly
from nexar.collectives.call import Call
from nexar.collectives.executor import Run
from nexar.collectives.fingerprint import Fingerprint, rooted
from nexar.collectives.gather import gather_v
from nexar.collectives.operations import OperationCode
from nexar.collectives.scatter import scatter
from nexar.collectives.work import Work
from nexar.communicator.objects import decode_object, encode_object
from nexar.communicator.parts import flatten, unflatten
from nexar.communicator.values import ObjectError
from nexar.errors import PeerMisbehaved, UsageError

_Row = NDArray[Any]

_LARGEST: Final = 1 << 47  # bytes: more than a process can address


def broadcast_object(
    assembly: Assembly, value: Any, root: int, *, pickle: bool, code: OperationCode = OperationCode.BROADCAST_OBJECT
) -> Work:
    """The root's value. `code`: the call that this is a part of."""
    root = assembly.group.check(root)
    memory = Allocations()
    row = _row(memory, value, pickle=pickle) if assembly.group.rank == root else None
    call = assembly.begin(Fingerprint(code, 0, 0, rooted(root)))
    work = assembly.work(call, _broadcast(assembly, call, row, root, _reader(pickle=pickle)))
    return work.failing(memory.error)


def _broadcast(assembly: Assembly, call: Call, row: _Row | None, root: int, read: Callable[[int, _Row], Any]) -> Run:
    """First how long it is, then the row itself."""
    size = np.array([0 if row is None else len(row)], np.int64)
    code = OperationCode.BROADCAST
    yield from assembly.execute(call, "tree", code, size, root=root)
    found = _room(root, int(size[0])) if row is None else row
    name = assembly.choose_schedule(code, len(found), found.dtype)
    yield from assembly.execute(call, name, code, found, root=root, phase=1)
    return read(root, found)


def all_gather_object(
    assembly: Assembly, value: Any, *, pickle: bool, code: OperationCode = OperationCode.ALL_GATHER_OBJECT
) -> Work:
    """A list of all values, by rank. `code` as above."""
    memory = Allocations()
    read = _reader(pickle=pickle)
    work = all_gather_v(assembly, _row(memory, value, pickle=pickle), code)
    return work.failing(memory.error).then(lambda rows: [read(rank, row) for rank, row in enumerate(rows)])


def gather_object(assembly: Assembly, value: Any, root: int, *, pickle: bool) -> Work:
    """At the root a list of all values, by rank; None elsewhere."""
    memory = Allocations()
    read = _reader(pickle=pickle)
    root = assembly.group.check(root)
    work = gather_v(assembly, _row(memory, value, pickle=pickle), root, OperationCode.GATHER_OBJECT)
    return work.failing(memory.error).then(
        lambda rows: None if rows is None else [read(rank, row) for rank, row in enumerate(rows)]
    )


def scatter_object(assembly: Assembly, values: Sequence[Any] | None, root: int, *, pickle: bool) -> Work:
    """The root's value for me."""
    root = assembly.group.check(root)
    memory = Allocations()
    rows = None
    if assembly.group.rank == root:
        if values is None or len(values) != assembly.group.size:
            found = "none" if values is None else len(values)
            raise UsageError(f"scatter_object needs a value for each of {assembly.group.size} ranks, and got {found}")
        rows = [_row(memory, value, pickle=pickle) for value in values]
    read = _reader(pickle=pickle)
    work = scatter(assembly, rows, root, OperationCode.SCATTER_OBJECT)
    return work.failing(memory.error).then(lambda row: read(root, row))


def _room(rank: int, size: int) -> _Row:
    """For what that rank says it sends. It takes memory as the bytes arrive, not before."""
    if not 0 <= size <= _LARGEST:
        raise PeerMisbehaved(rank=rank, what=f"it announced an object of {size} bytes")
    return np.empty(size, np.uint8)


def _row(memory: Allocations, value: Any, *, pickle: bool) -> _Row:
    def encode() -> _Row:
        return np.frombuffer(flatten(encode_object(value, pickle=pickle)), np.uint8)

    return memory.take(encode, (0,), np.dtype(np.uint8))


def _reader(*, pickle: bool) -> Callable[[int, _Row], Any]:
    def read(rank: int, row: _Row) -> Any:
        try:
            return decode_object(unflatten(row.data), pickle=pickle)
        except UsageError:  # a pickled value that this rank did not ask for: no fault of the sender
            raise
        except (ObjectError, ValueError) as error:
            raise PeerMisbehaved(rank=rank, what=f"it sent no object: {error}") from error

    return read
