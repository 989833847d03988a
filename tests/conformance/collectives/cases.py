"""One call of one verb on every rank: what each brings, and what it should have got, by NumPy.

Every rank knows what all of them bring, so each judges its own result; what they got as bytes shows whether all have
the same. So the same cases run on threads and in processes.
"""

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from nexar.arrays.dtypes import DTYPES
from nexar.arrays.operators import ReduceCode, check, identity, reduction_of
from nexar.arrays.reduce import finish, folder, rounds
from nexar.collectives.operations import OperationCode
from nexar.communicator.communicator import Communicator
from nexar.errors import UsageError
from tests.conformance.schedules.cases import ALGORITHMS
from tests.conformance.schedules.test_arithmetic import NAMES, assert_right, assert_rounded_once, contribution

REDUCING = ("all_reduce", "reduce", "reduce_scatter", "scan", "exclusive_scan")
MOVING = ("broadcast", "all_gather", "gather", "all_to_all", "scatter")
UNEQUAL = ("all_gather_v", "gather_v", "scatter_v", "all_to_all_v", "reduce_scatter_v")
OBJECTS = ("broadcast_object", "gather_object", "all_gather_object", "scatter_object")
ROOTED = {"broadcast", "reduce", "gather", "scatter", "gather_v", "scatter_v"} | {"broadcast_object", "gather_object"}
SAME_EVERYWHERE = {"all_reduce", "broadcast", "all_gather", "all_gather_v", "broadcast_object", "all_gather_object"}


class Case(NamedTuple):
    """A call; `more` are further arguments of the verb."""

    verb: str
    dtype: str = "float32"
    op: str = "sum"
    shape: tuple[int, ...] = (67,)
    root: int = 0
    more: tuple[tuple[str, Any], ...] = ()

    def brought(self, rank: int) -> np.ndarray:
        """Of unequal counts, rank by rank one row more, beginning at none."""
        shape = (rank, *self.shape) if self.verb in {"all_gather_v", "gather_v"} else self.shape
        return contribution(np.dtype(self.dtype), rank, int(np.prod(shape))).reshape(shape)


class CaseResult(NamedTuple):
    """What became of it at one rank."""

    complaint: str
    digest: str
    """The same on all ranks, where they should have the same."""


def run_cases(comm: Communicator, cases: Iterable[Case]) -> list[CaseResult]:
    """Make all calls, one after the other. Raises what they raise; a wrong result does not stop the others."""
    return [_judge(comm, case) for case in cases]


def wrong_results(cases: Sequence[Case], judged: Sequence[Sequence[CaseResult]]) -> list[str]:
    """What all ranks together have to say; empty: everything was right."""
    found = []
    for number, case in enumerate(cases):
        ours = [each[number] for each in judged]
        found += [f"{case}, rank {rank}: {each.complaint}" for rank, each in enumerate(ours) if each.complaint]
        if len({each.digest for each in ours}) > 1:
            found.append(f"{case}: not the same bits on all ranks")
    return found


def _judge(comm: Communicator, case: Case) -> CaseResult:
    everyone = [case.brought(rank) for rank in range(comm.size)]
    got = CALLS[case.verb](comm, everyone[comm.rank].copy(), case)
    try:
        _compare(comm, case, everyone, got)
    except AssertionError as error:
        return CaseResult(f"got {got!r}: {error}", "")
    return CaseResult("", _digest(got) if case.verb in SAME_EVERYWHERE else "")


def _digest(got: Any) -> str:
    parts = got if isinstance(got, list) else [got]
    return sha256(b"".join(np.asarray(each).tobytes() for each in parts)).hexdigest()


# -- how each verb is called ---------------------------------------------------------------------------------------


def _reduce_call(comm: Communicator, mine: np.ndarray, case: Case) -> Any:
    rooted = {"root": case.root} if case.verb in ROOTED else {}
    return getattr(comm, case.verb)(mine, case.op, **rooted, **dict(case.more))


def _call(comm: Communicator, mine: np.ndarray, case: Case) -> Any:
    rooted = {"root": case.root} if case.verb in ROOTED else {}
    return getattr(comm, case.verb)(mine, **rooted, **dict(case.more))


def _scatter(comm: Communicator, mine: np.ndarray, case: Case) -> Any:
    return comm.scatter(mine if comm.rank == case.root else None, case.root)


