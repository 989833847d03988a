"""The collective methods of a communicator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from nexar.arrays.compression.base import Compressor
from nexar.collectives.context import CallOptions, CollectiveContext
from nexar.collectives.data_movement import barrier
from nexar.collectives.operations import OperationCode
from nexar.collectives.requests import PendingCollective
from nexar.communicator import collective_calls, object_calls
from nexar.communicator.bucketed import all_reduce_bucketed
from nexar.communicator.collective_calls import Op, all_reduce_compressed, start_in_place, start_new
from nexar.types import Rank


class CollectiveMethods(ABC):
    """Collectives. All ranks must call the same methods in the same order, with the same dtype, count, op and root;
    otherwise all raise CollectiveMismatch. CollectiveTimeout names the missing ranks.

    - `op`: "sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor", "lxor", or a function of two
      arrays.
    - `commutative=False`: reduce in rank order.
    - `out`: an array that receives the result and is returned.
    - `algorithm`: overrides the automatic choice.
    - `deterministic`: reduce in an order that is independent of algorithm and hosts.
    - `timeout`: seconds without progress of any rank; default: the setting `collective_timeout`.
    """

    _context: CollectiveContext

    @abstractmethod
    def _seconds(self, timeout: Any) -> float:
        """UsageError if `timeout` is invalid or the communicator is closed."""

    @abstractmethod
    def _run_collective(self, work: PendingCollective, timeout: float) -> Any:
        """Wait for the call, or let it run in the background."""

    def _try_fast_all_reduce(self, array: Any, op: Op) -> bool:
        """False: the fast path does not apply, and nothing was done."""
        return False

    def barrier(self, *, algorithm: str | None = None, timeout: float | None = None) -> Any:
        """Block until every rank calls it. `timeout` defaults to the setting `barrier_timeout`."""
        seconds = self._seconds(self._context.config.barrier_timeout if timeout is None else timeout)
        return self._run_collective(barrier(self._context, CallOptions(algorithm)), seconds)

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
        """Reduce all ranks' arrays in place, on every rank. Returns the array; a number returns a number."""
        special = algorithm is not None or timeout is not None or deterministic or not commutative
        if out is None and not special and self._try_fast_all_reduce(array, op):
            return array
        seconds = self._seconds(timeout)
        options = CallOptions(algorithm, deterministic)
        work = start_in_place(
            self._context, OperationCode.ALL_REDUCE, array, options, op=op, commutative=commutative, out=out
        )
        return self._run_collective(work, seconds)

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
        """Reduce many arrays in place, in buckets of at most `bucket_bytes` (default: the setting of that name).
        Returns the list. If a bucket fails, arrays of finished buckets are already written.
        """
        seconds = self._seconds(timeout)
        options = CallOptions(algorithm, deterministic)
        work = all_reduce_bucketed(self._context, arrays, op, bucket_bytes, options, commutative=commutative)
        return self._run_collective(work, seconds)

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
        """Reduce all ranks' float arrays in place, compressed, on every rank (`op` "sum" or "avg"). Returns the array.

        `compressor`: TopK, RandomK, FP8, Int8, NoCompression or your own Compressor. `residual`: this rank's unsent
        values, zeros at first; the call adds it before compression and updates it. A call that raises leaves both
        arrays unchanged.
        """
        seconds = self._seconds(timeout)
        work = all_reduce_compressed(self._context, array, compressor, residual=residual, op=op, out=out)
        return self._run_collective(work, seconds)

    def broadcast(
        self, array: Any, root: Rank = 0, *, algorithm: str | None = None, timeout: float | None = None
    ) -> Any:
        """Copy the root's array into every rank's array. Returns the array."""
        seconds = self._seconds(timeout)
        work = start_in_place(self._context, OperationCode.BROADCAST, array, CallOptions(algorithm), root=root)
        return self._run_collective(work, seconds)

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
        """Reduce all ranks' arrays in place at the root. Returns the array there. Other ranks get None, and their
        arrays are unchanged.
        """
        seconds = self._seconds(timeout)
        options = CallOptions(algorithm, deterministic)
        work = start_in_place(
            self._context, OperationCode.REDUCE, array, options, op=op, commutative=commutative, root=root, out=out
        )
        return self._run_collective(work, seconds)

    def all_gather(
        self, array: Any, *, out: Any = None, algorithm: str | None = None, timeout: float | None = None
    ) -> Any:
        """Return all ranks' arrays as a new array of shape (size, *shape)."""
        seconds = self._seconds(timeout)
        work = start_new(self._context, OperationCode.ALL_GATHER, array, CallOptions(algorithm), out=out)
        return self._run_collective(work, seconds)

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
        """Reduce all ranks' arrays; return this rank's part of axis 0 (as np.array_split) as a new array."""
        seconds = self._seconds(timeout)
        options = CallOptions(algorithm, deterministic)
        work = start_new(
            self._context, OperationCode.REDUCE_SCATTER, array, options, op=op, commutative=commutative, out=out
        )
        return self._run_collective(work, seconds)

    def all_to_all(
        self, array: Any, *, out: Any = None, algorithm: str | None = None, timeout: float | None = None
    ) -> Any:
        """Send block i of axis 0 to rank i. Returns the received blocks in rank order, as a new array."""
        seconds = self._seconds(timeout)
        work = start_new(self._context, OperationCode.ALL_TO_ALL, array, CallOptions(algorithm), out=out)
        return self._run_collective(work, seconds)

    def gather(
        self,
        array: Any,
        root: Rank = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """At the root, return all ranks' arrays as a new array of shape (size, *shape); elsewhere None."""
        seconds = self._seconds(timeout)
        work = start_new(self._context, OperationCode.GATHER, array, CallOptions(algorithm), root=root, out=out)
        return self._run_collective(work, seconds)

    def scatter(
        self,
        array: Any,
        root: Rank = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Split axis 0 of the root's array into `size` equal blocks; return this rank's block as a new array. Other
        ranks pass None.

        If a multidimensional array has `size` rows, rank i gets row i without that axis (the inverse of gather).
        """
        seconds = self._seconds(timeout)
        return self._run_collective(
            collective_calls.scatter(self._context, array, root, out, CallOptions(algorithm)), seconds
        )

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
        """Return the reduction of the arrays of ranks 0 to this rank, as a new array."""
        seconds = self._seconds(timeout)
        options = CallOptions(algorithm, deterministic)
        work = start_new(self._context, OperationCode.SCAN, array, options, op=op, commutative=commutative, out=out)
        return self._run_collective(work, seconds)

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
        """Return the reduction of all lower ranks' arrays as a new array; on rank 0, the reduction's identity."""
        seconds = self._seconds(timeout)
        options = CallOptions(algorithm, deterministic)
        work = start_new(
            self._context, OperationCode.EXCLUSIVE_SCAN, array, options, op=op, commutative=commutative, out=out
        )
        return self._run_collective(work, seconds)

    # -- unequal counts --------------------------------------------------------------------------------

    def all_gather_v(self, array: Any, *, timeout: float | None = None) -> Any:
        """Return a list of all ranks' arrays, in rank order. Shapes may differ."""
        seconds = self._seconds(timeout)
        return self._run_collective(collective_calls.all_gather_v(self._context, array), seconds)

    def gather_v(self, array: Any, root: Rank = 0, *, timeout: float | None = None) -> Any:
        """At the root, return a list of all ranks' arrays; elsewhere None. Shapes may differ."""
        seconds = self._seconds(timeout)
        return self._run_collective(collective_calls.gather_v(self._context, array, root), seconds)

    def scatter_v(self, arrays: Sequence[Any] | None, root: Rank = 0, *, timeout: float | None = None) -> Any:
        """Return element i of the root's list on rank i. Other ranks pass None."""
        seconds = self._seconds(timeout)
        return self._run_collective(collective_calls.scatter_v(self._context, arrays, root), seconds)

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
        work = start_new(
            self._context,
            OperationCode.REDUCE_SCATTER_V,
            array,
            options,
            op=op,
            commutative=commutative,
            out=out,
            counts=list(counts),
        )
        return self._run_collective(work, seconds)

    def all_to_all_v(self, arrays: Sequence[Any], *, timeout: float | None = None) -> Any:
        """Send element i of the list to rank i. Returns the received arrays as a list, in rank order."""
        seconds = self._seconds(timeout)
        return self._run_collective(collective_calls.all_to_all_v(self._context, arrays), seconds)

    # -- Python objects --------------------------------------------------------------------------------

    def broadcast_object(
        self, value: Any = None, root: Rank = 0, *, pickle: bool = False, timeout: float | None = None
    ) -> Any:
        """Return the root's value on every rank. `send_object` lists the supported types."""
        seconds = self._seconds(timeout)
        return self._run_collective(object_calls.broadcast_object(self._context, value, root, pickle=pickle), seconds)

    def gather_object(self, value: Any, root: Rank = 0, *, pickle: bool = False, timeout: float | None = None) -> Any:
        """At the root, return a list of all ranks' values; elsewhere None."""
        seconds = self._seconds(timeout)
        return self._run_collective(object_calls.gather_object(self._context, value, root, pickle=pickle), seconds)

    def all_gather_object(self, value: Any, *, pickle: bool = False, timeout: float | None = None) -> Any:
        """Return a list of all ranks' values, in rank order."""
        seconds = self._seconds(timeout)
        return self._run_collective(object_calls.all_gather_object(self._context, value, pickle=pickle), seconds)

    def scatter_object(
        self,
        values: Sequence[Any] | None = None,
        root: Rank = 0,
        *,
        pickle: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Return element i of the root's list on rank i. Other ranks pass None."""
        seconds = self._seconds(timeout)
        return self._run_collective(object_calls.scatter_object(self._context, values, root, pickle=pickle), seconds)
