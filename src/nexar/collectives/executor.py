"""Runs any schedule on a group: the only file here that sends and receives.

A run is a generator. It posts, then yields the operations that must be done before it can go on; whoever runs it
waits for them (a blocking call), or resumes it when they are done (a request in flight). Closing it, or throwing an
error into it, detaches every buffer before it returns.

Overlap: receives are posted up to `AHEAD` steps early (program.py says which may), and a send stays in flight until
somebody wants to write where it reads. So while a segment is reduced, the next one arrives and the last one leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.dtypes import code_of
from nexar.arrays.operations import Reduction
from nexar.arrays.reduce import combiner, folder
from nexar.arrays.view import as_bytes, from_bytes
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.program import Due, Program
from nexar.collectives.schedule import Fold, How, Local, Part, Send, overlap
from nexar.collectives.scratch import Scratch
from nexar.errors import PeerMisbehaved
from nexar.group import Group
from nexar.links.message import Receive as PostedReceive
from nexar.links.message import collective_tag
from nexar.links.operation import Operation
from nexar.links.sending import About
from nexar.wire.frame import Space

Run: TypeAlias = Generator[Sequence[Operation], None, Any]
"""What is yielded must be done before the run goes on; what it returns is the result."""


class Arithmetic(NamedTuple):
    """How elements are reduced: see arrays.reduce."""

    combine: Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], None]
    fold: Callable[[NDArray[Any], Sequence[NDArray[Any]]], None]

    @classmethod
    def of(cls, reduction: Reduction, dtype: np.dtype[Any], size: int = 1) -> Self:
        """For elements of this dtype. An average is divided by `size` with each combination and each fold."""
        if reduction.function is not None:
            return cls(combiner(reduction, dtype), folder(reduction, dtype))
        key = reduction.code, dtype, size
        found = _ARITHMETIC.get(key)
        if found is None:
            found = _ARITHMETIC[key] = cls(combiner(reduction, dtype, size), folder(reduction, dtype, size))
        return found


_ARITHMETIC: Final[dict[tuple[int, np.dtype[Any], int], Any]] = {}  # of the reductions that have a name: few
_COLLECTIVE: Final = int(Space.COLLECTIVE)
PHASE: Final = 1 << 24
"""Tags of a call that runs several schedules one after the other: each gets its own block of this many."""


class Ground(NamedTuple):
    """What a run stands on."""

    group: Group
    scratch: Scratch
    sequence: int
    fingerprint: Fingerprint
    deadline: float
    """Until then a link that is not open yet may be opened."""
    moved: Callable[[], None]
    """Called after each step: progress."""


def execute(
    ground: Ground,
    program: Program,
    buffers: Sequence[NDArray[Any]],
    arithmetic: Arithmetic | None = None,
    *,
    ranks: Sequence[int] | None = None,
    phase: int = 0,
) -> Run:
    """Run a schedule on these flat arrays of one dtype. `ranks`: who its peers 0, 1, … are in the group, if not so."""
    return _Execution(ground, buffers, arithmetic, ranks, phase * PHASE).run(program)


class _Arriving(NamedTuple):
    """A receive that was posted."""

    operation: PostedReceive
    landing: NDArray[Any] | None  # where it lands, as elements, if not in its part
    scratch: NDArray[Any] | None  # the memory behind that


class _Execution:
    """One run."""

    def __init__(
        self,
        ground: Ground,
        buffers: Sequence[NDArray[Any]],
        arithmetic: Arithmetic | None,
        ranks: Sequence[int] | None,
        base: int,
    ) -> None:
        self._ground = ground
        self._group = ground.group
        self._buffers = buffers
        self._memory = [as_bytes(buffer) for buffer in buffers]
        self._dtype = buffers[0].dtype if buffers else np.dtype(np.uint8)
        self._item = self._dtype.itemsize
        self._arithmetic = arithmetic
        self._ranks = ranks
        self._base = base
        self._arriving: dict[int, _Arriving] = {}  # by the identity of its Due, from posting to the end of its step
        self._leaving: list[tuple[Part, Operation]] = []  # sends that may still read their part
        self._unposted: list[Due] = []  # receives that may be posted as soon as nothing reads their part

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
                self._ground.moved()
            rest = [operation for _, operation in self._leaving if not operation.done]
            if rest:
                yield rest
        except BaseException:
            self._detach()
            raise

    # -- receiving ---------------------------------------------------------------------------------------

    def _post_all(self, posts: tuple[Due, ...], index: int) -> Run:
        """What may be posted now. One whose part is still being sent is put off, at most until its own step."""
        waiting, self._unposted = [*self._unposted, *posts] if self._unposted else posts, []
        for each in waiting:
            if each.direct and self._reading(each.receive.part):
                if each.step > index:
                    self._unposted.append(each)
                    continue
                yield from self._settle(each.receive.part)
            self._post(each)

    def _post(self, each: Due) -> None:
        receive = each.receive
        landing = scratch = None
        size_bytes = (receive.part.stop - receive.part.start) * self._item
        if each.direct:
            into = self._bytes(receive.part)
        else:
            scratch = self._ground.scratch.take(size_bytes)
            into = scratch.data[:size_bytes]
            landing = scratch[:size_bytes].view(self._dtype)
        tag = collective_tag(self._ground.sequence, self._base + receive.tag)
        operation = self._group.post_receive(
            self._rank(receive.peer), into, space=_COLLECTIVE, tag=tag, dtype=self._ground.fingerprint.dtype
        )
        self._arriving[id(each)] = _Arriving(operation, landing, scratch)

    def _take(self, due: tuple[Due, ...]) -> Run:
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
                self._ground.scratch.give_back(arrived.scratch)

    # -- sending -----------------------------------------------------------------------------------------

    def _send(self, send: Send) -> None:
        operation, dtype, count, root, reduce_op, way = self._ground.fingerprint
        about = About(
            _COLLECTIVE, 0, dtype, self._ground.sequence, self._base + send.tag, operation, reduce_op, root,
            count, way,
        )  # fmt: skip
        data = self._bytes(send.part)
        sent = self._group.post_send(self._rank(send.peer), data, self._ground.deadline, about=about)
        if not sent.done or sent.error is not None:
            self._leaving.append((send.part, sent))

    def _settle(self, part: Part) -> Run:
        """Until nothing reads this part any more, so that it may be written."""
        reading = self._reading(part)
        if reading:
            yield reading
            self._leaving = [each for each in self._leaving if not each[1].done or each[1].error is not None]

    def _reading(self, part: Part) -> list[Operation]:
        if not self._leaving:
            return []
        return [
            operation
            for other, operation in self._leaving
            if overlap(other, part) and (not operation.done or operation.error is not None)
        ]

    # -- memory ------------------------------------------------------------------------------------------

    def _do(self, work: Local | Fold) -> Run:
        yield from self._settle(work.into)
        if isinstance(work, Local):
            self._apply(work.how, work.into, self._elements(work.source))
        else:
            assert self._arithmetic is not None
            self._arithmetic.fold(self._elements(work.into), [self._elements(part) for part in work.sources])

    def _apply(self, how: How, part: Part, data: NDArray[Any]) -> None:
        into = self._elements(part)
        if how is How.COPY:
            np.copyto(into, data)
            return
        assert self._arithmetic is not None  # a schedule that reduces is run with something that does
        if how is How.LEFT:
            self._arithmetic.combine(into, data, into)
        else:
            self._arithmetic.combine(into, into, data)

    def _elements(self, part: Part) -> NDArray[Any]:
        return self._buffers[part.buffer][part.start : part.stop]

    def _bytes(self, part: Part) -> memoryview:
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
    ground: Ground, outgoing: Mapping[int, NDArray[Any]], sources: Sequence[int], *, phase: int = 0
) -> Generator[Sequence[Operation], None, dict[int, NDArray[Any]]]:
    """Arrays whose sizes only their senders know, each to one rank; returns those of `sources`, with their shapes.

    PeerMisbehaved: what one of them sent is no array.
    """
    group, tag = ground.group, phase * PHASE
    operation, dtype, count, root, reduce_op, way = ground.fingerprint
    posted: dict[int, PostedReceive] = {}
    sent: list[Operation] = []
    try:
        for rank in sources:
            wanted = collective_tag(ground.sequence, tag)
            posted[rank] = group.post_receive(rank, None, space=_COLLECTIVE, tag=wanted, dtype=dtype)
        for rank, array in outgoing.items():
            code = code_of(array.dtype)
            about = About(_COLLECTIVE, 0, code, ground.sequence, tag, operation, reduce_op, root, count, way)
            sent.append(group.post_send(rank, as_bytes(array), ground.deadline, shape=array.shape, about=about))
        yield [*posted.values(), *sent]
    except BaseException:
        for each in (*posted.values(), *sent):
            each.cancel()
        raise
    ground.moved()
    return {rank: _array(receive, rank) for rank, receive in posted.items()}


def _array(receive: PostedReceive, source: int) -> NDArray[Any]:
    assert receive.into is not None  # made when the message came
    try:
        return from_bytes(receive.into, receive.frame.dtype, receive.shape)
    except ValueError as error:
        raise PeerMisbehaved(rank=source, what=f"it sent an array that is none: {error}") from error