def _scatter_v(comm: Communicator, mine: np.ndarray, case: Case) -> Any:
    return comm.scatter_v(_cut(mine, comm.size) if comm.rank == case.root else None, case.root)


def _all_to_all_v(comm: Communicator, mine: np.ndarray, case: Case) -> Any:
    return comm.all_to_all_v(_cut(mine, comm.size))


def _reduce_scatter_v(comm: Communicator, mine: np.ndarray, case: Case) -> Any:
    return comm.reduce_scatter_v(mine, _counts(len(mine), comm.size), case.op, **dict(case.more))


def _barrier(comm: Communicator, mine: np.ndarray, case: Case) -> Any:
    return comm.barrier(**dict(case.more))


def _object_call(comm: Communicator, mine: np.ndarray, case: Case) -> Any:
    return getattr(comm, case.verb)(mine, **({"root": case.root} if case.verb in ROOTED else {}))


def _scatter_object(comm: Communicator, mine: np.ndarray, case: Case) -> Any:
    return comm.scatter_object(
        [mine + rank for rank in range(comm.size)] if comm.rank == case.root else None, case.root
    )


CALLS: dict[str, Callable[[Communicator, np.ndarray, Case], Any]] = {
    "barrier": _barrier,
    **dict.fromkeys(REDUCING, _reduce_call),
    **dict.fromkeys(MOVING, _call),
    **dict.fromkeys(UNEQUAL, _call),
    **dict.fromkeys(OBJECTS, _object_call),
    "scatter": _scatter,
    "scatter_v": _scatter_v,
    "all_to_all_v": _all_to_all_v,
    "reduce_scatter_v": _reduce_scatter_v,
    "scatter_object": _scatter_object,
}


