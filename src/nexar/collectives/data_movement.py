"""Collectives other than calls on flat arrays of known sizes: barrier, scatter, and arrays of any shape.

Only the root of a scatter knows sizes and dtype. In a small world it sends them with the blocks, else first on a tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.dtypes import code_of, dtype_of
from nexar.collectives.call import RegionCall
from nexar.collectives.context import PLAIN, CallOptions, CollectiveContext
from nexar.collectives.executor import Run, exchange
from nexar.collectives.fingerprint import ROOTS_CHOICE, Fingerprint, rooted
from nexar.collectives.operations import OperationCode
from nexar.collectives.requests import PendingCollective
from nexar.collectives.selection import SHARED_MEMORY
from nexar.collectives.shared_region import SharedRegion
from nexar.errors import PeerMisbehaved
from nexar.wire.frame import MAX_DIMENSIONS

_BARRIER = OperationCode.BARRIER


def barrier(context: CollectiveContext, options: CallOptions = PLAIN) -> PendingCollective:
    """No rank returns before all have called."""
    name = context.choose(_BARRIER, 0, None, options)
    call = context.begin(
        Fingerprint(_BARRIER, algorithm_code=options.algorithm_code(name)),
        context.in_memory(name, SharedRegion.barrier),
    )
    return context.work(call, _run_barrier(context, call, name))


def _run_barrier(context: CollectiveContext, call: RegionCall, name: str) -> Run:
    if name == SHARED_MEMORY:
        yield (call.post_next(),)
    else:
        yield from context.execute(call, name, _BARRIER, np.empty(1, np.uint8))


def all_gather_v(
    context: CollectiveContext, array: NDArray[Any], code: OperationCode = OperationCode.ALL_GATHER_V
) -> PendingCollective:
    """Gather arrays of any shape into a list."""
    dtype = code_of(array.dtype) if code is OperationCode.ALL_GATHER_V else 0
    call = context.begin(Fingerprint(code, dtype))
    return context.work(call, _run_all_gather_v(context, call, array))


def _run_all_gather_v(context: CollectiveContext, call: RegionCall, array: NDArray[Any]) -> Run:
    rank, size = context.group.rank, context.group.size
    others = [(rank + distance) % size for distance in range(1, size)]  # a different first peer on each rank
    found = yield from exchange(context.run_context(call), dict.fromkeys(others, array), others)
    return [array.copy() if each == rank else found[each] for each in range(size)]


def gather_v(
    context: CollectiveContext, array: NDArray[Any], root: int, code: OperationCode = OperationCode.GATHER_V
) -> PendingCollective:
    """Gather arrays of any shape into a list at the root."""
    dtype = code_of(array.dtype) if code is OperationCode.GATHER_V else 0
    call = context.begin(Fingerprint(code, dtype, 0, rooted(root)))
    return context.work(call, _run_gather_v(context, call, array, root))


def _run_gather_v(context: CollectiveContext, call: RegionCall, array: NDArray[Any], root: int) -> Run:
    rank, size = context.group.rank, context.group.size
    if rank != root:
        yield from exchange(context.run_context(call), {root: array}, ())
        return None
    others = [each for each in range(size) if each != root]
    found = yield from exchange(context.run_context(call), {}, others)
    return [array.copy() if each == rank else found[each] for each in range(size)]


DIRECT_SCATTER_BELOW: Final = 8
"""Below, the root sends every block itself."""
_SCATTER: Final = OperationCode.SCATTER


def scatter(
    context: CollectiveContext,
    blocks: Sequence[NDArray[Any]] | None,
    root: int,
    code: OperationCode = _SCATTER,
    options: CallOptions = PLAIN,
) -> PendingCollective:
    """Send one of the root's `blocks` to each rank, as a new array."""
    equal = code is _SCATTER and (options.algorithm is not None or context.group.size >= DIRECT_SCATTER_BELOW)
    if equal:
        context.choose(_SCATTER, 0, None, options)  # raises UsageError for an unknown algorithm, on all ranks alike
    algorithm_code = ROOTS_CHOICE if options.algorithm is None else options.algorithm_code(options.algorithm)
    call = context.begin(Fingerprint(code, 0, 0, rooted(root), algorithm_code=algorithm_code))
    run = _run_scatter_schedule(context, call, blocks, options) if equal else _run_scatter(context, call, blocks, root)
    return context.work(call, run)


def _run_scatter(context: CollectiveContext, call: RegionCall, blocks: Sequence[NDArray[Any]] | None, root: int) -> Run:
    rank = context.group.rank
    run_context = context.run_context(call)
    if blocks is None:
        found = yield from exchange(run_context, {}, (root,))
        return found[root]
    yield from exchange(run_context, {each: block for each, block in enumerate(blocks) if each != rank}, ())
    return blocks[rank].copy()


def _run_scatter_schedule(
    context: CollectiveContext, call: RegionCall, blocks: Sequence[NDArray[Any]] | None, options: CallOptions
) -> Run:
    rank, size, root = context.group.rank, context.group.size, call.fingerprint.root - 1
    header = _scatter_header(None if blocks is None else blocks[0])
    yield from context.execute(call, "tree", OperationCode.BROADCAST, header, root=root)
    dtype, shape = _read_scatter_header(header, root)
    count = math.prod(shape)
    work = np.empty(size * count, dtype) if blocks is None else np.concatenate([each.reshape(-1) for each in blocks])
    name = options.algorithm or context.choose_schedule(_SCATTER, count, dtype)
    yield from context.execute(call, name, _SCATTER, work, root=root, phase=1, count=count)
    return work[rank * count : (rank + 1) * count].reshape(shape).copy()


def _scatter_header(block: NDArray[Any] | None) -> NDArray[np.int64]:
    """Dtype code, number of dimensions, dimensions."""
    header = np.zeros(2 + MAX_DIMENSIONS, np.int64)
    if block is not None:
        header[: 2 + block.ndim] = code_of(block.dtype), block.ndim, *block.shape
    return header


def _read_scatter_header(header: NDArray[np.int64], root: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
    code, dimensions, *extents = header.tolist()
    dtype, shape = dtype_of(code), tuple(extents[:dimensions])
    if dtype is None or not 0 <= dimensions <= MAX_DIMENSIONS or any(extent < 0 for extent in shape):
        raise PeerMisbehaved(rank=root, what=f"it scatters blocks of dtype {code} with {dimensions} dimensions")
    return dtype, shape


def all_to_all_v(context: CollectiveContext, arrays: Sequence[NDArray[Any]]) -> PendingCollective:
    """Exchange arrays of any shape; the result is a list."""
    call = context.begin(Fingerprint(OperationCode.ALL_TO_ALL_V, code_of(arrays[0].dtype)))
    return context.work(call, _run_all_to_all_v(context, call, arrays))


def _run_all_to_all_v(context: CollectiveContext, call: RegionCall, arrays: Sequence[NDArray[Any]]) -> Run:
    rank, size = context.group.rank, context.group.size
    others = [(rank + distance) % size for distance in range(1, size)]  # a different first peer on each rank
    found = yield from exchange(context.run_context(call), {each: arrays[each] for each in others}, others)
    return [arrays[rank].copy() if each == rank else found[each] for each in range(size)]
