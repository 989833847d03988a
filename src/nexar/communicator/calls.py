"""The user's values as calls of collectives, and their results as the user's values.

What went in comes out: an array that is worked on in place is returned itself, a new one is of the caller's kind, and
a number gives a number. Everything is checked before the call takes its sequence number, so that a call that is
refused here is none, and the other ranks do not wait for it. Missing memory is different: the other ranks make the
call and need an answer. So the call takes its number and then fails: see nexar.arrays.allocations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.allocations import Allocations
from nexar.arrays.operand import Operand
from nexar.arrays.operations import Reduction, check, identity, reduction_of
from nexar.arrays.partition import Span, split
from nexar.collectives import all_gather as gathering
from nexar.collectives import all_to_all as exchanging
from nexar.collectives import gather as collecting
from nexar.collectives.all_reduce import all_reduce as begin_all_reduce
from nexar.collectives.assembly import Assembly, Manner
from nexar.collectives.broadcast import broadcast as begin_broadcast
from nexar.collectives.operations import OperationCode
from nexar.collectives.reduce import Reducing
from nexar.collectives.reduce import reduce as begin_reduce
from nexar.collectives.reduce_scatter import Scattering
from nexar.collectives.reduce_scatter import reduce_scatter as begin_reduce_scatter
from nexar.collectives.scan import scan as begin_scan
from nexar.collectives.scatter import scatter as begin_scatter
from nexar.collectives.work import Work
from nexar.errors import BufferMismatch, UsageError
from nexar.types import whole

Op = str | Callable[[Any, Any], Any]
"""The name of a reduction, or a function of two arrays that gives one."""


def all_reduce(assembly: Assembly, array: Any, op: Op, out: Any, manner: Manner, *, commutative: bool) -> Work:
    """In place, or in `out`."""
    memory = Allocations()
    given = memory.adapt(array, writable=out is None)
    reduction = _reduction(op, given.array, commutative=commutative)
    target = _target(memory, given, out)
    work = begin_all_reduce(assembly, _flat(target.array), reduction, manner)
    return work.failing(memory.error).then(lambda _: _done(target), writes=target.shares)


def broadcast(assembly: Assembly, array: Any, root: int, manner: Manner) -> Work:
    """In place."""
    root = assembly.group.check(root)
    at_root = assembly.group.rank == root
    memory = Allocations()
    target = memory.adapt(array, writable=not at_root, read=at_root)
    work = begin_broadcast(assembly, _flat(target.array), root, manner)
    return work.failing(memory.error).then(lambda _: _done(target), writes=target.shares)


def reduce(assembly: Assembly, array: Any, op: Op, out: Any, manner: Manner, *, root: int, commutative: bool) -> Work:
    """At the root in place, or in its `out`; None elsewhere."""
    root = assembly.group.check(root)
    at_root = assembly.group.rank == root
    memory = Allocations()
    given = memory.adapt(array, writable=at_root and out is None)
    reduction = _reduction(op, given.array, commutative=commutative)
    target = _target(memory, given, out) if at_root else None
    room = None if target is None else _flat(target.array)
    mine = _flat(given.array) if room is None else room  # the target has a copy of it, whatever they share
    work = begin_reduce(assembly, Reducing(mine, room, reduction, root), manner).failing(memory.error)
    return work.then(lambda _: None if target is None else _done(target), writes=target is not None and target.shares)


def all_gather(assembly: Assembly, array: Any, out: Any, manner: Manner) -> Work:
    """A new array (size, *shape), or `out`."""
    memory = Allocations()
    given = memory.adapt(array)
    size, rank = assembly.group.size, assembly.group.rank
    room = _room(memory, given, (size, *given.array.shape), out)
    source, target = _flat(given.array), _flat(room.array)
    if np.may_share_memory(source, target) and not _are_same(source, target.reshape(size, -1)[rank]):
        source = memory.copy(source)
    work = gathering.all_gather(assembly, source, target, manner).failing(memory.error)
    return work.then(lambda _: _made(given, room, out), writes=_writes(room, out))


def reduce_scatter(
    assembly: Assembly,
    array: Any,
    op: Op,
    out: Any,
    manner: Manner,
    *,
    commutative: bool,
    counts: Sequence[int] | None = None,
) -> Work:
    """My part of axis 0: a new array, or `out`. `counts`: the rows of each rank, if not as even as can be."""
    memory = Allocations()
    given = memory.adapt(array)
    reduction = _reduction(op, given.array, commutative=commutative)
    rows = _rows(given.array, assembly.group.size, counts)
    mine = rows[assembly.group.rank]
    room = _room(memory, given, (mine.count, *given.array.shape[1:]), out)
    width = math.prod(given.array.shape[1:])
    spans = tuple(Span(row.start * width, row.stop * width) for row in rows)
    source, target = _apart(memory, given.array, room.array), _flat(room.array)
    code = OperationCode.REDUCE_SCATTER if counts is None else OperationCode.REDUCE_SCATTER_V
    work = begin_reduce_scatter(assembly, Scattering(_flat(source), target, spans, reduction), manner, code)
    return work.failing(memory.error).then(lambda _: _made(given, room, out), writes=_writes(room, out))


def all_to_all(assembly: Assembly, array: Any, out: Any, manner: Manner) -> Work:
    """A new array of the same shape, or `out`."""
    memory = Allocations()
    given = memory.adapt(array)
    _blocks(given.array, assembly.group.size, "all_to_all")
    room = _room(memory, given, given.array.shape, out)
    work = exchanging.all_to_all(assembly, _flat(_apart(memory, given.array, room.array)), _flat(room.array), manner)
    return work.failing(memory.error).then(lambda _: _made(given, room, out), writes=_writes(room, out))


def gather(assembly: Assembly, array: Any, root: int, out: Any, manner: Manner) -> Work:
    """At the root a new array (size, *shape), or its `out`; None elsewhere."""
    root = assembly.group.check(root)
    memory = Allocations()
    given = memory.adapt(array)
    mine = assembly.group.rank == root
    room = _room(memory, given, (assembly.group.size, *given.array.shape), out) if mine else None
    flat = None if room is None else _flat(room.array)
    work = collecting.gather(assembly, _flat(given.array), flat, root, manner).failing(memory.error)
    return work.then(lambda _: None if room is None else _made(given, room, out), writes=_writes(room, out))


def scatter(assembly: Assembly, array: Any, root: int, out: Any, manner: Manner) -> Work:
    """My block of the root's array: a new array, or `out`."""
    root = assembly.group.check(root)
    memory = Allocations()
    given = memory.adapt(array) if assembly.group.rank == root else None
    room = None if out is None else memory.adapt(out, writable=True, read=False)
    blocks = None if given is None else _blocks(given.array, assembly.group.size, "scatter")
    work = begin_scatter(assembly, blocks, root, OperationCode.SCATTER, manner).failing(memory.error)

    def made(block: NDArray[Any]) -> Any:
        if room is None:
            return block if given is None else given.like(block)
        _fill(room, block, root)
        return _done(room)

    return work.then(made)


