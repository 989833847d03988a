"""Memory for what is received before it is reduced: kept between calls, because fresh pages cost more than copying.

Runs any schedule on a group: the only file here that sends and receives.

A run is a generator. It posts, then yields the operations that must be done before it can go on; whoever runs it
waits for them (a blocking call), or resumes it when they are done (a request in flight). Closing it, or throwing an
error into it, detaches every buffer before it returns.

Overlap: receives are posted up to `AHEAD` steps early (program.py says which may), and a send stays in flight until
somebody wants to write where it reads. So while a segment is reduced, the next one arrives and the last one leaves.
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

_LEAST_BYTES: Final = 4 << 10
_KEPT_BYTES: Final = 64 << 20


class ScratchMemory:
    """Of one communicator. Any thread takes and gives back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # over both below
        self._free: dict[int, list[NDArray[Any]]] = {}  # by size, a power of two
        self._kept_bytes = 0
        self._most = _KEPT_BYTES  # that are kept

    def take(self, size_bytes: int) -> NDArray[Any]:
        """At least that many bytes, aligned for every dtype; anything may be in them."""
        size = max(_LEAST_BYTES, 1 << (size_bytes - 1).bit_length()) if size_bytes else _LEAST_BYTES
        with self._lock:
            free = self._free.get(size)
            if free:
                self._kept_bytes -= size
                return free.pop()
        return np.empty(size, np.uint8)

    def give_back(self, memory: NDArray[Any]) -> None:
        """Nobody writes there any more."""
        with self._lock:
            if self._kept_bytes + memory.nbytes <= self._most:
                self._kept_bytes += memory.nbytes
                self._free.setdefault(memory.nbytes, []).append(memory)

    def close(self) -> None:
        """Keep nothing from now on: a communicator that is over may be garbage for long before anybody collects it.
        Idempotent.
        """
        with self._lock:
            self._most = self._kept_bytes = 0
            self._free.clear()


Run: TypeAlias = Generator[Sequence[Operation], None, Any]
"""What is yielded must be done before the run goes on; what it returns is the result."""


class Kernels(NamedTuple):
    """How elements are reduced: see arrays.reduce."""

    combine: Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], None]
    fold: Callable[[NDArray[Any], Sequence[NDArray[Any]]], None]

    @classmethod
    def of(cls, reduction: Reduction, dtype: np.dtype[Any], size: int = 1) -> Self:
        """For elements of this dtype. An average is divided by `size` with each combination and each fold."""
        if reduction.function is not None:
            return cls(combiner(reduction, dtype), folder(reduction, dtype))
        key = reduction.code, dtype, size
        found = _KERNELS.get(key)
        if found is None:
            found = _KERNELS[key] = cls(combiner(reduction, dtype, size), folder(reduction, dtype, size))
        return found


_KERNELS: Final[dict[tuple[int, np.dtype[Any], int], Any]] = {}  # of the reductions that have a name: few
_COLLECTIVE: Final = int(Space.COLLECTIVE)
PHASE: Final = 1 << 24
"""Tags of a call that runs several schedules one after the other: each gets its own block of this many."""


class RunContext(NamedTuple):
    """What a run stands on."""

    group: Group
    scratch: ScratchMemory
    sequence: int
    fingerprint: Fingerprint
    deadline: float
    """Until then a link that is not open yet may be opened."""
    moved: Callable[[], None]
    """Called after each step: progress."""


def execute(
    run_context: RunContext,
    program: Program,
    buffers: Sequence[NDArray[Any]],
    arithmetic: Kernels | None = None,
    *,
    ranks: Sequence[int] | None = None,
    phase: int = 0,
) -> Run:
    """Run a schedule on these flat arrays of one dtype. `ranks`: who its peers 0, 1, … are in the group, if not so."""
    return _Execution(run_context, buffers, arithmetic, ranks, phase * PHASE).run(program)


class _PostedReceive(NamedTuple):
    """A receive that was posted."""

    operation: PostedReceive
    landing: NDArray[Any] | None  # where it lands, as elements, if not in its part
    scratch: NDArray[Any] | None  # the memory behind that


