"""Runs schedules on a group.

A run is a generator: it posts operations and yields those that must be done before it continues. Closing it, or
throwing into it, detaches every buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.dtypes import code_of
from nexar.arrays.operators import Reduction
from nexar.arrays.reduce import combiner, folder
from nexar.arrays.views import as_bytes, from_bytes
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.schedule import Combine, LocalCopy, LocalFold, PostedAt, Program, Range, SendStep, overlap
from nexar.errors import PeerMisbehaved
from nexar.group import Group
from nexar.links.messages import Receive as PostedReceive
from nexar.links.messages import collective_tag
from nexar.links.operation import Operation
from nexar.links.sending import MessageHeader
from nexar.wire.frame import Space

_MIN_BYTES: Final = 4 << 10
_KEPT_BYTES: Final = 64 << 20


class ScratchMemory:
    """Reusable buffers: fresh pages cost more than copying. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all fields below
        self._free: dict[int, list[NDArray[Any]]] = {}  # by size, a power of two
        self._kept_bytes = 0
        self._max_kept_bytes = _KEPT_BYTES  # limit of the bytes kept

    def take(self, size_bytes: int) -> NDArray[Any]:
        """Uninitialised memory, aligned for every dtype."""
        size = max(_MIN_BYTES, 1 << (size_bytes - 1).bit_length()) if size_bytes else _MIN_BYTES
        with self._lock:
            free = self._free.get(size)
            if free:
                self._kept_bytes -= size
                return free.pop()
        return np.empty(size, np.uint8)

    def give_back(self, memory: NDArray[Any]) -> None:
        with self._lock:
            if self._kept_bytes + memory.nbytes <= self._max_kept_bytes:
                self._kept_bytes += memory.nbytes
                self._free.setdefault(memory.nbytes, []).append(memory)

    def close(self) -> None:
        """Free all buffers now: garbage collection may come late. Idempotent."""
        with self._lock:
            self._max_kept_bytes = self._kept_bytes = 0
            self._free.clear()


Run: TypeAlias = Generator[Sequence[Operation], None, Any]
"""Yields operations to wait for; returns the result."""


class Kernels(NamedTuple):
    """Functions that reduce elements."""

    combine: Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], None]
    fold: Callable[[NDArray[Any], Sequence[NDArray[Any]]], None]

    @classmethod
    def of(cls, reduction: Reduction, dtype: np.dtype[Any], size: int = 1) -> Self:
        """Each combination and fold divides an average by `size`."""
        if reduction.function is not None:
            return cls(combiner(reduction, dtype), folder(reduction, dtype))
        key = reduction.code, dtype, size
        found = _KERNELS.get(key)
        if found is None:
            found = _KERNELS[key] = cls(combiner(reduction, dtype, size), folder(reduction, dtype, size))
        return found


_KERNELS: Final[dict[tuple[int, np.dtype[Any], int], Any]] = {}  # of built-in reductions only, which are few
_COLLECTIVE: Final = int(Space.COLLECTIVE)
PHASE: Final = 1 << 24
"""Tags per phase of a call that runs several schedules."""


class RunContext(NamedTuple):
    """Facts of the call that a run needs."""

    group: Group
    scratch: ScratchMemory
    sequence: int
    fingerprint: Fingerprint
    deadline: float
    """For opening links."""
    moved: Callable[[], None]
    """Called after each step."""


def execute(
    run_context: RunContext,
    program: Program,
    buffers: Sequence[NDArray[Any]],
    arithmetic: Kernels | None = None,
    *,
    ranks: Sequence[int] | None = None,
    phase: int = 0,
) -> Run:
    """Run a schedule on flat arrays of one dtype. `ranks`: of the group, by peer."""
    return _Execution(run_context, buffers, arithmetic, ranks, phase * PHASE).run(program)


class _PostedReceive(NamedTuple):
    operation: PostedReceive
    staging: NDArray[Any] | None  # destination as elements, if not its part
    scratch: NDArray[Any] | None  # memory of `staging`


