"""all_reduce_compressed: the sum or average of all ranks' decompressed arrays, bit-identical everywhere.

Pieces of linear compressors are all-reduced; others are gathered and added in rank order.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
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
from nexar.collectives.call import RegionCall
from nexar.collectives.context import CallOptions, CollectiveContext
from nexar.collectives.executor import Run
from nexar.collectives.fingerprint import Fingerprint, code_of_algorithm
from nexar.collectives.operations import COLLECTIVES, OperationCode
from nexar.collectives.prepared_call import CallArrays, PreparedCall
from nexar.collectives.requests import PendingCollective
from nexar.errors import PeerMisbehaved, UsageError
from nexar.types import whole

_CODE: Final = OperationCode.ALL_REDUCE_COMPRESSED
_IN_RANK_ORDER: Final = CallOptions(deterministic=True)
_CALL: Final = struct.Struct("<QQQ")  # communicator, generation, sequence


class CompressedArguments(NamedTuple):
    """A rank's input: flat arrays, only read."""

    array: NDArray[Any]
    residual: NDArray[Any] | None
    compressor: Compressor
    reduction: Reduction


class CompressedResult(NamedTuple):
    """The result: flat arrays of the work dtype."""

    total: NDArray[Any]
    residual: NDArray[Any] | None
    """The next residual, if there was one."""


def all_reduce_compressed(context: CollectiveContext, arguments: CompressedArguments) -> PendingCollective:
    """Raises UsageError, on all ranks or none, if the call needs more than `compressed_allreduce_max_bytes`."""
    _check_memory(context, arguments)
    return _by_reducing(context, arguments) if arguments.compressor.linear else _by_gathering(context, arguments)


def memory_bytes(arguments: CompressedArguments, ranks: int) -> int:
    """Additional memory of a call. Raises UsageError for an invalid piece size."""
    count, dtype = len(arguments.array), arguments.array.dtype
    work = work_dtype(dtype)
    piece = _piece_bytes(arguments)
    pieces = 3 if arguments.compressor.linear else ranks + 1  # to send, to receive, and the compressor's output
    arrays = 2 if arguments.residual is not None or work != dtype else 1
    return pieces * piece + arrays * count * work.itemsize + arguments.compressor.working_bytes(count, dtype)


def _check_memory(context: CollectiveContext, arguments: CompressedArguments) -> None:
    limit = context.config.compressed_allreduce_max_bytes
    needed = memory_bytes(arguments, context.group.size) if limit else 0
    if needed > limit:
        raise UsageError(
            f"all_reduce_compressed of {arguments.array.dtype}[{len(arguments.array)}] by {arguments.compressor.name} "
            f"on {context.group.size} ranks would take {needed:,} bytes of memory, more than "
            f"compressed_allreduce_max_bytes={limit:,}; reduce the array in parts, send less of it, or raise "
            "NEXAR_COMPRESSED_ALLREDUCE_MAX_BYTES (0: no check)"
        )


# -- linear: the sum of pieces is the piece of the sum ---------------------------------------------------------------