class _Execution:
    """One run."""

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
        self._arriving: dict[
            int, _PostedReceive
        ] = {}  # by the identity of its Due, from posting to the end of its step
        self._leaving: list[tuple[Range, Operation]] = []  # sends that may still read their part
        self._unposted: list[PostedAt] = []  # receives that may be posted as soon as nothing reads their part

    def run(self, program: Program) -> Run:
        """See the module."""
        try:
            for index, (step, posts, due) in enumerate(zip(program.steps, program.posts, program.due, strict=True)):
                yield from self._post_all(posts, index)
                for send in step.sends:
                    self._send(send)
                if due:
                    yield from self._take(due)
                for work in step.then:
                    yield from self._do(work)
                self._run_context.moved()
            rest = [operation for _, operation in self._leaving if not operation.done]
            if rest:
                yield rest
        except BaseException:
            self._detach()
            raise

    # -- receiving ---------------------------------------------------------------------------------------

    def _post_all(self, posts: tuple[PostedAt, ...], index: int) -> Run:
        """What may be posted now. One whose part is still being sent is put off, at most until its own step."""
        waiting, self._unposted = [*self._unposted, *posts] if self._unposted else posts, []
        for each in waiting:
            if each.direct and self._reading(each.receive.part):
                if each.step > index:
                    self._unposted.append(each)
                    continue
                yield from self._settle(each.receive.part)
            self._post(each)

    def _post(self, each: PostedAt) -> None:
        receive = each.receive
        landing = scratch = None
        size_bytes = (receive.part.stop - receive.part.start) * self._item
        if each.direct:
            into = self._bytes(receive.part)
        else:
            scratch = self._run_context.scratch.take(size_bytes)
            into = scratch.data[:size_bytes]
            landing = scratch[:size_bytes].view(self._dtype)
        tag = collective_tag(self._run_context.sequence, self._base + receive.tag)
        operation = self._group.post_receive(
            self._rank(receive.peer), into, space=_COLLECTIVE, tag=tag, dtype=self._run_context.fingerprint.dtype
        )
        self._arriving[id(each)] = _PostedReceive(operation, landing, scratch)

    def _take(self, due: tuple[PostedAt, ...]) -> Run:
        arrivals = [self._arriving[id(each)] for each in due]
        awaited = [each.operation for each in arrivals if not each.operation.done or each.operation.error is not None]
        if awaited:
            yield awaited
        for each, arrived in zip(due, arrivals, strict=True):
            if arrived.landing is not None:
                yield from self._settle(each.receive.part)
                self._apply(each.receive.how, each.receive.part, arrived.landing)
            del self._arriving[id(each)]
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
            self._leaving.append((send.part, sent))

    def _settle(self, part: Range) -> Run:
        """Until nothing reads this part any more, so that it may be written."""
        reading = self._reading(part)
        if reading:
            yield reading
            self._leaving = [each for each in self._leaving if not each[1].done or each[1].error is not None]

    def _reading(self, part: Range) -> list[Operation]:
        if not self._leaving:
            return []
        return [
            operation
            for other, operation in self._leaving
            if overlap(other, part) and (not operation.done or operation.error is not None)
        ]

    # -- memory ------------------------------------------------------------------------------------------

    def _do(self, work: LocalCopy | LocalFold) -> Run:
        yield from self._settle(work.into)
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
        assert self._arithmetic is not None  # a schedule that reduces is run with something that does
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
        """Nothing of this run touches anybody's memory any more. Scratch memory is not given back: it is let go."""
        for arriving in self._arriving.values():
            arriving.operation.cancel()
        for _, operation in self._leaving:
            operation.cancel()


def exchange(
    run_context: RunContext, outgoing: Mapping[int, NDArray[Any]], sources: Sequence[int], *, phase: int = 0
) -> Generator[Sequence[Operation], None, dict[int, NDArray[Any]]]:
    """Arrays whose sizes only their senders know, each to one rank; returns those of `sources`, with their shapes.

    PeerMisbehaved: what one of them sent is no array.
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
    assert receive.into is not None  # made when the message came
    try:
        return from_bytes(receive.into, receive.frame.dtype, receive.shape)
    except ValueError as error:
        raise PeerMisbehaved(rank=source, what=f"it sent an array that is none: {error}") from error
