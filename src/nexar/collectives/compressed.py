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

from nexar.arrays.allocations import Allocations
from nexar.arrays.compression.compressor import Compressor, Piece, decompressed, described
from nexar.arrays.compression.feedback import corrected, left_over
from nexar.arrays.compression.mark import mark_of
from nexar.arrays.compression.terms import Terms, work_dtype
from nexar.arrays.dtypes import code_of
from nexar.arrays.operations import ReduceCode, Reduction
from nexar.arrays.partition import split
from nexar.collectives import all_gather, all_reduce
from nexar.collectives.arena import Arena
from nexar.collectives.assembly import Assembly, Manner
from nexar.collectives.call import Call
from nexar.collectives.executor import Run
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.collectives.ways import way_of
from nexar.collectives.work import Work
from nexar.errors import PeerMisbehaved, UsageError
from nexar.types import whole

_CODE: Final = OperationCode.ALL_REDUCE_COMPRESSED
_IN_RANK_ORDER: Final = Manner(deterministic=True)
_CALL: Final = struct.Struct("<QQQ")  # communicator, generation, sequence


class Compressed(NamedTuple):
    """What a rank brings: flat arrays, which are only read."""

    array: NDArray[Any]
    residual: NDArray[Any] | None
    compressor: Compressor
    reduction: Reduction


class Outcome(NamedTuple):
    """What comes of it: flat arrays of the work dtype."""

    total: NDArray[Any]
    residual: NDArray[Any] | None
    """The next one, if there was one."""


def all_reduce_compressed(assembly: Assembly, brought: Compressed) -> Work:
    """Its result is an Outcome. UsageError if it would take more memory than `compressed_allreduce_max_bytes`: that
    depends only on what all ranks must have alike, so either all are refused or none.
    """
    _check_memory(assembly, brought)
    return _by_reducing(assembly, brought) if brought.compressor.linear else _by_gathering(assembly, brought)


def memory_bytes(brought: Compressed, ranks: int) -> int:
    """What a call takes beside what the caller has: pieces, arrays of the work dtype, and what the compressor needs.
    UsageError for a compressor that says no size.
    """
    count, dtype = len(brought.array), brought.array.dtype
    work = work_dtype(dtype)
    piece = _piece_bytes(brought)
    pieces = 3 if brought.compressor.linear else ranks + 1  # to send and to receive, and as it came from the compressor
    arrays = 2 if brought.residual is not None or work != dtype else 1
    return pieces * piece + arrays * count * work.itemsize + brought.compressor.working_bytes(count, dtype)


def _check_memory(assembly: Assembly, brought: Compressed) -> None:
    limit = assembly.config.compressed_allreduce_max_bytes
    needed = memory_bytes(brought, assembly.group.size) if limit else 0
    if needed > limit:
        raise UsageError(
            f"all_reduce_compressed of {brought.array.dtype}[{len(brought.array)}] by {brought.compressor.name} on "
            f"{assembly.group.size} ranks would take {needed:,} bytes of memory, more than "
            f"compressed_allreduce_max_bytes={limit:,}; reduce the array in parts, send less of it, or raise "
            "NEXAR_COMPRESSED_ALLREDUCE_MAX_BYTES (0: no check)"
        )


# -- linear: the sum of pieces is the piece of the sum ---------------------------------------------------------------


def _by_reducing(assembly: Assembly, brought: Compressed) -> Work:
    dtype, reduction = brought.array.dtype, brought.reduction
    memory = Allocations()
    values = memory.empty(_piece_bytes(brought) // dtype.itemsize, dtype)
    name = assembly.choose(OperationCode.ALL_REDUCE, len(values), dtype, _IN_RANK_ORDER, reduction)
    reducing = all_reduce.Prepared(assembly, name, values, reduction)
    call = assembly.begin(_fingerprint(brought, name, values.nbytes), reducing.turns)
    run = _reduce(call, reducing, brought, values, _terms(assembly, call, brought))
    return assembly.work(call, run).failing(memory.error)


def _reduce(call: Call, reducing: all_reduce.Prepared, brought: Compressed, values: NDArray[Any], terms: Terms) -> Run:
    residual = _compress(brought, terms, values.view(np.uint8))
    yield from reducing.run(call)
    return Outcome(decompressed(brought.compressor, values.view(np.uint8), terms), residual)


# -- others: all pieces to all ranks ---------------------------------------------------------------------------------


def _by_gathering(assembly: Assembly, brought: Compressed) -> Work:
    size = assembly.group.size
    length = _piece_bytes(brought)
    memory = Allocations()
    pieces = memory.empty(size * length, np.dtype(np.uint8))
    name = assembly.choose(OperationCode.ALL_GATHER, length, pieces.dtype)
    spans = split(len(pieces), size)
    mine = spans[assembly.group.rank]
    turns = assembly.in_memory(name, Arena.all_gather, pieces[mine.start : mine.stop], pieces, spans)
    call = assembly.begin(_fingerprint(brought, name, length), turns)
    return assembly.work(call, _gather(assembly, call, name, brought, pieces)).failing(memory.error)


def _gather(assembly: Assembly, call: Call, name: str, brought: Compressed, pieces: Piece) -> Run:
    rank, size = assembly.group.rank, assembly.group.size
    spans = split(len(pieces), size)
    rows = [pieces[span.start : span.stop] for span in spans]
    terms = _terms(assembly, call, brought)
    residual = _compress(brought, terms, rows[rank])
    yield from all_gather.run(assembly, call, name, rows[rank], pieces, mine=spans[rank])
    total = np.zeros(terms.count, terms.work)
    for source, row in enumerate(rows):
        _add(brought.compressor, row, total, terms, None if source == rank else source)
    if brought.reduction.code is ReduceCode.AVG:
        np.divide(total, terms.work.type(size), out=total)
    return Outcome(total, residual)


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


def _fingerprint(brought: Compressed, name: str, piece_bytes: int) -> Fingerprint:
    """The compressor is where others have their root."""
    mark = mark_of(brought.compressor, feedback=brought.residual is not None, piece_bytes=piece_bytes)
    dtype = code_of(brought.array.dtype)
    return Fingerprint(_CODE, dtype, len(brought.array), mark, brought.reduction.code, way_of(name))


def _terms(assembly: Assembly, call: Call, brought: Compressed) -> Terms:
    group = assembly.group
    seed = seed_of(group.communicator, group.matching.generation, call.entry.sequence)
    return Terms(len(brought.array), brought.array.dtype, seed, feedback=brought.residual is not None)


def seed_of(communicator: int, generation: int, sequence: int) -> int:
    """All ranks know these numbers alike, so they come to the same seed without a message; and no other call has it."""
    digest = hashlib.blake2b(_CALL.pack(communicator, generation, sequence), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _piece_bytes(brought: Compressed) -> int:
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


def _compress(brought: Compressed, terms: Terms, into: Piece) -> NDArray[Any] | None:
    """Fill my piece; returns what is left over for a residual, if there is one."""
    compressor = brought.compressor
    wanted = corrected(brought.array, brought.residual, terms)
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
    return left_over(wanted, decompressed(compressor, into, terms))
