"""Collectives of Python objects. An object is one row of bytes, whose size only its owner knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.operand import Allocations
from nexar.collectives.call import RegionCall
from nexar.collectives.context import CollectiveContext
from nexar.collectives.data_movement import all_gather_v, gather_v, scatter
from nexar.collectives.executor import Run
from nexar.collectives.fingerprint import Fingerprint, rooted
from nexar.collectives.operations import OperationCode
from nexar.collectives.requests import PendingCollective
from nexar.communicator.multipart import flatten, unflatten
from nexar.communicator.serialization import ObjectError, decode_object, encode_object
from nexar.errors import PeerMisbehaved, UsageError

_Row = NDArray[Any]

_LARGEST: Final = 1 << 47  # bytes: more than a process can address


def broadcast_object(
    context: CollectiveContext,
    value: Any,
    root: int,
    *,
    pickle: bool,
    code: OperationCode = OperationCode.BROADCAST_OBJECT,
) -> PendingCollective:
    """Start broadcast_object, as operation `code`."""
    root = context.group.check(root)
    memory = Allocations()
    row = _row(memory, value, pickle=pickle) if context.group.rank == root else None
    call = context.begin(Fingerprint(code, 0, 0, rooted(root)))
    work = context.work(call, _broadcast(context, call, row, root, _reader(pickle=pickle)))
    return work.failing(memory.error)


def _broadcast(
    context: CollectiveContext, call: RegionCall, row: _Row | None, root: int, read: Callable[[int, _Row], Any]
) -> Run:
    size = np.array([0 if row is None else len(row)], np.int64)
    code = OperationCode.BROADCAST
    yield from context.execute(call, "tree", code, size, root=root)
    found = _row_memory(root, int(size[0])) if row is None else row
    name = context.choose_schedule(code, len(found), found.dtype)
    yield from context.execute(call, name, code, found, root=root, phase=1)
    return read(root, found)


def all_gather_object(
    context: CollectiveContext, value: Any, *, pickle: bool, code: OperationCode = OperationCode.ALL_GATHER_OBJECT
) -> PendingCollective:
    """Start all_gather_object, as operation `code`."""
    memory = Allocations()
    read = _reader(pickle=pickle)
    work = all_gather_v(context, _row(memory, value, pickle=pickle), code)
    return work.failing(memory.error).map_result(lambda rows: [read(rank, row) for rank, row in enumerate(rows)])


def gather_object(context: CollectiveContext, value: Any, root: int, *, pickle: bool) -> PendingCollective:
    """Start gather_object."""
    memory = Allocations()
    read = _reader(pickle=pickle)
    root = context.group.check(root)
    work = gather_v(context, _row(memory, value, pickle=pickle), root, OperationCode.GATHER_OBJECT)
    return work.failing(memory.error).map_result(
        lambda rows: None if rows is None else [read(rank, row) for rank, row in enumerate(rows)]
    )


def scatter_object(
    context: CollectiveContext, values: Sequence[Any] | None, root: int, *, pickle: bool
) -> PendingCollective:
    """Start scatter_object."""
    root = context.group.check(root)
    memory = Allocations()
    rows = None
    if context.group.rank == root:
        if values is None or len(values) != context.group.size:
            found = "none" if values is None else len(values)
            raise UsageError(f"scatter_object needs a value for each of {context.group.size} ranks, and got {found}")
        rows = [_row(memory, value, pickle=pickle) for value in values]
    read = _reader(pickle=pickle)
    work = scatter(context, rows, root, OperationCode.SCATTER_OBJECT)
    return work.failing(memory.error).map_result(lambda row: read(root, row))


def _row_memory(rank: int, size: int) -> _Row:
    """A false size costs nothing: pages are allocated as bytes arrive."""
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
        except UsageError:  # a pickled value without pickle=True here: not the sender's fault
            raise
        except (ObjectError, ValueError) as error:
            raise PeerMisbehaved(rank=rank, what=f"it sent an invalid object: {error}") from error

    return read
