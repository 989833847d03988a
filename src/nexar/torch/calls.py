"""torch's calls on a process group, and the node that groups share."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from nexar.arrays.compression.base import Compressor
from nexar.communicator.communicator import Communicator
from nexar.communicator.request import Request
from nexar.errors import MembershipChanged, UsageError
from nexar.torch import translation
from nexar.torch.tensors import values
from nexar.torch.translation import Tensors, TorchPlan, averages_integers, reduction_of
from nexar.torch.work import CompletionThreads, DoneWork, PendingWork
from nexar.types import ANY_SOURCE


class SharedNode:
    """One node and its groups. The node leaves when its last group ends: torch ends a shrunk default group while the
    successor uses the node.
    """

    def __init__(self, world: Communicator, leave: Callable[[], None]) -> None:
        self._world = world
        self._leave = leave
        self._lock = threading.Lock()
        self._communicators: set[Communicator] = set()  # guarded by the lock
        self._departures = CompletionThreads()

    def enter(self, communicator: Communicator) -> None:
        with self._lock:
            self._communicators.add(communicator)
        self._departures.open()

    def hand_over(self, leave_group: Callable[[], None]) -> None:
        """For finalizers: never blocks, takes no lock."""
        self._departures.hand_over(leave_group)

    def end(self, communicator: Communicator) -> None:
        with self._lock:
            if communicator not in self._communicators:
                return
            self._communicators.discard(communicator)
            last = not self._communicators
        if communicator is not self._world:
            communicator.close()
        if last:
            self._leave()
            self._departures.close()


class NodeTable:
    """The default group's node. torch creates and ends one group at a time."""

    def __init__(self) -> None:
        self.adopted: Communicator | None = None
        """For the next default group, set by adopt()."""
        self.world: Communicator | None = None
        """Other groups are made of its ranks."""
        self.shared_node: SharedNode | None = None

    def forget(self, communicator: Communicator) -> None:
        if self.world is communicator:
            self.world = self.shared_node = None


NODES: Final = NodeTable()

AnyWork = DoneWork | PendingWork