class _Execution:
    def __init__(
        self,
        run_context: RunContext,
        buffers: Sequence[NDArray[Any]],
        arithmetic: Kernels | None,
        ranks: Sequence[int] | None,
        base: int,
    ) -> None:
        self._run_context = run_context
        self._group = run_context.group
        self._buffers = buffers
        self._memory = [as_bytes(buffer) for buffer in buffers]
        self._dtype = buffers[0].dtype if buffers else np.dtype(np.uint8)
        self._item = self._dtype.itemsize
        self._arithmetic = arithmetic
        self._ranks = ranks
        self._base = base
        # By id of its PostedAt, from posting to the end of its step.
        self._active_receives: dict[int, _PostedReceive] = {}
        self._active_sends: list[tuple[Range, Operation]] = []  # sends that may still read their part
        self._unposted: list[PostedAt] = []  # receives to post as soon as no send reads their part

    def run(self, program: Program) -> Run:
        try:
            for index, (step, posts, due) in enumerate(zip(program.steps, program.posts, program.due, strict=True)):
                yield from self._post_all(posts, index)
                for send in step.sends:
                    self._send(send)
                if due:
                    yield from self._complete(due)
                for work in step.then:
                    yield from self._run_local(work)
                self._run_context.moved()
            rest = [operation for _, operation in self._active_sends if not operation.done]
            if rest:
                yield rest
        except BaseException:
            self._detach()
            raise

    # -- receiving ---------------------------------------------------------------------------------------

    def _post_all(self, posts: tuple[PostedAt, ...], index: int) -> Run:
        """A receive whose part is still being sent is deferred, at most until its own step."""
        waiting, self._unposted = [*self._unposted, *posts] if self._unposted else posts, []
        for each in waiting:
            if each.direct and self._sends_from(each.receive.part):
                if each.step > index:
                    self._unposted.append(each)
                    continue
                yield from self._wait_for_sends(each.receive.part)
            self._post(each)

    def _post(self, each: PostedAt) -> None:
        receive = each.receive
        staging = scratch = None
        size_bytes = (receive.part.stop - receive.part.start) * self._item
        if each.direct:
            into = self._bytes(receive.part)
        else:
            scratch = self._run_context.scratch.take(size_bytes)
            into = scratch.data[:size_bytes]
            staging = scratch[:size_bytes].view(self._dtype)
        tag = collective_tag(self._run_context.sequence, self._base + receive.tag)
        operation = self._group.post_receive(
            self._rank(receive.peer), into, space=_COLLECTIVE, tag=tag, dtype=self._run_context.fingerprint.dtype
        )
        self._active_receives[id(each)] = _PostedReceive(operation, staging, scratch)

    def _complete(self, due: tuple[PostedAt, ...]) -> Run:
        arrivals = [self._active_receives[id(each)] for each in due]
        awaited = [each.operation for each in arrivals if not each.operation.done or each.operation.error is not None]
        if awaited:
            yield awaited
        for each, arrived in zip(due, arrivals, strict=True):
            if arrived.staging is not None:
                yield from self._wait_for_sends(each.receive.part)
                self._apply(each.receive.how, each.receive.part, arrived.staging)
            del self._active_receives[id(each)]
            if arrived.scratch is not None:
                self._run_context.scratch.give_back(arrived.scratch)

    # -- sending -----------------------------------------------------------------------------------------

    def _send(self, send: SendStep) -> None:
        operation, dtype, count, root, reduce_op, way = self._run_context.fingerprint
        about = MessageHeader(
            _COLLECTIVE, 0, dtype, self._run_context.sequence, self._base + send.tag, operation, reduce_op, root,
            count, way,
        )  # fmt: skip
        data = self._bytes(send.part)
        sent = self._group.post_send(self._rank(send.peer), data, self._run_context.deadline, about=about)
        if not sent.done or sent.error is not None:
            self._active_sends.append((send.part, sent))

    def _wait_for_sends(self, part: Range) -> Run:
        reading = self._sends_from(part)
        if reading:
            yield reading
            self._active_sends = [each for each in self._active_sends if not each[1].done or each[1].error is not None]

    def _sends_from(self, part: Range) -> list[Operation]:
        if not self._active_sends:
            return []
        return [
            operation
            for other, operation in self._active_sends
            if overlap(other, part) and (not operation.done or operation.error is not None)
        ]

    # -- memory ------------------------------------------------------------------------------------------

    def _run_local(self, work: LocalCopy | LocalFold) -> Run:
        yield from self._wait_for_sends(work.into)
        if isinstance(work, LocalCopy):
            self._apply(work.how, work.into, self._elements(work.source))
        else:
            assert self._arithmetic is not None
            self._arithmetic.fold(self._elements(work.into), [self._elements(part) for part in work.sources])

    def _apply(self, how: Combine, part: Range, data: NDArray[Any]) -> None:
        into = self._elements(part)
        if how is Combine.COPY:
            np.copyto(into, data)
            return
        assert self._arithmetic is not None  # callers of reducing schedules pass kernels
        if how is Combine.BEFORE:
            self._arithmetic.combine(into, data, into)
        else:
            self._arithmetic.combine(into, into, data)

    def _elements(self, part: Range) -> NDArray[Any]:
        return self._buffers[part.buffer][part.start : part.stop]

    def _bytes(self, part: Range) -> memoryview:
        return self._memory[part.buffer][part.start * self._item : part.stop * self._item]

    def _rank(self, peer: int) -> int:
        return peer if self._ranks is None else self._ranks[peer]

    def _detach(self) -> None:
        """Cancel all operations. Scratch memory is not reused."""
        for arriving in self._active_receives.values():
            arriving.operation.cancel()
        for _, operation in self._active_sends:
            operation.cancel()


def exchange(
    run_context: RunContext, outgoing: Mapping[int, NDArray[Any]], sources: Sequence[int], *, phase: int = 0
) -> Generator[Sequence[Operation], None, dict[int, NDArray[Any]]]:
    """Send arrays of unknown size, each to one rank; returns those of `sources`. Raises PeerMisbehaved for invalid
    ones.
    """
    group, tag = run_context.group, phase * PHASE
    operation, dtype, count, root, reduce_op, way = run_context.fingerprint
    posted: dict[int, PostedReceive] = {}
    sent: list[Operation] = []
    try:
        for rank in sources:
            wanted = collective_tag(run_context.sequence, tag)
            posted[rank] = group.post_receive(rank, None, space=_COLLECTIVE, tag=wanted, dtype=dtype)
        for rank, array in outgoing.items():
            code = code_of(array.dtype)
            about = MessageHeader(
                _COLLECTIVE, 0, code, run_context.sequence, tag, operation, reduce_op, root, count, way
            )
            sent.append(group.post_send(rank, as_bytes(array), run_context.deadline, shape=array.shape, about=about))
        yield [*posted.values(), *sent]
    except BaseException:
        for each in (*posted.values(), *sent):
            each.cancel()
        raise
    run_context.moved()
    return {rank: _array(receive, rank) for rank, receive in posted.items()}


def _array(receive: PostedReceive, source: int) -> NDArray[Any]:
    assert receive.into is not None  # allocated when the message arrived
    try:
        return from_bytes(receive.into, receive.frame.dtype, receive.shape)
    except ValueError as error:
        raise PeerMisbehaved(rank=source, what=f"it sent an invalid array: {error}") from error
