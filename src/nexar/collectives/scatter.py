"""Rank i gets block i of what the root has. Only the root knows sizes and dtype, so they have to travel.

In a small world they travel with the blocks, which the root sends itself. In a larger one they go first, down a tree,
so that every rank can take its part in a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.dtypes import code_of, dtype_of
from nexar.collectives.assembly import PLAIN, Assembly, Manner
from nexar.collectives.call import Call
from nexar.collectives.executor import Run, exchange
from nexar.collectives.fingerprint import Fingerprint, rooted
from nexar.collectives.operations import OperationCode
from nexar.collectives.ways import ROOTS_CHOICE
from nexar.collectives.work import Work
from nexar.errors import PeerMisbehaved
from nexar.wire.frame import MAX_DIMENSIONS

SMALL_WORLD: Final = 8
"""Below, the root sends every block itself."""
_CODE: Final = OperationCode.SCATTER


def scatter(
    assembly: Assembly,
    blocks: Sequence[NDArray[Any]] | None,
    root: int,
    code: OperationCode = _CODE,
    manner: Manner = PLAIN,
) -> Work:
    """`blocks` are the root's, one for each rank; of SCATTER they are equal. The result is a new array."""
    equal = code is _CODE and (manner.algorithm is not None or assembly.group.size >= SMALL_WORLD)
    if equal:
        assembly.choose(_CODE, 0, None, manner)  # refuses what there is not, on every rank alike
    way = ROOTS_CHOICE if manner.algorithm is None else manner.way(manner.algorithm)
    call = assembly.begin(Fingerprint(code, 0, 0, rooted(root), way=way))
    run = _run_schedule(assembly, call, blocks, manner) if equal else _run(assembly, call, blocks, root)
    return assembly.work(call, run)


def _run(assembly: Assembly, call: Call, blocks: Sequence[NDArray[Any]] | None, root: int) -> Run:
    rank = assembly.group.rank
    ground = assembly.ground(call)
    if blocks is None:
        found = yield from exchange(ground, {}, (root,))
        return found[root]
    yield from exchange(ground, {each: block for each, block in enumerate(blocks) if each != rank}, ())
    return blocks[rank].copy()


def _run_schedule(assembly: Assembly, call: Call, blocks: Sequence[NDArray[Any]] | None, manner: Manner) -> Run:
    rank, size, root = assembly.group.rank, assembly.group.size, call.fingerprint.root - 1
    header = _header(None if blocks is None else blocks[0])
    yield from assembly.execute(call, "tree", OperationCode.BROADCAST, header, root=root)
    dtype, shape = _read(header, root)
    count = math.prod(shape)
    work = np.empty(size * count, dtype) if blocks is None else np.concatenate([each.reshape(-1) for each in blocks])
    name = manner.algorithm or assembly.choose_schedule(_CODE, count, dtype)
    yield from assembly.execute(call, name, _CODE, work, root=root, phase=1, count=count)
    return work[rank * count : (rank + 1) * count].reshape(shape).copy()


def _header(block: NDArray[Any] | None) -> NDArray[np.int64]:
    """The number of a dtype, how many dimensions, and each of them."""
    header = np.zeros(2 + MAX_DIMENSIONS, np.int64)
    if block is not None:
        header[: 2 + block.ndim] = code_of(block.dtype), block.ndim, *block.shape
    return header


def _read(header: NDArray[np.int64], root: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
    code, dimensions, *extents = header.tolist()
    dtype, shape = dtype_of(code), tuple(extents[:dimensions])
    if dtype is None or not 0 <= dimensions <= MAX_DIMENSIONS or any(extent < 0 for extent in shape):
        raise PeerMisbehaved(rank=root, what=f"it scatters blocks of dtype {code} with {dimensions} dimensions")
    return dtype, shape
