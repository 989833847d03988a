"""What the process groups of this process stand on: nodes of clusters, each shared by groups that come and go.

Every call of torch's, as a method of a few lines: translated, and performed at once or in the background.

Both doors (`backend_door`, `group_door`) are this class and one of torch's.

Groups of groups: some ranks of a communicator, and those that are left of one.
"""

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
    """One node, and the groups that stand on it. The last of them to end leaves the cluster: torch ends a default group
    that is shrunk while its successor, which stands on the same node, goes on.
    """

    def __init__(self, world: Communicator, leave: Callable[[], None]) -> None:
        """`leave` ends the node; of one that belongs to somebody else it does nothing."""
        self._world = world
        self._leave = leave
        self._lock = threading.Lock()
        self._standing: set[Communicator] = set()  # under the lock
        self._dropped = CompletionThreads()

    def enter(self, communicator: Communicator) -> None:
        """A group on this node begins."""
        with self._lock:
            self._standing.add(communicator)
        self._dropped.open()

    def hand_over(self, departure: Callable[[], None]) -> None:
        """A group was dropped: let it leave, in another thread. Never blocks and takes no lock, so a finalizer may call
        it wherever it runs.
        """
        self._dropped.hand_over(departure)

    def end(self, communicator: Communicator) -> None:
        """It has ended. Idempotent."""
        with self._lock:
            if communicator not in self._standing:
                return
            self._standing.discard(communicator)
            last = not self._standing
        if communicator is not self._world:
            communicator.close()
        if last:
            self._leave()
            self._dropped.close()


class NodeTable:
    """Written by whichever thread makes and ends process groups; torch makes one at a time."""

    def __init__(self) -> None:
        self.offered: Communicator | None = None
        """For the next default group, by adopt()."""
        self.world: Communicator | None = None
        """Of the default group: others are made of its ranks."""
        self.shared_node: SharedNode | None = None
        """Of the same."""

    def forget(self, communicator: Communicator) -> None:
        """The default group has ended, if this is its communicator."""
        if self.world is communicator:
            self.world = self.shared_node = None


NODES: Final = NodeTable()

AnyWork = DoneWork | PendingWork


