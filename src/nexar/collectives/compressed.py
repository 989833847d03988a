"""Every rank gets the sum or the average of what all ranks' compressed arrays mean: bit-identical everywhere.

Pieces of linear compressors are all-reduced, those of others gathered and added up in rank order. Nothing of the
caller's is written here: the result and the next residual are new arrays, for who knows that the call has succeeded.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.compression.base import (
    Compressor,
    Piece,
    Terms,
    add_residual,
    decompressed,
    described,
    new_residual,
    work_dtype,
)
from nexar.arrays.compression.codes import code_of_compressor
from nexar.arrays.dtypes import code_of
from nexar.arrays.operand import Allocations
from nexar.arrays.operators import ReduceCode, Reduction
from nexar.arrays.views import split
from nexar.collectives import data_movement, reductions
from nexar.collectives.call import RegionCall
from nexar.collectives.context import CallOptions, CollectiveContext
from nexar.collectives.executor import Run
from nexar.collectives.fingerprint import Fingerprint, OperationCode, code_of_algorithm
from nexar.collectives.requests import PendingCollective
from nexar.collectives.shared_region import SharedRegion
from nexar.errors import PeerMisbehaved, UsageError
from nexar.types import whole

_CODE: Final = OperationCode.ALL_REDUCE_COMPRESSED
_IN_RANK_ORDER: Final = CallOptions(deterministic=True)
_CALL: Final = struct.Struct("<QQQ")  # communicator, generation, sequence


class CompressedArguments(NamedTuple):
    """What a rank brings: flat arrays, which are only read."""

    array: NDArray[Any]
    residual: NDArray[Any] | None
    compressor: Compressor
    reduction: Reduction


class CompressedResult(NamedTuple):
    """What comes of it: flat arrays of the work dtype."""

    total: NDArray[Any]
    residual: NDArray[Any] | None
    """The next one, if there was one."""


def all_reduce_compressed(context: CollectiveContext, brought: CompressedArguments) -> PendingCollective:
    """Its result is an Outcome. UsageError if it would take more memory than `compressed_allreduce_max_bytes`: that
    depends only on what all ranks must have alike, so either all are refused or none.
    """
    _check_memory(context, brought)
    return _by_reducing(context, brought) if brought.compressor.linear else _by_gathering(context, brought)


def memory_bytes(brought: CompressedArguments, ranks: int) -> int:
    """What a call takes beside what the caller has: pieces, arrays of the work dtype, and what the compressor needs.
    UsageError for a compressor that says no size.
    """
    count, dtype = len(brought.array), brought.array.dtype
    work = work_dtype(dtype)
    piece = _piece_bytes(brought)
    pieces = 3 if brought.compressor.linear else ranks + 1  # to send and to receive, and as it came from the compressor
    arrays = 2 if brought.residual is not None or work != dtype else 1
    return pieces * piece + arrays * count * work.itemsize + brought.compressor.working_bytes(count, dtype)


def _check_memory(context: CollectiveContext, brought: CompressedArguments) -> None:
    limit = context.config.compressed_allreduce_max_bytes
    needed = memory_bytes(brought, context.group.size) if limit else 0
    if needed > limit:
        raise UsageError(
            f"all_reduce_compressed of {brought.array.dtype}[{len(brought.array)}] by {brought.compressor.name} on "
            f"{context.group.size} ranks would take {needed:,} bytes of memory, more than "
            f"compressed_allreduce_max_bytes={limit:,}; reduce the array in parts, send less of it, or raise "
            "NEXAR_COMPRESSED_ALLREDUCE_MAX_BYTES (0: no check)"
        )


# -- linear: the sum of pieces is the piece of the sum ---------------------------------------------------------------


def _by_reducing(context: CollectiveContext, brought: CompressedArguments) -> PendingCollective:
    dtype, reduction = brought.array.dtype, brought.reduction
    memory = Allocations()
    values = memory.empty(_piece_bytes(brought) // dtype.itemsize, dtype)
    name = context.choose(OperationCode.ALL_REDUCE, len(values), dtype, _IN_RANK_ORDER, reduction)
    reducing = reductions.PreparedAllReduce(context, name, values, reduction)
    call = context.begin(_fingerprint(brought, name, values.nbytes), reducing.region_steps)
    run = _reduce(call, reducing, brought, values, _terms(context, call, brought))
    return context.work(call, run).failing(memory.error)


def _reduce(
    call: RegionCall,
    reducing: reductions.PreparedAllReduce,
    brought: CompressedArguments,
    values: NDArray[Any],
    terms: Terms,
) -> Run:
    residual = _compress(brought, terms, values.view(np.uint8))
    yield from reducing.run(call)
    return CompressedResult(decompressed(brought.compressor, values.view(np.uint8), terms), residual)


# -- others: all pieces to all ranks ---------------------------------------------------------------------------------


def _by_gathering(context: CollectiveContext, brought: CompressedArguments) -> PendingCollective:
    size = context.group.size
    length = _piece_bytes(brought)
    memory = Allocations()
    pieces = memory.empty(size * length, np.dtype(np.uint8))
    name = context.choose(OperationCode.ALL_GATHER, length, pieces.dtype)
    spans = split(len(pieces), size)
    mine = spans[context.group.rank]
    region_steps = context.in_memory(name, SharedRegion.all_gather, pieces[mine.start : mine.stop], pieces, spans)
    call = context.begin(_fingerprint(brought, name, length), region_steps)
    return context.work(call, _gather(context, call, name, brought, pieces)).failing(memory.error)


def _gather(
    context: CollectiveContext, call: RegionCall, name: str, brought: CompressedArguments, pieces: Piece
) -> Run:
    rank, size = context.group.rank, context.group.size
    spans = split(len(pieces), size)
    rows = [pieces[span.start : span.stop] for span in spans]
    terms = _terms(context, call, brought)
    residual = _compress(brought, terms, rows[rank])
    yield from data_movement.run_all_gather(context, call, name, rows[rank], pieces, mine=spans[rank])
    total = np.zeros(terms.count, terms.work)
    for source, row in enumerate(rows):
        _add(brought.compressor, row, total, terms, None if source == rank else source)
    if brought.reduction.code is ReduceCode.AVG:
        np.divide(total, terms.work.type(size), out=total)
    return CompressedResult(total, residual)


def _add(compressor: Compressor, piece: Piece, total: NDArray[Any], terms: Terms, source: int | None) -> None:
    """`source`: whose piece it is; None for this rank's own."""
    try:
        with np.errstate(all="ignore"):
            compressor.add(piece, total, terms)
    except ValueError as error:
        if source is None:
            raise
        what = f"it sent a piece that {compressor.name} cannot read: {error}"
        raise PeerMisbehaved(rank=source, what=what) from error