def _by_reducing(context: CollectiveContext, arguments: CompressedArguments) -> PendingCollective:
    dtype, reduction = arguments.array.dtype, arguments.reduction
    memory = Allocations()
    values = memory.empty(_piece_bytes(arguments) // dtype.itemsize, dtype)
    name = context.choose(OperationCode.ALL_REDUCE, len(values), dtype, _IN_RANK_ORDER, reduction)
    arrays = CallArrays(values, values, reduction)
    reducing = PreparedCall(context, COLLECTIVES[OperationCode.ALL_REDUCE], name, arrays)
    call = context.begin(_fingerprint(arguments, name, values.nbytes), reducing.region_steps)
    run = _reduce(call, reducing, arguments, values, _terms(context, call, arguments))
    return context.work(call, run).failing(memory.error)


def _reduce(
    call: RegionCall,
    reducing: PreparedCall,
    arguments: CompressedArguments,
    values: NDArray[Any],
    terms: Terms,
) -> Run:
    residual = _compress(arguments, terms, values.view(np.uint8))
    yield from reducing.run(call)
    return CompressedResult(decompressed(arguments.compressor, values.view(np.uint8), terms), residual)


# -- others: all pieces to all ranks ---------------------------------------------------------------------------------


def _by_gathering(context: CollectiveContext, arguments: CompressedArguments) -> PendingCollective:
    size = context.group.size
    length = _piece_bytes(arguments)
    memory = Allocations()
    pieces = memory.empty(size * length, np.dtype(np.uint8))
    name = context.choose(OperationCode.ALL_GATHER, length, pieces.dtype)
    rows = [pieces[span.start : span.stop] for span in split(len(pieces), size)]
    arrays = CallArrays(rows[context.group.rank], pieces)
    gathering = PreparedCall(context, COLLECTIVES[OperationCode.ALL_GATHER], name, arrays)
    call = context.begin(_fingerprint(arguments, name, length), gathering.region_steps)
    return context.work(call, _gather(context, call, gathering, arguments, rows)).failing(memory.error)


def _gather(
    context: CollectiveContext,
    call: RegionCall,
    gathering: PreparedCall,
    arguments: CompressedArguments,
    rows: Sequence[Piece],
) -> Run:
    rank, size = context.group.rank, context.group.size
    terms = _terms(context, call, arguments)
    residual = _compress(arguments, terms, rows[rank])
    yield from gathering.run(call)
    total = np.zeros(terms.count, terms.work)
    for source, row in enumerate(rows):
        _add(arguments.compressor, row, total, terms, None if source == rank else source)
    if arguments.reduction.code is ReduceCode.AVG:
        np.divide(total, terms.work.type(size), out=total)
    return CompressedResult(total, residual)


def _add(compressor: Compressor, piece: Piece, total: NDArray[Any], terms: Terms, source: int | None) -> None:
    try:
        with np.errstate(all="ignore"):
            compressor.add(piece, total, terms)
    except ValueError as error:
        if source is None:
            raise
        what = f"it sent a piece that {compressor.name} cannot read: {error}"
        raise PeerMisbehaved(rank=source, what=what) from error


# -- both ------------------------------------------------------------------------------------------------------------


def _fingerprint(arguments: CompressedArguments, name: str, piece_bytes: int) -> Fingerprint:
    """The compressor's code replaces the root."""
    mark = code_of_compressor(arguments.compressor, feedback=arguments.residual is not None, piece_bytes=piece_bytes)
    dtype = code_of(arguments.array.dtype)
    return Fingerprint(_CODE, dtype, len(arguments.array), mark, arguments.reduction.code, code_of_algorithm(name))


def _terms(context: CollectiveContext, call: RegionCall, arguments: CompressedArguments) -> Terms:
    group = context.group
    seed = seed_of(group.communicator, group.matching.generation, call.entry.sequence)
    return Terms(len(arguments.array), arguments.array.dtype, seed, feedback=arguments.residual is not None)


def seed_of(communicator: int, generation: int, sequence: int) -> int:
    """Equal on all ranks and unique per call."""
    digest = hashlib.blake2b(_CALL.pack(communicator, generation, sequence), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _piece_bytes(arguments: CompressedArguments) -> int:
    dtype = arguments.array.dtype
    stated = arguments.compressor.size_bytes(len(arguments.array), dtype)
    size = whole(stated)
    if size is None or size < 0 or (arguments.compressor.linear and size % dtype.itemsize):
        raise UsageError(
            f"{arguments.compressor.name} gives {stated} as the size_bytes of {dtype}[{len(arguments.array)}]; return "
            "a whole number from 0, and for a linear compressor a multiple of the item size"
        )
    return size


def _compress(arguments: CompressedArguments, terms: Terms, into: Piece) -> NDArray[Any] | None:
    compressor = arguments.compressor
    wanted = add_residual(arguments.array, arguments.residual, terms)
    with np.errstate(all="ignore"):
        piece: Any = compressor.compress(wanted, terms)
    if not isinstance(piece, np.ndarray) or piece.dtype != np.uint8 or piece.shape != into.shape:
        raise UsageError(
            f"{compressor.name} returned a piece of {described(piece)}, but size_bytes requires "
            f"uint8{list(into.shape)}; return exactly that many bytes, padded if necessary"
        )
    np.copyto(into, piece)
    if arguments.residual is None:
        return None
    return new_residual(wanted, decompressed(compressor, into, terms))