class GroupCalls:
    """What torch calls on a process group. Collectives that torch waits for at once are performed in the thread that
    calls: their errors are raised there. All others go on in the background.

    A group that is dropped without `shutdown` leaves too, in a thread of its node: the collector may drop it anywhere,
    also where leaving would wait for itself. torch keeps the groups that it made until they are destroyed.
    """

    def begin(self, communicator: Communicator, timeout: float, shared_node: SharedNode) -> None:
        """`timeout`: of calls that have none of their own."""
        self.communicator = communicator
        """The group, as nexar knows it."""
        self._limit_by(timeout)
        self._shared_node = shared_node
        self._sequence = 0  # written by whichever thread calls; torch calls one at a time
        self._completion = CompletionThreads()
        self._flying: set[Request] = set()  # nobody else may hold them, and one that is dropped is cancelled
        shared_node.enter(communicator)
        self._departure = partial(_leave, communicator, shared_node, self._completion)
        self._when_dropped = weakref.finalize(self, shared_node.hand_over, self._departure)
        self._when_dropped.atexit = False  # the node itself leaves then

    # -- how calls are performed -----------------------------------------------------------------------

    def _perform(self, plan: TorchPlan, opts: Any) -> AnyWork:
        timeout = self._seconds(opts)
        if opts is not None and not getattr(opts, "asyncOp", True):
            return self._at_once(plan, timeout)
        return self._in_background(plan, timeout)

    def _at_once(self, plan: TorchPlan, timeout: float | None) -> DoneWork:
        self._sequence += 1
        for verb, arguments, settings, finish in plan.steps:
            if timeout is not None:
                settings = {**settings, "timeout": timeout}  # noqa: PLW2901
            result = getattr(self.communicator, verb)(*arguments, **settings)
            if finish is not None:
                finish(result)
        return DoneWork(plan.result, self._sequence)

    def _in_background(self, plan: TorchPlan, timeout: float | None) -> PendingWork:
        self._sequence += 1
        requests = []
        for verb, arguments, settings, finish in plan.steps:
            if timeout is not None:
                settings = {**settings, "timeout": timeout}  # noqa: PLW2901
            start = self.communicator.start
            start = start if finish is None else start.finishing(finish)
            request = getattr(start, verb)(*arguments, **settings)
            self._keep(request)
            requests.append(request)
        return PendingWork(requests, plan.result, self._sequence, self._completion)

    def _keep(self, request: Request) -> None:
        self._flying.add(request)
        request.when_done(partial(self._flying.discard, request))

    def _limit_by(self, timeout: float) -> None:
        self._timeout = timeout
        self._usual = None if timeout == self.communicator.config.collective_timeout else timeout

    def _seconds(self, opts: Any) -> float | None:
        """The call's own timeout, or the group's; None: that of the communicator. Negative is torch's word for none."""
        given = getattr(opts, "timeout", None)
        if given is None or given.days < 0 or not given:
            return self._usual
        seconds: float = given.total_seconds()
        return seconds

    # -- collectives -------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any) -> AnyWork:
        """In place. The call of calls, so what it needs least of is done here, and not where all others go."""
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
        """Many, in place."""
        return self._perform(translation.all_reduce_coalesced(tensors, opts.reduceOp, self.communicator.size), opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> AnyWork:
        """In place, from `opts.rootRank`."""
        return self._perform(translation.broadcast(tensors, opts.rootRank), opts)

    def reduce(self, tensors: Tensors, opts: Any) -> AnyWork:
        """In place, at `opts.rootRank`."""
        root, here = opts.rootRank, self.communicator
        plan = translation.reduce(tensors, opts.reduceOp, root, here.size, at_root=here.rank == root)
        return self._perform(plan, opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> AnyWork:
        """Into lists of tensors, one for each rank."""
        return self._perform(translation.all_gather(outputs, inputs, self.communicator.size), opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> AnyWork:
        """Into each rank's list."""
        return self._perform(translation.all_gather_coalesced(outputs, inputs, self.communicator.size), opts)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> AnyWork:
        """Into one tensor."""
        return self._perform(translation.all_gather_single([output], [given]), opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> AnyWork:
        """Into one tensor each."""
        return self._perform(translation.all_gather_single(outputs, inputs), opts)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> AnyWork:
        """Into a list of tensors at `opts.rootRank`."""
        return self._perform(translation.gather(outputs, inputs, opts.rootRank, self.communicator.size), opts)

    def gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> AnyWork:
        """Into one tensor at `opts.rootRank`."""
        at_root = self.communicator.rank == opts.rootRank
        return self._perform(translation.gather_single(output, given, opts.rootRank, at_root=at_root), opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> AnyWork:
        """From a list of tensors at `opts.rootRank`."""
        return self._perform(translation.scatter(outputs, inputs, opts.rootRank, self.communicator.size), opts)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> AnyWork:
        """From lists of tensors, one for each rank."""
        return self._perform(translation.reduce_scatter(outputs, inputs, opts.reduceOp, self.communicator.size), opts)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> AnyWork:
        """From one tensor."""
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> AnyWork:
        """From one tensor each."""
        plan = translation.reduce_scatter_single(outputs, inputs, opts.reduceOp, self.communicator.size)
        return self._perform(plan, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> AnyWork:
        """Of lists of tensors, of any sizes."""
        return self._perform(translation.all_to_all(outputs, inputs, self.communicator.size), opts)

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> AnyWork:
        """Of one tensor, in parts of any sizes."""
        size = self.communicator.size
        return self._perform(translation.all_to_all_single(output, given, output_sizes, input_sizes, size), opts)

    def barrier(self, opts: Any = None) -> AnyWork:
        """Until every rank has called it."""
        return self._perform(TorchPlan("barrier", [translation.Verb("barrier")], []), opts)

    def monitored_barrier(self, opts: Any, wait_all: bool = False) -> None:
        """As barrier. CollectiveTimeout names all ranks that have not come, whatever `wait_all` says."""
        self._at_once(TorchPlan("barrier", [translation.Verb("barrier")], []), self._seconds(opts))

    # The names these had before torch 2.15; C++ may call either.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    gather_into_tensor = gather_single

    def average_compressed(
        self, tensor: torch.Tensor, compressor: Compressor, residual: torch.Tensor | None
    ) -> PendingWork:
        """In place, in the background. torch has no such call: see `gradients`."""
        return self._in_background(translation.average_compressed(tensor, compressor, residual), self._seconds(None))

    # -- messages ----------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> AnyWork:
        """One tensor."""
        return self._in_background(translation.send(tensors, rank, tag), self._seconds(None))

    def recv(self, tensors: Tensors, rank: int, tag: int = 0) -> AnyWork:
        """Into one tensor."""
        return self._in_background(translation.recv(tensors, rank, tag), self._seconds(None))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> AnyWork:
        """From whoever sends first; `work._source_rank()` tells who it was."""
        return self._in_background(translation.recv(tensors, ANY_SOURCE, tag), self._seconds(None))

    # -- the group ---------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """For later calls."""
        self._limit_by(timeout.total_seconds())

    def sequence_number(self) -> int:
        """How many calls there were."""
        return self._sequence

    def abort(self) -> None:
        """Give up what is in flight, and leave: the others are told."""
        for request in list(self._flying):
            request.cancel()
        self.shutdown()

    def shutdown(self) -> None:
        """Leave. Idempotent."""
        self._when_dropped.detach()
        self._departure()


def _leave(communicator: Communicator, shared_node: SharedNode, completion: CompletionThreads) -> None:
    """What a group does when it ends; idempotent. It refers to nothing that refers to the group."""
    NODES.forget(communicator)
    shared_node.end(communicator)
    completion.close()


def calls_of(group: dist.ProcessGroup | None, device: torch.device) -> GroupCalls:
    """The group, None for the default one, as this module knows it. UsageError if it is not of nexar."""
    whole = dist.group.WORLD if group is None else group
    if isinstance(whole, GroupCalls):
        return whole
    found = None if whole is None else whole._get_backend(device)
    if not isinstance(found, GroupCalls):
        raise UsageError(
            'this process group is not of nexar: make it with init_process_group("nexar"), or with '
            'new_group(backend="nexar"), and not in the debug mode DETAIL, in which torch hides it'
        )
    return found


def subgroup_of(communicator: Communicator, ranks: Sequence[int], timeout: float | None = None) -> Communicator | None:
    """These ranks, in this order; None if this one is not among them. They all call it with the same list."""
    return communicator.group([int(rank) for rank in ranks], timeout=timeout)


def remaining_of(communicator: Communicator, ranks: Sequence[int]) -> Communicator:
    """All but these ranks, which may be lost; the others call it with the same list. UsageError for one that is left
    out itself.
    """
    left_out = set(ranks)
    if communicator.rank in left_out:
        raise UsageError(f"rank {communicator.rank} asked for a group without itself; only those that stay may ask")
    members = communicator.membership.members
    staying = [member.node for rank, member in enumerate(members) if rank not in left_out]
    newest = communicator
    while True:
        present = [member.node for member in newest.membership.members]
        try:
            part = subgroup_of(newest, [present.index(node) for node in staying if node in present])
        except MembershipChanged as change:
            if change.communicator is None:
                raise
            newest = change.communicator
        else:
            assert part is not None  # this rank stays, so it is one of them
            return part