# -- both ------------------------------------------------------------------------------------------------------------


def _fingerprint(brought: CompressedArguments, name: str, piece_bytes: int) -> Fingerprint:
    """The compressor is where others have their root."""
    mark = code_of_compressor(brought.compressor, feedback=brought.residual is not None, piece_bytes=piece_bytes)
    dtype = code_of(brought.array.dtype)
    return Fingerprint(_CODE, dtype, len(brought.array), mark, brought.reduction.code, code_of_algorithm(name))


def _terms(context: CollectiveContext, call: RegionCall, brought: CompressedArguments) -> Terms:
    group = context.group
    seed = seed_of(group.communicator, group.matching.generation, call.entry.sequence)
    return Terms(len(brought.array), brought.array.dtype, seed, feedback=brought.residual is not None)


def seed_of(communicator: int, generation: int, sequence: int) -> int:
    """All ranks know these numbers alike, so they come to the same seed without a message; and no other call has it."""
    digest = hashlib.blake2b(_CALL.pack(communicator, generation, sequence), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _piece_bytes(brought: CompressedArguments) -> int:
    """As the compressor says. UsageError for what it cannot be."""
    dtype = brought.array.dtype
    said = brought.compressor.size_bytes(len(brought.array), dtype)
    size = whole(said)
    if size is None or size < 0 or (brought.compressor.linear and size % dtype.itemsize):
        raise UsageError(
            f"{brought.compressor.name} says that a piece of {dtype}[{len(brought.array)}] has {said} bytes; say a "
            "whole number from 0, and for a linear compressor one of whole elements"
        )
    return size


def _compress(brought: CompressedArguments, terms: Terms, into: Piece) -> NDArray[Any] | None:
    """Fill my piece; returns what is left over for a residual, if there is one."""
    compressor = brought.compressor
    wanted = add_residual(brought.array, brought.residual, terms)
    with np.errstate(all="ignore"):
        piece: Any = compressor.compress(wanted, terms)
    if not isinstance(piece, np.ndarray) or piece.dtype != np.uint8 or piece.shape != into.shape:
        raise UsageError(
            f"{compressor.name} made a piece of {described(piece)}, where size_bytes says "
            f"uint8{list(into.shape)}; return so many bytes, padded if need be"
        )
    np.copyto(into, piece)
    if brought.residual is None:
        return None
    return new_residual(wanted, decompressed(compressor, into, terms))