class GroupCalls:
    """torch's calls on a process group. Synchronous collectives run in the calling thread, others in the background.

    A group dropped without `shutdown` ends in another thread: ending it in the garbage collector could deadlock.
    """

    def begin(self, communicator: Communicator, timeout: float, shared_node: SharedNode) -> None:
        self.communicator = communicator
        self._set_default_timeout(timeout)
        self._shared_node = shared_node
        self._sequence = 0  # written by the calling thread; torch makes one call at a time
        self._completion = CompletionThreads()
        self._requests: set[Request] = set()  # strong references: a dropped request is cancelled
        shared_node.enter(communicator)
        self._leave_group = partial(_leave, communicator, shared_node, self._completion)
        self._when_dropped = weakref.finalize(self, shared_node.hand_over, self._leave_group)
        self._when_dropped.atexit = False  # at exit the node itself leaves

    # -- execution ---------------------------------------------------------------------------------------

    def _perform(self, plan: TorchPlan, opts: Any) -> AnyWork:
        timeout = self._seconds(opts)
        if opts is not None and not getattr(opts, "asyncOp", True):
            return self._run_blocking(plan, timeout)
        return self._in_background(plan, timeout)

    def _run_blocking(self, plan: TorchPlan, timeout: float | None) -> DoneWork:
        self._sequence += 1
        for method, arguments, settings, finish in plan.steps:
            if timeout is not None:
                settings = {**settings, "timeout": timeout}  # noqa: PLW2901
            result = getattr(self.communicator, method)(*arguments, **settings)
            if finish is not None:
                finish(result)
        return DoneWork(plan.result, self._sequence)

    def _in_background(self, plan: TorchPlan, timeout: float | None) -> PendingWork:
        self._sequence += 1
        requests = []
        for method, arguments, settings, finish in plan.steps:
            if timeout is not None:
                settings = {**settings, "timeout": timeout}  # noqa: PLW2901
            start = self.communicator.start
            start = start if finish is None else start.finishing(finish)
            request = getattr(start, method)(*arguments, **settings)
            self._keep(request)
            requests.append(request)
        return PendingWork(requests, plan.result, self._sequence, self._completion)

    def _keep(self, request: Request) -> None:
        self._requests.add(request)
        request.when_done(partial(self._requests.discard, request))

    def _set_default_timeout(self, timeout: float) -> None:
        self._timeout = timeout
        self._default_timeout = None if timeout == self.communicator.config.collective_timeout else timeout

    def _seconds(self, opts: Any) -> float | None:
        """None: the communicator's timeout. A negative timeout of torch means "not set"."""
        given = getattr(opts, "timeout", None)
        if given is None or given.days < 0 or not given:
            return self._default_timeout
        seconds: float = given.total_seconds()
        return seconds

    # -- collectives -------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any) -> AnyWork:
        """The common case skips the translation: this is the most frequent call."""
        if len(tensors) == 1 and tensors[0].is_cpu and self._seconds(opts) is None:
            reduction = reduction_of(opts.reduceOp)
            if reduction.factor is None and not averages_integers(reduction, tensors[0]):
                return self._reduce(tensors, reduction.name, in_background=opts.asyncOp)
        return self._perform(translation.all_reduce(tensors, opts.reduceOp, self.communicator.size), opts)

    def _reduce(self, tensors: Tensors, op: str, *, in_background: bool) -> AnyWork:
        array = values(tensors[0])
        self._sequence += 1
        if in_background:
            request = self.communicator.start.all_reduce(array, op)
            self._keep(request)
            return PendingWork((request,), tensors, self._sequence, self._completion)
        self.communicator.all_reduce(array, op)
        return DoneWork(tensors, self._sequence)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> AnyWork:
        return self._perform(translation.all_reduce_coalesced(tensors, opts.reduceOp, self.communicator.size), opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> AnyWork:
        return self._perform(translation.broadcast(tensors, opts.rootRank), opts)

    def reduce(self, tensors: Tensors, opts: Any) -> AnyWork:
        root, here = opts.rootRank, self.communicator
        plan = translation.reduce(tensors, opts.reduceOp, root, here.size, at_root=here.rank == root)
        return self._perform(plan, opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> AnyWork:
        return self._perform(translation.all_gather(outputs, inputs, self.communicator.size), opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> AnyWork:
        return self._perform(translation.all_gather_coalesced(outputs, inputs, self.communicator.size), opts)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> AnyWork:
        return self._perform(translation.all_gather_single([output], [given]), opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> AnyWork:
        return self._perform(translation.all_gather_single(outputs, inputs), opts)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> AnyWork:
        return self._perform(translation.gather(outputs, inputs, opts.rootRank, self.communicator.size), opts)

    def gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> AnyWork:
        at_root = self.communicator.rank == opts.rootRank
        return self._perform(translation.gather_single(output, given, opts.rootRank, at_root=at_root), opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> AnyWork:
        return self._perform(translation.scatter(outputs, inputs, opts.rootRank, self.communicator.size), opts)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> AnyWork:
        return self._perform(translation.reduce_scatter(outputs, inputs, opts.reduceOp, self.communicator.size), opts)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> AnyWork:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> AnyWork:
        plan = translation.reduce_scatter_single(outputs, inputs, opts.reduceOp, self.communicator.size)
        return self._perform(plan, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> AnyWork:
        return self._perform(translation.all_to_all(outputs, inputs, self.communicator.size), opts)

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> AnyWork:
        size = self.communicator.size
        return self._perform(translation.all_to_all_single(output, given, output_sizes, input_sizes, size), opts)

    def barrier(self, opts: Any = None) -> AnyWork:
        return self._perform(TorchPlan([translation.PlanStep("barrier")], []), opts)

    def monitored_barrier(self, opts: Any, wait_all: bool = False) -> None:
        """CollectiveTimeout names all missing ranks; ignores `wait_all`."""
        self._run_blocking(TorchPlan([translation.PlanStep("barrier")], []), self._seconds(opts))

    # Names before torch 2.15; C++ may call either.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    gather_into_tensor = gather_single

    def average_compressed(
        self, tensor: torch.Tensor, compressor: Compressor, residual: torch.Tensor | None
    ) -> PendingWork:
        return self._in_background(translation.average_compressed(tensor, compressor, residual), self._seconds(None))

    # -- messages ----------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> AnyWork:
        return self._in_background(translation.send(tensors, rank, tag), self._seconds(None))

    def recv(self, tensors: Tensors, rank: int, tag: int = 0) -> AnyWork:
        return self._in_background(translation.recv(tensors, rank, tag), self._seconds(None))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> AnyWork:
        """`work._source_rank()` returns the source."""
        return self._in_background(translation.recv(tensors, ANY_SOURCE, tag), self._seconds(None))

    # -- group -------------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        self._set_default_timeout(timeout.total_seconds())

    def sequence_number(self) -> int:
        return self._sequence

    def abort(self) -> None:
        for request in list(self._requests):
            request.cancel()
        self.shutdown()

    def shutdown(self) -> None:
        self._when_dropped.detach()
        self._leave_group()


def _leave(communicator: Communicator, shared_node: SharedNode, completion: CompletionThreads) -> None:
    """Idempotent. Must not refer to the group, which would keep it alive."""
    NODES.forget(communicator)
    shared_node.end(communicator)
    completion.close()


def calls_of(group: dist.ProcessGroup | None, device: torch.device) -> GroupCalls:
    """None: the default group. UsageError if nexar does not serve it."""
    whole = dist.group.WORLD if group is None else group
    if isinstance(whole, GroupCalls):
        return whole
    found = None if whole is None else whole._get_backend(device)
    if not isinstance(found, GroupCalls):
        raise UsageError(
            'this process group does not use nexar: create it with init_process_group("nexar") or '
            'new_group(backend="nexar"), and not in debug mode DETAIL, in which torch hides the backend'
        )
    return found


def subgroup_of(communicator: Communicator, ranks: Sequence[int], timeout: float | None = None) -> Communicator | None:
    """None if this rank is not listed. All these ranks must call it."""
    return communicator.group([int(rank) for rank in ranks], timeout=timeout)


def remaining_of(communicator: Communicator, ranks: Sequence[int]) -> Communicator:
    """Exclude these ranks, which may be lost. All others must call it. UsageError if this rank is excluded."""
    excluded = set(ranks)
    if communicator.rank in excluded:
        raise UsageError(f"rank {communicator.rank} asked for a group without itself; only those that stay may ask")
    members = communicator.membership.members
    remaining = [member.node for rank, member in enumerate(members) if rank not in excluded]
    newest = communicator
    while True:
        present = [member.node for member in newest.membership.members]
        try:
            part = subgroup_of(newest, [present.index(node) for node in remaining if node in present])
        except MembershipChanged as change:
            if change.communicator is None:
                raise
            newest = change.communicator
        else:
            assert part is not None  # this rank stays
            return part
