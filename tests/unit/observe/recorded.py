"""Dumps as ranks would have written them."""

from __future__ import annotations

from nexar.collectives.fingerprint import Fingerprint, code_of_algorithm, operation_name
from nexar.collectives.flight_recorder import FORMAT, Dump, DumpedCommunicator, DumpedPeer, RecordedCall, ThreadStack
from nexar.collectives.operations import OperationCode

ALL_REDUCE = Fingerprint(OperationCode.ALL_REDUCE, 11, 8, 0, 1, code_of_algorithm("ring"))
BROADCAST = Fingerprint(OperationCode.BROADCAST, 11, 8, 1, 0, code_of_algorithm("tree"))
SCAN = Fingerprint(OperationCode.SCAN, 11, 8, 0, 1, code_of_algorithm("chain"))


def called(
    sequence: int,
    what: Fingerprint = ALL_REDUCE,
    *,
    began: float,
    ended: float | None = None,
    outcome: str = "",
    step: int = 0,
) -> RecordedCall:
    operation = operation_name(what.operation)
    return RecordedCall(sequence, operation, what.describe(with_algorithm=True), what, began, ended, outcome, step)


def done(up_to: int, ago: float = 12.0) -> tuple[RecordedCall, ...]:
    """The calls from 0 to this one, the last of which ended so long ago."""
    times = [ago + up_to - sequence for sequence in range(up_to + 1)]
    return tuple(called(sequence, began=time + 0.1, ended=time) for sequence, time in enumerate(times))


def node_of(rank: int) -> str:
    return f"{100 + rank:016x}"


def dump(
    rank: int,
    last: tuple[RecordedCall, ...] = (),
    flying: tuple[RecordedCall, ...] = (),
    *,
    size: int = 4,
    at: str = "train.py:88",
    epoch: int = 1,
    written: float = 1000.0,
    communicator: int = 0,
    generation: int = 1,
    pid: int | None = None,
    cluster: str = "ours",
    heard: float | None = None,
    first: int = 0,
) -> Dump:
    """`first`: the rank in the world of rank 0 of the communicator."""
    others = (other for other in range(size) if other != rank)
    peers = tuple(DumpedPeer(other, node_of(first + other), f"host-{first + other}", None, heard) for other in others)
    communicator_state = DumpedCommunicator(communicator, generation, epoch, rank, size, flying, last, peers)
    threads = (ThreadStack("MainThread", True, at, ()),)
    process = 5000 + rank if pid is None else pid
    return Dump(
        FORMAT,
        "asked",
        cluster,
        rank,
        node_of(first + rank),
        "host",
        process,
        epoch,
        written,
        "",
        0.0,
        (communicator_state,),
        threads,
    )
