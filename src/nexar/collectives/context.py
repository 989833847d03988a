"""State that the collectives of one communicator share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.dtypes import code_of
from nexar.arrays.operators import Reduction
from nexar.arrays.reduce import rounds
from nexar.arrays.views import Span
from nexar.collectives.call import Call, PostInRegion, RegionCall
from nexar.collectives.call_log import CallLog
from nexar.collectives.executor import Kernels, Run, RunContext, ScratchMemory, execute
from nexar.collectives.fingerprint import Fingerprint, code_of_algorithm, rooted
from nexar.collectives.flight_recorder import FlightRecorder
from nexar.collectives.operations import COLLECTIVES, OperationCode, SelectionFacts, buffers, steps
from nexar.collectives.requests import CallRunner, PendingCollective
from nexar.collectives.schedule import Program, compile_steps
from nexar.collectives.schedules.algorithm import Shape
from nexar.collectives.selection import SHARED_MEMORY, choose_algorithm
from nexar.collectives.shared_region import SharedRegion
from nexar.config import Config
from nexar.errors import NexarError
from nexar.group import Group
from nexar.links.operation import Operation
from nexar.topology import FULL_MESH, is_complete

_MAX_CACHED: Final = 512  # shapes of calls
_MAX_CACHED_STEPS: Final = 256  # steps


class CallOptions(NamedTuple):
    """Options of a collective call."""

    algorithm: str | None = None
    deterministic: bool = False

    def algorithm_code(self, name: str) -> int:
        return code_of_algorithm(name, forced=self.algorithm is not None, deterministic=self.deterministic)


PLAIN: Final = CallOptions()


class CollectiveContext:
    """Shared by the collectives of one communicator. Thread-safe."""

    def __init__(
        self, group: Group, config: Config, call_log: CallLog, region: SharedRegion | None, *, shared: bool
    ) -> None:
        """`shared`: the ranks of every host share memory; equal on all ranks."""
        self.group = group
        self.config = config
        self.call_log = call_log
        self.region = region
        self.runner: Final = CallRunner(group, call_log, region)
        self.flight_recorder: Final = FlightRecorder(group, call_log, config.dump_dir)
        """Errors that bypass the call log must be passed to it."""
        self.scratch = ScratchMemory()
        membership = group.membership
        self.hosts: Final = tuple(membership.ranks_on(host) for host in membership.hosts)
        """Ranks by host."""
        self.index: Final = membership.local_rank(group.rank)
        """Local rank."""
        self._shared = shared
        world = group.communicator == 0 and not is_complete(config.topology, group.size)
        # the topology of a sub-communicator is unknown
        self._topology: Final[str] = config.topology if world else FULL_MESH
        self._selected: dict[tuple[Any, ...], str] = {}  # selected algorithms by call; dict methods are atomic
        # algorithms and fingerprints by call; dict methods are atomic
        self._identified: dict[tuple[Any, ...], tuple[str, Fingerprint]] = {}
        self._order = threading.Lock()  # sequence numbers and order numbers are taken in the same order

    def interrupt(self, error: NexarError) -> None:
        """All pending and later calls raise `error`: the membership changes. Idempotent."""
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
        """Returns the algorithm, equal on every rank."""
        size_bytes = count * (1 if dtype is None else dtype.itemsize)
        commutative = reduction is None or reduction.commutative
        narrow = reduction is not None and dtype is not None and rounds(reduction, dtype)
        key = operation, count, size_bytes, options, commutative, narrow
        name = self._selected.get(key)
        if name is None:
            facts = self._facts(operation, count, size_bytes, tuple(map(len, self.hosts)))
            facts = replace(facts, deterministic=options.deterministic, commutative=commutative, rounds=narrow)
            name = choose_algorithm(facts, options.algorithm)
            if len(self._selected) >= _MAX_CACHED:
                self._selected.clear()
            self._selected[key] = name
        return name

    def identify(
        self,
        code: OperationCode,
        count: int,
        dtype: np.dtype[Any],
        options: CallOptions,
        *,
        root: int | None = None,
        digest: int = 0,
        reduction: Reduction | None = None,
    ) -> tuple[str, Fingerprint]:
        """Algorithm and fingerprint of a call on one array per rank. `digest` replaces the root."""
        reduce_code, commutative = (0, True) if reduction is None else (reduction.code, reduction.commutative)
        key = code, count, dtype, options, root, digest, reduce_code, commutative
        found = self._identified.get(key)
        if found is None:
            name = self.choose(COLLECTIVES[code].base_operation, count, dtype, options, reduction)
            root_field = digest if root is None else rooted(root)
            fingerprint = Fingerprint(
                code, code_of(dtype), count, root_field, reduce_code, options.algorithm_code(name)
            )
            if len(self._identified) >= _MAX_CACHED:
                self._identified.clear()
            found = self._identified[key] = name, fingerprint
        return found

    def choose_schedule(
        self,
        operation: OperationCode,
        count: int,
        dtype: np.dtype[Any],
        size: int | None = None,
        reduction: Reduction | None = None,
    ) -> str:
        """Returns the algorithm for a part of a call among `size` ranks (default: all), without shared memory."""
        hosts = (1,) * (self.group.size if size is None else size)
        facts = self._facts(operation, count, count * dtype.itemsize, hosts)
        narrow = reduction is not None and rounds(reduction, dtype)
        return choose_algorithm(replace(facts, rounds=narrow), None)

    def _facts(self, operation: OperationCode, count: int, size_bytes: int, hosts: tuple[int, ...]) -> SelectionFacts:
        config = self.config
        return SelectionFacts(
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
        """Take the next sequence number and reserve region steps, even if another rank aborted the call. Raises the
        error that ended the communicator.
        """
        region = self.region
        with self._order:
            entry = self.call_log.begin(fingerprint)
            order_number = region.reserve(len(region_steps)) if region_steps and region is not None else 0
        if region is not None:
            self._announce(region, entry)
        return RegionCall(entry, fingerprint, order_number, region_steps)

    def _announce(self, region: SharedRegion, entry: Call) -> None:
        """If the region was just closed, the call ends with that error."""
        try:
            region.announce(entry.sequence, entry.fingerprint)
        except NexarError as error:
            with entry.lock:
                if entry.error is None:
                    entry.finish(error)

    def in_memory(self, name: str, post: Callable[..., Operation], *arguments: Any) -> Sequence[PostInRegion]:
        region = self.region
        if region is None or name != SHARED_MEMORY:
            return ()
        return (
            lambda order_number, about, spin: post(region, order_number, *arguments, announcement=about, spin=spin),
        )

    def take_order_number(self) -> tuple[int, int] | None:
        """Sequence and order number for a call that should end at once; None as for CallLog.take."""
        region = self.region
        assert region is not None
        with self._order:
            sequence = self.call_log.take()
            return None if sequence is None else (sequence, region.reserve())

    def work(self, call: RegionCall, run: Run) -> PendingCollective:
        return PendingCollective(run, call, partial(self._end, call))

    def _end(self, call: RegionCall, error: BaseException | None) -> BaseException | None:
        if error is None:
            return self.call_log.end(call.entry, None, self._arrivals(call))
        call.abort()
        return self.call_log.end(call.entry, error)

    def _arrivals(self, call: RegionCall) -> dict[int, float] | None:
        if self.region is None:
            return None
        came = self.region.arrivals(call.entry.sequence)
        return {rank: when / 1e9 for rank, when in zip(self.group.local_ranks, came, strict=True) if when is not None}

    def run_context(self, call: RegionCall) -> RunContext:
        deadline = monotonic() + self.config.collective_timeout
        return RunContext(self.group, self.scratch, call.entry.sequence, call.fingerprint, deadline, call.entry.moved)

    def program(self, name: str, operation: OperationCode, count: int, dtype: np.dtype[Any]) -> Program | None:
        """None if the schedule needs extra buffers."""
        shape = Shape(self.group.rank, self.group.size, count, 0, self._segment(dtype), topology=self._topology)
        program, needed = program_of(name, operation, shape)
        return None if needed else program

    def _segment(self, dtype: np.dtype[Any]) -> int:
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
        """Run one schedule. `team`: participating ranks. `more`: buffers 1 …. `count`: of the schedule, default: the
        length of `work`.
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
    """The program and the sizes of its buffers 1 …. Long programs are not cached: compiling is cheap compared with
    running.
    """
    key = name, operation, shape
    found = _programs.get(key)
    if found is None:
        found = compile_steps(steps(name, operation, shape)), buffers(name, operation, shape)
        if len(found[0].steps) <= _MAX_CACHED_STEPS:
            if len(_programs) >= _MAX_CACHED:
                _programs.clear()
            _programs[key] = found
    return found


# dict methods are atomic
_programs: Final[dict[tuple[str, OperationCode, Shape], tuple[Program, tuple[int, ...]]]] = {}
