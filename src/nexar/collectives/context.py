"""What every collective of one communicator stands on: the ranks, their hosts, the memory they share, the journal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.operators import Reduction
from nexar.arrays.reduce import rounds
from nexar.arrays.views import Span
from nexar.collectives.call import Call, PostInRegion, RegionCall
from nexar.collectives.call_log import CallLog
from nexar.collectives.executor import Kernels, Run, RunContext, ScratchMemory, execute
from nexar.collectives.fingerprint import Fingerprint, OperationCode, code_of_algorithm
from nexar.collectives.flight_recorder import FlightRecorder
from nexar.collectives.requests import CallRunner, PendingCollective
from nexar.collectives.schedule import Program, compile_steps
from nexar.collectives.schedules.registry import Shape, buffers, steps
from nexar.collectives.selection import SHARED_MEMORY, Facts, choose_algorithm
from nexar.collectives.shared_region import SharedRegion
from nexar.config import Config
from nexar.errors import NexarError
from nexar.group import Group
from nexar.links.operation import Operation
from nexar.topology import FULL_MESH, is_complete

_KEPT: Final = 512  # shapes of calls
_LONG: Final = 256  # steps


class CallOptions(NamedTuple):
    """How a collective is to be done: what the caller of a verb may ask for beside the result."""

    algorithm: str | None = None
    deterministic: bool = False

    def way(self, name: str) -> int:
        """The `way` of a fingerprint: the algorithm that was chosen, and what the caller asked for."""
        return code_of_algorithm(name, forced=self.algorithm is not None, deterministic=self.deterministic)


PLAIN: Final = CallOptions()


class CollectiveContext:
    """One communicator, as its collectives see it. Any thread."""

    def __init__(
        self, group: Group, config: Config, call_log: CallLog, region: SharedRegion | None, *, shared: bool
    ) -> None:
        """`arena`: the memory that the ranks of this host share; None: there is none, or nobody to share it with.

        `shared`: the ranks of every host share memory; the same on all ranks.
        """
        self.group = group
        self.config = config
        self.call_log = call_log
        self.region = region
        self.runner: Final = CallRunner(group, call_log, region)
        self.flight_recorder: Final = FlightRecorder(group, call_log, config.dump_dir)
        """Whoever raises what leaves a dump, and is not the journal, tells it."""
        self.scratch = ScratchMemory()
        membership = group.membership
        self.hosts: Final = tuple(membership.ranks_on(host) for host in membership.hosts)
        """The ranks of each host."""
        self.index: Final = membership.local_rank(group.rank)
        """Which of the ranks of its host this one is."""
        self._shared = shared
        world = group.communicator == 0 and not is_complete(config.topology, group.size)
        self._topology: Final[str] = config.topology if world else FULL_MESH  # of a part's ranks nothing is known
        self._chosen: dict[tuple[Any, ...], str] = {}  # algorithms of calls that were made; dict methods are atomic
        self._order = threading.Lock()  # numbers and slips are taken in the same order

    def interrupt(self, error: NexarError) -> None:
        """The members change: every call on it, collective or message, pending or later, raises this. Idempotent."""
        self.call_log.interrupt(error)
        if self.region is not None:
            self.region.fail(error)
        self.group.close(error)

    # -- choosing ----------------------------------------------------------------------------------------

    def choose(
        self,
        operation: OperationCode,
        count: int,
        dtype: np.dtype[Any] | None = None,
        options: CallOptions = PLAIN,
        reduction: Reduction | None = None,
    ) -> str:
        """The algorithm: the same on every rank that makes the same call."""
        size_bytes = count * (1 if dtype is None else dtype.itemsize)
        commutative = reduction is None or reduction.commutative
        narrow = reduction is not None and dtype is not None and rounds(reduction, dtype)
        key = operation, count, size_bytes, options, commutative, narrow
        name = self._chosen.get(key)
        if name is None:
            facts = self._facts(operation, count, size_bytes, tuple(map(len, self.hosts)))
            facts = replace(facts, deterministic=options.deterministic, commutative=commutative, rounds=narrow)
            name = choose_algorithm(facts, options.algorithm)
            if len(self._chosen) >= _KEPT:
                self._chosen.clear()
            self._chosen[key] = name
        return name

    def choose_schedule(
        self,
        operation: OperationCode,
        count: int,
        dtype: np.dtype[Any],
        size: int | None = None,
        reduction: Reduction | None = None,
    ) -> str:
        """For a part of a call that cannot run in shared memory, among `size` ranks (default: all)."""
        hosts = (1,) * (self.group.size if size is None else size)
        facts = self._facts(operation, count, count * dtype.itemsize, hosts)
        narrow = reduction is not None and rounds(reduction, dtype)
        return choose_algorithm(replace(facts, rounds=narrow), None)

    def _facts(self, operation: OperationCode, count: int, size_bytes: int, hosts: tuple[int, ...]) -> Facts:
        config = self.config
        return Facts(
            operation=operation,
            size_bytes=size_bytes,
            count=count,
            size=sum(hosts),
            hosts=hosts,
            shared_memory=self._shared and max(hosts) > 1,
            large_msg_bytes=config.large_msg_bytes,
            pipeline_segment_bytes=config.pipeline_segment_bytes,
            ring_max_world=config.ring_max_world,
            topology=self._topology if sum(hosts) == self.group.size else FULL_MESH,
        )

    # -- calls -------------------------------------------------------------------------------------------

    def begin(self, fingerprint: Fingerprint, region_steps: Sequence[PostInRegion] = ()) -> RegionCall:
        """Take the next number, and the turns in the arena that it will need. Raises what has become of the
        communicator. A call that another rank has given up already is one nevertheless: all have taken both.
        """
        region = self.region
        with self._order:
            entry = self.call_log.begin(fingerprint)
            order_number = region.reserve(len(region_steps)) if region_steps and region is not None else 0
        if region is not None:
            self._announce(region, entry)
        return RegionCall(entry, fingerprint, order_number, region_steps)

    def _announce(self, region: SharedRegion, entry: Call) -> None:
        """Where the arena was closed a moment ago, the call has its number and ends at once, like any that was begun
        before: only so is it told what has become of the communicator.
        """
        try:
            region.announce(entry.sequence, entry.fingerprint)
        except NexarError as error:
            with entry.lock:
                if entry.error is None:
                    entry.finish(error)

    def in_memory(self, name: str, post: Callable[..., Operation], *arguments: Any) -> Sequence[PostInRegion]:
        """The turn of a call that runs in shared memory, by this method of Arena; none for other algorithms."""
        region = self.region
        if region is None or name != SHARED_MEMORY:
            return ()
        return (
            lambda order_number, about, spin: post(region, order_number, *arguments, announcement=about, spin=spin),
        )

    def take_order_number(self) -> tuple[int, int] | None:
        """A number and a turn for a call that is expected to end at once: see Journal.take."""
        region = self.region
        assert region is not None
        with self._order:
            sequence = self.call_log.take()
            return None if sequence is None else (sequence, region.reserve())

    def work(self, call: RegionCall, run: Run) -> PendingCollective:
        """The call, to be performed or started."""
        return PendingCollective(run, call, partial(self._end, call))

    def _end(self, call: RegionCall, error: BaseException | None) -> BaseException | None:
        if error is None:
            return self.call_log.end(call.entry, None, self._arrivals(call))
        call.give_up()
        return self.call_log.end(call.entry, error)

    def _arrivals(self, call: RegionCall) -> dict[int, float] | None:
        """Of the ranks of this host, which write theirs down; the others' are known from their frames."""
        if self.region is None:
            return None
        came = self.region.arrivals(call.entry.sequence)
        return {rank: when / 1e9 for rank, when in zip(self.group.local_ranks, came, strict=True) if when is not None}

    def run_context(self, call: RegionCall) -> RunContext:
        """For the executor."""
        deadline = monotonic() + self.config.collective_timeout
        return RunContext(self.group, self.scratch, call.entry.sequence, call.fingerprint, deadline, call.entry.moved)

    def program(self, name: str, operation: OperationCode, count: int, dtype: np.dtype[Any]) -> Program | None:
        """Of a schedule on one array; None if it needs more memory than that."""
        shape = Shape(self.group.rank, self.group.size, count, 0, self._segment(dtype), topology=self._topology)
        program, needed = program_of(name, operation, shape)
        return None if needed else program

    def _segment(self, dtype: np.dtype[Any]) -> int:
        """Elements of a pipeline segment."""
        return max(1, self.config.pipeline_segment_bytes // dtype.itemsize)

    def execute(
        self,
        call: RegionCall,
        name: str,
        operation: OperationCode,
        work: NDArray[Any],
        *,
        arithmetic: Kernels | None = None,
        root: int = 0,
        spans: tuple[Span, ...] | None = None,
        team: Sequence[int] | None = None,
        phase: int = 0,
        more: Sequence[NDArray[Any]] = (),
        count: int | None = None,
    ) -> Run:
        """Run one schedule. `team`: the ranks that take part, if not all. `more`: buffers 1 … where the caller has
        them. `count` is the schedule's, if it is not the length of the work array.
        """
        size = self.group.size if team is None else len(team)
        rank = self.group.rank if team is None else team.index(self.group.rank)
        item = work.dtype.itemsize
        topology = self._topology if team is None else FULL_MESH
        elements = len(work) if count is None else count
        shape = Shape(rank, size, elements, root, self._segment(work.dtype), spans, topology)
        program, needed = program_of(name, operation, shape)
        own = needed[len(more) :]
        borrowed = [self.scratch.take(each * item) for each in own]
        extra = [memory[: each * item].view(work.dtype) for memory, each in zip(borrowed, own, strict=True)]
        yield from execute(self.run_context(call), program, [work, *more, *extra], arithmetic, ranks=team, phase=phase)
        for memory in borrowed:
            self.scratch.give_back(memory)


def program_of(name: str, operation: OperationCode, shape: Shape) -> tuple[Program, tuple[int, ...]]:
    """With the elements that its buffers 1 … need. Kept for the next call of the same shape, unless it is long: then
    making it costs little beside running it, and keeping many of them much.
    """
    key = name, operation, shape
    found = _programs.get(key)
    if found is None:
        found = compile_steps(steps(name, operation, shape)), buffers(name, operation, shape)
        if len(found[0].steps) <= _LONG:
            if len(_programs) >= _KEPT:
                _programs.clear()
            _programs[key] = found
    return found


_programs: Final[dict[tuple[str, OperationCode, Shape], tuple[Program, tuple[int, ...]]]] = {}  # methods are atomic
