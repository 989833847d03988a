"""Rank i gets block i of what the root has. Only the root knows sizes and dtype, so they travel with the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from nexar.collectives.assembly import Assembly
from nexar.collectives.call import Call
from nexar.collectives.executor import Run, exchange
from nexar.collectives.fingerprint import Fingerprint, rooted
from nexar.collectives.operations import OperationCode
from nexar.collectives.work import Work


def scatter(
    assembly: Assembly, blocks: Sequence[NDArray[Any]] | None, root: int, code: OperationCode = OperationCode.SCATTER
) -> Work:
    """`blocks` are the root's, one for each rank. The result is a new array."""
    call = assembly.begin(Fingerprint(code, 0, 0, rooted(root)))
    return assembly.work(call, _run(assembly, call, blocks, root))


def _run(assembly: Assembly, call: Call, blocks: Sequence[NDArray[Any]] | None, root: int) -> Run:
    rank = assembly.group.rank
    ground = assembly.ground(call)
    if blocks is None:
        found = yield from exchange(ground, {}, (root,))
        return found[root]
    yield from exchange(ground, {each: block for each, block in enumerate(blocks) if each != rank}, ())
    return blocks[rank].copy()