def _counts(rows: int, size: int) -> list[int]:
    """As unequal as can be: rank 0 has none, the last has the rest."""
    counts = [min(rank, rows // size) for rank in range(size)]
    return [*counts[:-1], rows - sum(counts[:-1])]


def _cut(array: np.ndarray, size: int) -> list[np.ndarray]:
    ends = list(accumulate(_counts(len(array), size)))
    return np.split(array, ends[:-1])


# -- what each verb should give ------------------------------------------------------------------------------------


def _compare(comm: Communicator, case: Case, everyone: list[np.ndarray], got: Any) -> None:
    wanted = WANTED.get(case.verb, _nothing)(Seen(case, comm.rank, everyone))
    if wanted is None or got is None:
        assert (got is None) == (wanted is None), f"wanted {wanted}"
    elif case.verb in REDUCING or case.verb == "reduce_scatter_v":
        _compare_reduced(comm, case, wanted, got, everyone[0].nbytes)
    else:
        pairs = zip(got, wanted, strict=True) if isinstance(wanted, list) else [(got, wanted)]
        for ours, theirs in pairs:
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
            assert ours.tobytes() == np.ascontiguousarray(theirs).tobytes()


def _compare_reduced(
    comm: Communicator, case: Case, pieces: list[np.ndarray], got: np.ndarray, whole_bytes: int
) -> None:
    reduction, dtype = reduction_of(case.op), np.dtype(case.dtype)
    assert got.dtype == dtype
    if not pieces:
        assert (got == identity(reduction, dtype)).all()
        return
    assert got.shape == pieces[0].shape
    if dict(case.more).get("deterministic") and "scan" not in case.verb:
        expected = np.empty(got.size, dtype)
        folder(reduction, dtype, comm.size)(expected, [np.ascontiguousarray(each).reshape(-1) for each in pieces])
        if comm.size == 1:
            finish(reduction, expected, 1)
        assert expected.tobytes() == got.tobytes(), "not one fold in the order of ranks"
    if len(pieces) == 1 and reduction.name in {"land", "lor", "lxor"}:
        pieces = [pieces[0] != 0]  # NumPy's reduction of one array is that array; ours gives 0 and 1 then too
    assert_right(got, pieces, reduction, dtype)
    forced_and_large = "algorithm" in dict(case.more) and whole_bytes >= comm._context.config.large_msg_bytes
    if rounds(reduction, dtype) and not forced_and_large:
        assert_rounded_once(got, pieces, reduction, dtype)


class Seen(NamedTuple):
    """From where one rank looks."""

    case: Case
    rank: int
    everyone: list[np.ndarray]
    """What each brought."""

    @property
    def size(self) -> int:
        return len(self.everyone)

    @property
    def at_root(self) -> np.ndarray:
        return self.everyone[self.case.root]


def _nothing(_: Seen) -> None:
    return None


def _for_root(made: Callable[[list[np.ndarray]], Any]) -> Callable[[Seen], Any]:
    return lambda s: made(s.everyone) if s.rank == s.case.root else None


def _block(s: Seen) -> np.ndarray:
    block = np.split(s.at_root, s.size)[s.rank]
    return block[0] if len(block) == 1 and block.ndim > 1 else block


WANTED: dict[str, Callable[[Seen], Any]] = {
    "all_reduce": lambda s: s.everyone,
    "reduce": _for_root(list),
    "reduce_scatter": lambda s: [np.array_split(each, s.size)[s.rank] for each in s.everyone],
    "reduce_scatter_v": lambda s: [_cut(each, s.size)[s.rank] for each in s.everyone],
    "scan": lambda s: s.everyone[: s.rank + 1],
    "exclusive_scan": lambda s: s.everyone[: s.rank],
    "broadcast": lambda s: s.at_root,
    "all_gather": lambda s: np.stack(s.everyone),
    "gather": _for_root(np.stack),
    "all_to_all": lambda s: np.concatenate([np.split(each, s.size)[s.rank] for each in s.everyone]),
    "scatter": _block,
    "all_gather_v": lambda s: s.everyone,
    "gather_v": _for_root(list),
    "scatter_v": lambda s: _cut(s.at_root, s.size)[s.rank],
    "all_to_all_v": lambda s: [_cut(each, s.size)[s.rank] for each in s.everyone],
    "broadcast_object": lambda s: s.at_root,
    "gather_object": _for_root(list),
    "all_gather_object": lambda s: s.everyone,
    "scatter_object": lambda s: s.at_root + s.rank,
}


# -- which cases there are -----------------------------------------------------------------------------------------


def shaped(verb: str, size: int, count: int) -> tuple[int, ...]:
    """A shape of about `count` elements that the verb can take."""
    return (count * size, 2) if verb in {"all_to_all", "scatter"} else (count,)


def pairs(size: int) -> list[tuple[str, str]]:
    """Every dtype with every operation that it has. Products of many eights of a byte vanish."""
    found = []
    for dtype in DTYPES:
        for name in NAMES:
            try:
                check(reduction_of(name), dtype)
            except UsageError:
                continue
            if not (name == "prod" and dtype.itemsize == 1 and size > 5):
                found.append((str(dtype), name))
    return found


def every_dtype_and_operation(size: int, *, every: int) -> list[Case]:
    """On each verb that reduces; of all of them each `every`th."""
    found = [
        Case(verb, dtype, op, shaped(verb, size, 67), root=number % size, more=(("deterministic", number % 3 == 0),))
        for number, (dtype, op) in enumerate(pairs(size))
        for verb in (*REDUCING, "reduce_scatter_v")
        if not (verb == "exclusive_scan" and op == ReduceCode.AVG.name.lower())
    ]
    return found[size % every :: every]


def every_verb(size: int, counts: Sequence[int], dtypes: Sequence[str] = ("float64",)) -> list[Case]:
    """Each with these counts, and roots that change."""
    verbs = (*REDUCING, *MOVING, *UNEQUAL, *OBJECTS, "barrier")
    return [
        Case(verb, dtypes[number % len(dtypes)], shape=shaped(verb, size, count), root=number % size)
        for number, (verb, count) in enumerate((verb, count) for verb in verbs for count in counts)
    ]


def every_algorithm(size: int, counts: Sequence[int]) -> list[Case]:
    """Each that can be forced, by name; of those that fold, deterministic too."""
    found = []
    for operation, algorithms in ALGORITHMS.items():
        verb = operation.name.lower()
        if operation is OperationCode.SCATTER:
            continue  # only the root knows how much there is: it has no choice
        for number, (name, algorithm) in enumerate(algorithms.items()):
            for count in counts:
                case = Case(verb, "float32", shape=shaped(verb, size, count), root=number % size)
                found.append(case._replace(more=(("algorithm", name),)))
                if algorithm.left_fold and verb in {"all_reduce", "reduce", "reduce_scatter", "scan", "exclusive_scan"}:
                    found.append(case._replace(more=(("algorithm", name), ("deterministic", True))))
    return found