def scan(
    assembly: Assembly, array: Any, op: Op, out: Any, manner: Manner, *, exclusive: bool, commutative: bool
) -> Work:
    """A new array, or `out`."""
    memory = Allocations()
    given = memory.adapt(array)
    reduction = _reduction(op, given.array, commutative=commutative)
    if exclusive:
        identity(reduction, given.array.dtype)  # refuses what has none, on every rank alike
    room = _room(memory, given, given.array.shape, out)
    if memory.error is None:
        np.copyto(_flat(room.array), _flat(given.array))
    work = begin_scan(assembly, _flat(room.array), reduction, manner, exclusive=exclusive)
    return work.failing(memory.error).then(lambda _: _made(given, room, out), writes=_writes(room, out))


# -- unequal counts ------------------------------------------------------------------------------------------------


def all_gather_v(assembly: Assembly, array: Any) -> Work:
    """A list of arrays, by rank."""
    memory = Allocations()
    given = memory.adapt(array)
    return gathering.all_gather_v(assembly, given.array).failing(memory.error).then(_each(given))


def gather_v(assembly: Assembly, array: Any, root: int) -> Work:
    """At the root a list of arrays, by rank; None elsewhere."""
    memory = Allocations()
    given = memory.adapt(array)
    work = collecting.gather_v(assembly, given.array, assembly.group.check(root))
    return work.failing(memory.error).then(lambda found: None if found is None else _each(given)(found))


def scatter_v(assembly: Assembly, arrays: Sequence[Any] | None, root: int) -> Work:
    """The root's array for me."""
    root = assembly.group.check(root)
    memory = Allocations()
    given = _list(memory, assembly, arrays, "scatter_v") if assembly.group.rank == root else None
    blocks = None if given is None else [each.array for each in given]
    work = begin_scatter(assembly, blocks, root, OperationCode.SCATTER_V)
    return work.failing(memory.error).then(lambda block: block if given is None else given[0].like(block))


