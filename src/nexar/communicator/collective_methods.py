"""The collective methods of a communicator."""

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
    """Collectives. Every rank of the communicator must call the same methods in the same order, with the same dtype,
    count, op and root. Otherwise all ranks raise CollectiveMismatch. CollectiveTimeout names the ranks that did not
    take part.

    - `op`: "sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor", "lxor", or a function of two
      arrays.
    - `commutative=False`: reduce in rank order.
    - `out`: an array that receives the result and is returned.
    - `algorithm`: use this algorithm instead of the automatic choice.
    - `deterministic`: reduce in one order that depends neither on the algorithm nor on the hosts.
    - `timeout`: seconds without progress of any rank until CollectiveTimeout; default: the setting
      `collective_timeout`.
    """

    _context: CollectiveContext

    @abstractmethod
    def _seconds(self, timeout: Any) -> float:
        """Return the timeout of a collective. UsageError for an invalid timeout or on a closed communicator."""

    @abstractmethod
    def _run_collective(self, work: PendingCollective, timeout: float) -> Any:
        """Wait for the operation, or let it run in the background."""

    def _try_fast_all_reduce(self, array: Any, op: Op) -> bool:
        """All-reduce in place on the fast path, if it applies. Returns False if nothing was done."""
        return False

    def barrier(self, *, algorithm: str | None = None, timeout: float | None = None) -> Any:
        """Block until every rank has called it. `timeout` defaults to the setting `barrier_timeout`."""
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
        """Reduce the arrays of all ranks, in place, on every rank. Returns the array; a number returns a number."""
        special = algorithm is not None or timeout is not None or deterministic or not commutative
        if out is None and not special and self._try_fast_all_reduce(array, op):
            return array
        seconds = self._seconds(timeout)
        options = CallOptions(algorithm, deterministic)
        return self._run_collective(
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
        """Reduce many arrays in place, fused into buckets of at most `bucket_bytes` (default: the setting of that
        name). Returns the list of arrays. Arrays of finished buckets are already written if a later bucket fails.
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
        """Sum or average the compressed arrays of all ranks, in place, on every rank. Returns the array. Only float
        types, and op "sum" or "avg".

        `compressor`: TopK, RandomK, FP8, Int8, NoCompression or your own Compressor. `residual`: this rank's array of
        values not sent yet, zeros before the first call. It is added before compression and then holds the part that
        was not sent. A call that raises leaves both arrays unchanged.
        """
        seconds = self._seconds(timeout)
        work = all_reduce_compressed(self._context, array, compressor, residual=residual, op=op, out=out)
        return self._run_collective(work, seconds)

    def broadcast(
        self, array: Any, root: Rank = 0, *, algorithm: str | None = None, timeout: float | None = None
    ) -> Any:
        """Copy the root's array into the array of every rank. Returns the array."""
        seconds = self._seconds(timeout)
        return self._run_collective(
            collective_calls.broadcast(self._context, array, root, CallOptions(algorithm)), seconds
        )

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
        """Reduce the arrays of all ranks, in place, at the root. Returns the array at the root and None elsewhere. The
        arrays of the other ranks are unchanged.
        """
        seconds = self._seconds(timeout)
        options = CallOptions(algorithm, deterministic)
        return self._run_collective(
            collective_calls.reduce(self._context, array, op, out, options, root=root, commutative=commutative), seconds
        )

    def all_gather(
        self, array: Any, *, out: Any = None, algorithm: str | None = None, timeout: float | None = None
    ) -> Any:
        """Return a new array of shape (size, *shape) with the array of every rank."""
        seconds = self._seconds(timeout)
        return self._run_collective(
            collective_calls.all_gather(self._context, array, out, CallOptions(algorithm)), seconds
        )

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
        """Reduce the arrays of all ranks and return this rank's part as a new array. Axis 0 is split as by
        np.array_split.
        """
        seconds = self._seconds(timeout)
        options = CallOptions(algorithm, deterministic)
        return self._run_collective(
            collective_calls.reduce_scatter(self._context, array, op, out, options, commutative=commutative), seconds
        )

    def all_to_all(
        self, array: Any, *, out: Any = None, algorithm: str | None = None, timeout: float | None = None
    ) -> Any:
        """Send block i of axis 0 to rank i. Returns a new array of the received blocks, in rank order."""
        seconds = self._seconds(timeout)
        return self._run_collective(
            collective_calls.all_to_all(self._context, array, out, CallOptions(algorithm)), seconds
        )

    def gather(
        self,
        array: Any,
        root: Rank = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Return a new array of shape (size, *shape) with the array of every rank at the root, and None elsewhere."""
        seconds = self._seconds(timeout)
        return self._run_collective(
            collective_calls.gather(self._context, array, root, out, CallOptions(algorithm)), seconds
        )

    def scatter(
        self,
        array: Any,
        root: Rank = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Return this rank's block of the root's array as a new array. Axis 0 is split into `size` equal blocks. Ranks
        other than the root pass None.

        If the array has several dimensions and `size` rows, rank i gets row i without that axis (the inverse of
        gather).
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
        """Return the reduction of the arrays of ranks 0 to this one, as a new array."""
        seconds = self._seconds(timeout)
        options = CallOptions(algorithm, deterministic)
        work = collective_calls.scan(self._context, array, op, out, options, exclusive=False, commutative=commutative)
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
        """Return the reduction of the arrays of all lower ranks, as a new array. Rank 0 gets the identity of the
        reduction.
        """
        seconds = self._seconds(timeout)
        options = CallOptions(algorithm, deterministic)
        work = collective_calls.scan(self._context, array, op, out, options, exclusive=True, commutative=commutative)
        return self._run_collective(work, seconds)

    # -- unequal counts --------------------------------------------------------------------------------

    def all_gather_v(self, array: Any, *, timeout: float | None = None) -> Any:
        """Return a list of the arrays of all ranks, in rank order. Shapes may differ."""
        seconds = self._seconds(timeout)
        return self._run_collective(collective_calls.all_gather_v(self._context, array), seconds)

    def gather_v(self, array: Any, root: Rank = 0, *, timeout: float | None = None) -> Any:
        """Return a list of the arrays of all ranks at the root, and None elsewhere. Shapes may differ."""
        seconds = self._seconds(timeout)
        return self._run_collective(collective_calls.gather_v(self._context, array, root), seconds)

    def scatter_v(self, arrays: Sequence[Any] | None, root: Rank = 0, *, timeout: float | None = None) -> Any:
        """Return element i of the root's list on rank i. Ranks other than the root pass None."""
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
        work = collective_calls.reduce_scatter(
            self._context, array, op, out, options, commutative=commutative, counts=list(counts)
        )
        return self._run_collective(work, seconds)

    def all_to_all_v(self, arrays: Sequence[Any], *, timeout: float | None = None) -> Any:
        """Send element i of the list to rank i. Returns a list of the received arrays, in rank order."""
        seconds = self._seconds(timeout)
        return self._run_collective(collective_calls.all_to_all_v(self._context, arrays), seconds)

    # -- Python objects --------------------------------------------------------------------------------

    def broadcast_object(
        self, value: Any = None, root: Rank = 0, *, pickle: bool = False, timeout: float | None = None
    ) -> Any:
        """Return the root's value on every rank. `send_object` lists the types that can be sent."""
        seconds = self._seconds(timeout)
        return self._run_collective(object_calls.broadcast_object(self._context, value, root, pickle=pickle), seconds)

    def gather_object(self, value: Any, root: Rank = 0, *, pickle: bool = False, timeout: float | None = None) -> Any:
        """Return a list of the values of all ranks at the root, and None elsewhere."""
        seconds = self._seconds(timeout)
        return self._run_collective(object_calls.gather_object(self._context, value, root, pickle=pickle), seconds)

    def all_gather_object(self, value: Any, *, pickle: bool = False, timeout: float | None = None) -> Any:
        """Return a list of the values of all ranks, in rank order."""
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
        """Return element i of the root's list on rank i. Ranks other than the root pass None."""
        seconds = self._seconds(timeout)
        return self._run_collective(object_calls.scatter_object(self._context, values, root, pickle=pickle), seconds)
