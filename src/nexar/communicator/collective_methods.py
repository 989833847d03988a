"""Every verb of all ranks together, as a method of a few lines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from nexar.arrays.compression.base import Compressor
from nexar.collectives.context import CallOptions, CollectiveContext
from nexar.collectives.data_movement import barrier
from nexar.collectives.requests import PendingCollective
from nexar.communicator import collective_calls, object_calls
from nexar.communicator.bucketed import all_reduce_bucketed
from nexar.communicator.collective_calls import Op, all_reduce_compressed
from nexar.types import Rank


class CollectiveMethods(ABC):
    """Collectives: every rank of the communicator calls the same verbs in the same order, with the same dtype, count,
    op and root. CollectiveMismatch, on all ranks, if they do not; CollectiveTimeout names who has not come.

    `out`: write the result there, and return it. `op`: "sum", "prod", "min", "max", "avg", "band", "bor", "bxor",
    "land", "lor", "lxor", or a function of two arrays; `commutative=False` keeps it in rank order. `algorithm`: force
    one. `deterministic`: one order of reduction, whatever the algorithm and the hosts. `timeout`: seconds in which
    nobody makes progress.
    """

    _context: CollectiveContext

    @abstractmethod
    def _seconds(self, timeout: Any) -> float:
        """Of a collective. UsageError for what is no timeout, or on a closed communicator."""

    @abstractmethod
    def _conduct(self, work: PendingCollective, timeout: float) -> Any:
        """Wait for it, or let it go on by itself."""

    def _reduced_at_once(self, array: Any, op: Op) -> bool:
        """All-reduce it in place on the short way, where there is one for it. False: nothing was done."""
        return False

    def barrier(self, *, algorithm: str | None = None, timeout: float | None = None) -> Any:
        """Return when every rank has called it."""
        seconds = self._seconds(self._context.config.barrier_timeout if timeout is None else timeout)
        return self._conduct(barrier(self._context, CallOptions(algorithm)), seconds)

    def all_reduce(
        self,
        array: Any,
        op: Op = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        deterministic: bool = False,
        commutative: bool = True,
        timeout: float | None = None,
    ) -> Any:
        """The reduction of all ranks' arrays, in place, on every rank; returns the array. A number gives a number."""
        special = algorithm is not None or timeout is not None or deterministic or not commutative
        if out is None and not special and self._reduced_at_once(array, op):
            return array
        seconds = self._seconds(timeout)
        options = CallOptions(algorithm, deterministic)
        return self._conduct(
            collective_calls.all_reduce(self._context, array, op, out, options, commutative=commutative), seconds
        )

    def all_reduce_bucketed(
        self,
        arrays: Sequence[Any],
        op: Op = "sum",
        *,
        bucket_bytes: int | None = None,
        algorithm: str | None = None,
        deterministic: bool = False,
        commutative: bool = True,
        timeout: float | None = None,
    ) -> Any:
        """Many arrays in place, fused into buckets of at most `bucket_bytes`; returns the list of them."""
        seconds = self._seconds(timeout)
        options = CallOptions(algorithm, deterministic)
        work = all_reduce_bucketed(self._context, arrays, op, bucket_bytes, options, commutative=commutative)
        return self._conduct(work, seconds)

    def all_reduce_compressed(
        self,
        array: Any,
        compressor: Compressor,
        *,
        residual: Any = None,
        op: Op = "sum",
        out: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """The sum or average of what all ranks' compressed arrays mean, in place, on every rank; returns the array.
        Float types. The compressor is TopK, RandomK, FP8, Int8, NoCompression or one of your own.

        `residual`: this rank's array of what was not sent yet, zeros before the first call. It is added before anything
        is sent, and then holds what is left. A call that raises leaves both arrays as they were.
        """
        seconds = self._seconds(timeout)
        work = all_reduce_compressed(self._context, array, compressor, residual=residual, op=op, out=out)
        return self._conduct(work, seconds)

    def broadcast(
        self, array: Any, root: Rank = 0, *, algorithm: str | None = None, timeout: float | None = None
    ) -> Any:
        """The root's array, in place, on every rank; returns the array."""
        seconds = self._seconds(timeout)
        return self._conduct(collective_calls.broadcast(self._context, array, root, CallOptions(algorithm)), seconds)

    def reduce(
        self,
        array: Any,
        op: Op = "sum",
        root: Rank = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        deterministic: bool = False,
        commutative: bool = True,
        timeout: float | None = None,
    ) -> Any:
        """The reduction of all ranks' arrays, in place, at the root, which gets it; None elsewhere.

        The others' arrays stay as they are.
        """
        seconds = self._seconds(timeout)
        options = CallOptions(algorithm, deterministic)
        return self._conduct(
            collective_calls.reduce(self._context, array, op, out, options, root=root, commutative=commutative), seconds
        )

    def all_gather(
        self, array: Any, *, out: Any = None, algorithm: str | None = None, timeout: float | None = None
    ) -> Any:
        """Every rank's array, on every rank: a new one of shape (size, *shape)."""
        seconds = self._seconds(timeout)
        return self._conduct(collective_calls.all_gather(self._context, array, out, CallOptions(algorithm)), seconds)

    def reduce_scatter(
        self,
        array: Any,
        op: Op = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        deterministic: bool = False,
        commutative: bool = True,
        timeout: float | None = None,
    ) -> Any:
        """My part of the reduction: axis 0 is cut as np.array_split does. A new array."""
        seconds = self._seconds(timeout)
        options = CallOptions(algorithm, deterministic)
        return self._conduct(
            collective_calls.reduce_scatter(self._context, array, op, out, options, commutative=commutative), seconds
        )

    def all_to_all(
        self, array: Any, *, out: Any = None, algorithm: str | None = None, timeout: float | None = None
    ) -> Any:
        """Block i of axis 0 goes to rank i; a new array of the blocks that came, by rank."""
        seconds = self._seconds(timeout)
        return self._conduct(collective_calls.all_to_all(self._context, array, out, CallOptions(algorithm)), seconds)

    def gather(
        self,
        array: Any,
        root: Rank = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Every rank's array, at the root: a new one of shape (size, *shape). None elsewhere."""
        seconds = self._seconds(timeout)
        return self._conduct(collective_calls.gather(self._context, array, root, out, CallOptions(algorithm)), seconds)

    def scatter(
        self,
        array: Any,
        root: Rank = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """My block of the root's array, whose axis 0 has `size` equal ones: a new array.

        Of an array of several dimensions with `size` rows, rank i gets row i without its axis: what gather gave. The
        other ranks pass None.
        """
        seconds = self._seconds(timeout)
        return self._conduct(collective_calls.scatter(self._context, array, root, out, CallOptions(algorithm)), seconds)

    def scan(
        self,
        array: Any,
        op: Op = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        deterministic: bool = False,
        commutative: bool = True,
        timeout: float | None = None,
    ) -> Any:
        """The reduction of the arrays of ranks 0 to mine. A new array."""
        seconds = self._seconds(timeout)
        options = CallOptions(algorithm, deterministic)
        work = collective_calls.scan(self._context, array, op, out, options, exclusive=False, commutative=commutative)
        return self._conduct(work, seconds)

    def exclusive_scan(
        self,
        array: Any,
        op: Op = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        deterministic: bool = False,
        commutative: bool = True,
        timeout: float | None = None,
    ) -> Any:
        """The reduction of the arrays of the ranks before mine; rank 0 gets the identity. A new array."""
        seconds = self._seconds(timeout)
        options = CallOptions(algorithm, deterministic)
        work = collective_calls.scan(self._context, array, op, out, options, exclusive=True, commutative=commutative)
        return self._conduct(work, seconds)

    # -- unequal counts --------------------------------------------------------------------------------

    def all_gather_v(self, array: Any, *, timeout: float | None = None) -> Any:
        """A list of every rank's array, which may have any shape."""
        seconds = self._seconds(timeout)
        return self._conduct(collective_calls.all_gather_v(self._context, array), seconds)

    def gather_v(self, array: Any, root: Rank = 0, *, timeout: float | None = None) -> Any:
        """At the root a list of every rank's array, which may have any shape; None elsewhere."""
        seconds = self._seconds(timeout)
        return self._conduct(collective_calls.gather_v(self._context, array, root), seconds)

    def scatter_v(self, arrays: Sequence[Any] | None, root: Rank = 0, *, timeout: float | None = None) -> Any:
        """Element i of the root's list goes to rank i. The other ranks pass None."""
        seconds = self._seconds(timeout)
        return self._conduct(collective_calls.scatter_v(self._context, arrays, root), seconds)

    def reduce_scatter_v(
        self,
        array: Any,
        counts: Sequence[int],
        op: Op = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        deterministic: bool = False,
        commutative: bool = True,
        timeout: float | None = None,
    ) -> Any:
        """As reduce_scatter, with `counts[i]` rows for rank i."""
        seconds = self._seconds(timeout)
        options = CallOptions(algorithm, deterministic)
        work = collective_calls.reduce_scatter(
            self._context, array, op, out, options, commutative=commutative, counts=list(counts)
        )
        return self._conduct(work, seconds)

    def all_to_all_v(self, arrays: Sequence[Any], *, timeout: float | None = None) -> Any:
        """Element i of my list goes to rank i; a list of what came, by rank."""
        seconds = self._seconds(timeout)
        return self._conduct(collective_calls.all_to_all_v(self._context, arrays), seconds)

    # -- values that are not arrays --------------------------------------------------------------------

    def broadcast_object(
        self, value: Any = None, root: Rank = 0, *, pickle: bool = False, timeout: float | None = None
    ) -> Any:
        """The root's value, on every rank. See send_object for what may be sent."""
        seconds = self._seconds(timeout)
        return self._conduct(object_calls.broadcast_object(self._context, value, root, pickle=pickle), seconds)

    def gather_object(self, value: Any, root: Rank = 0, *, pickle: bool = False, timeout: float | None = None) -> Any:
        """At the root a list of every rank's value; None elsewhere."""
        seconds = self._seconds(timeout)
        return self._conduct(object_calls.gather_object(self._context, value, root, pickle=pickle), seconds)

    def all_gather_object(self, value: Any, *, pickle: bool = False, timeout: float | None = None) -> Any:
        """A list of every rank's value, on every rank."""
        seconds = self._seconds(timeout)
        return self._conduct(object_calls.all_gather_object(self._context, value, pickle=pickle), seconds)

    def scatter_object(
        self,
        values: Sequence[Any] | None = None,
        root: Rank = 0,
        *,
        pickle: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Element i of the root's list goes to rank i. The other ranks pass None."""
        seconds = self._seconds(timeout)
        return self._conduct(object_calls.scatter_object(self._context, values, root, pickle=pickle), seconds)