def all_to_all_v(assembly: Assembly, arrays: Sequence[Any]) -> Work:
    """A list of what each rank had for me."""
    memory = Allocations()
    given = _list(memory, assembly, arrays, "all_to_all_v")
    if len({each.array.dtype for each in given}) > 1:
        raise UsageError("all_to_all_v takes arrays of one dtype; convert them before")
    work = exchanging.all_to_all_v(assembly, [each.array for each in given])
    return work.failing(memory.error).then(_each(given[0]))


# -- inside --------------------------------------------------------------------------------------------------------


def _reduction(op: Op, array: NDArray[Any], *, commutative: bool) -> Reduction:
    reduction = reduction_of(op, commutative=commutative)
    check(reduction, array.dtype)
    return reduction


def _flat(array: NDArray[Any]) -> NDArray[Any]:
    return array.reshape(-1)


def _apart(memory: Allocations, array: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
    """The input, where writing the output does not change it."""
    return memory.copy(array) if np.may_share_memory(array, out) else array


def _are_same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Of one length, flat and contiguous."""
    return bool(one.ctypes.data == other.ctypes.data)


def _target(memory: Allocations, given: Operand, out: Any) -> Operand:
    """Where an operation works in place: on what was given, or on `out`, which gets a copy of it first."""
    if out is None:
        return given
    target = memory.adapt(out, writable=True, read=False)
    _fit(target, given.array.shape, given.array.dtype)
    if memory.error is None:
        np.copyto(_flat(target.array), _flat(given.array))
    return target


def _room(memory: Allocations, given: Operand, shape: tuple[int, ...], out: Any) -> Operand:
    """Where a result goes that is no array of the caller's yet."""
    if out is None:
        return memory.room(given, shape)
    room = memory.adapt(out, writable=True, read=False)
    _fit(room, shape, given.array.dtype)
    return room


def _fit(room: Operand, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    found = room.array
    if found.dtype != dtype or found.size != math.prod(shape):
        raise UsageError(
            f"out= is {found.dtype}{list(found.shape)}, but the result is {dtype}{list(shape)}; "
            "give an array of that dtype and as many elements"
        )


def _fill(room: Operand, block: NDArray[Any], root: int) -> None:
    if room.array.dtype != block.dtype or room.array.size != block.size:
        raise BufferMismatch(
            expected=f"{room.array.dtype}[{room.array.size}]", found=f"{block.dtype}[{block.size}]", source=root
        )
    np.copyto(_flat(room.array), _flat(block))


def _done(target: Operand) -> Any:
    """The caller's own array, or a new number where it gave one."""
    target.commit()
    return target.result()


def _made(given: Operand, room: Operand, out: Any) -> Any:
    return given.like(room.array) if out is None else _done(room)


def _writes(room: Operand | None, out: Any) -> bool:
    return out is not None and room is not None and room.shares


def _each(given: Operand) -> Callable[[Sequence[NDArray[Any]]], list[Any]]:
    return lambda found: [given.like(array) for array in found]


def _rows(array: NDArray[Any], size: int, counts: Sequence[int] | None) -> tuple[Span, ...]:
    if not array.ndim:
        raise UsageError("reduce_scatter splits axis 0, and a single number has none; give an array")
    if counts is None:
        return split(len(array), size)
    rows = [whole(count) for count in counts]
    if len(rows) != size or any(count is None or count < 0 for count in rows) or sum(counts) != len(array):
        raise UsageError(
            f"counts={list(counts)} do not cut {len(array)} rows into {size} parts; give one count per rank, "
            f"which add up to {len(array)}"
        )
    ends = np.cumsum([0, *counts]).tolist()
    return tuple(Span(start, stop) for start, stop in pairwise(ends))


def _blocks(array: NDArray[Any], size: int, verb: str) -> list[NDArray[Any]]:
    """Equal ones of axis 0; one row of several dimensions comes without its axis."""
    if not array.ndim or len(array) % size:
        raise UsageError(
            f"{verb} needs axis 0 in {size} equal blocks, which shape {list(array.shape)} does not give; "
            f"pad it, or use {verb}_v with a list of arrays"
        )
    rows = len(array) // size
    if rows == 1 and array.ndim > 1:
        return list(array)
    return [array[rank * rows : (rank + 1) * rows] for rank in range(size)]


def _list(memory: Allocations, assembly: Assembly, arrays: Sequence[Any] | None, verb: str) -> list[Operand]:
    if arrays is None or len(arrays) != assembly.group.size:
        found = "none" if arrays is None else len(arrays)
        raise UsageError(f"{verb} needs one array for each of {assembly.group.size} ranks, and got {found}")
    return [memory.adapt(each) for each in arrays]
