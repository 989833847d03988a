"""The serving side: takes calls in, turns those away that are too many, and answers all of them.

Law: every call that arrives is answered once, unless its caller has withdrawn it or is gone. A call has a place from
its arrival (a large one: from when it was announced) until its function has ended; the place is free before the answer
leaves, so that who calls one after the other never finds its own place taken.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Coroutine
from functools import partial
from time import monotonic
from typing import Any, Final

from nexar.links.outbox import Outbox
from nexar.rpc.caller import Values
from nexar.rpc.exchange import ANSWER
from nexar.rpc.job import EXPIRED, Job, cancelled, raised
from nexar.rpc.loop import Loop
from nexar.rpc.pool import Pool
from nexar.rpc.post import Post
from nexar.rpc.registry import Function, Registry
from nexar.types import NodeId
from nexar.wire.calls import Body, What, decode, encode

_PATIENCE: Final = 2.0
"""Seconds for which closing waits for functions that run."""
_FULL: Final = "as many calls run as are allowed"


class Server:
    """Of one communicator. Close it, without the node's lock."""

    def __init__(
        self, lock: threading.Lock, outbox: Outbox, post: Post, values: Values, registry: Registry, *,
        limit: int, name: str,
    ) -> None:  # fmt: skip
        """`lock`: the node's. `limit`: calls that run at once. `name`: of its threads."""
        self._lock = lock
        self._outbox = outbox
        self._post = post
        self._values = values
        self._registry = registry
        self._limit = limit
        self._name = name
        self._jobs: dict[tuple[NodeId, int], Job] = {}  # by caller and its number; under the lock
        self._pool = Pool(f"{name}-call", limit)
        self._making = threading.Lock()
        self._loop: Loop | None = None  # made with the first async function that is called; under `_making`
        self._closed = False  # written under `_making`

    # -- under the node's lock, on the driving thread ----------------------------------------------------

    def expects(self, source: NodeId, number: int) -> str | None:
        """A large call is announced. None: it has a place; else it was turned away, for this reason."""
        if (source, number) in self._jobs:
            return "this call is here already"
        if len(self._jobs) >= self._limit:
            self._turn_away(source, number)
            return _FULL
        self._jobs[source, number] = Job(source, number, self._values)
        return None

    def called(self, source: NodeId, number: int, row: memoryview) -> None:
        """A call has arrived, or the word that one is withdrawn."""
        job = self._jobs.get((source, number))
        try:
            body = decode(row)
            if not body.is_call:
                raise ValueError(f"an answer ({body.what.name}) instead of a call")
        except ValueError as error:
            self._jobs.pop((source, number), None)
            self._answer(source, number, raised(error))
            return
        if body.what == What.WITHDRAW:
            if job is not None:
                self._abandon(job)
        elif job is None or (job.function is None and not job.abandoned):
            self._take(source, number, job, body)
        elif job.abandoned:
            del self._jobs[source, number]  # withdrawn while it was on its way

    def _take(self, source: NodeId, number: int, job: Job | None, body: Body) -> None:
        """`job`: whose place it has; None: it has none yet."""
        function = self._registry.find(body.function)
        if function is None:
            self._jobs.pop((source, number), None)
            self._answer(source, number, encode(Body(What.UNKNOWN, "\n".join(self._registry.names()))))
            return
        if job is None:
            if len(self._jobs) >= self._limit:
                self._turn_away(source, number)
                return
            job = self._jobs[source, number] = Job(source, number, self._values)
        job.bring(function, body)
        self._outbox.add(self._begin, job, function)

    def missed(self, source: NodeId, number: int, error: BaseException) -> None:
        """A call that has a place was announced, and did not come."""
        job = self._jobs.pop((source, number), None)
        if job is not None and not job.abandoned:
            self._answer(source, number, raised(error))

    def lost(self, source: NodeId) -> None:
        """Nobody is there any more to hear answers."""
        for job in [job for job in self._jobs.values() if job.source == source]:
            self._abandon(job)

    def end(self, reason: str) -> None:
        """Every caller that waits is told, and every function that can be is cancelled."""
        for job in list(self._jobs.values()):
            if not job.abandoned:
                self._answer(job.source, job.number, cancelled(reason))
                self._abandon(job)
        self._outbox.add(self.tell)

    def _abandon(self, job: Job) -> None:
        job.abandoned = True
        if self._loop is not None:
            self._loop.soon(_cancel, job)

    def _turn_away(self, source: NodeId, number: int) -> None:
        self._answer(source, number, encode(Body(What.OVERLOADED, number=self._limit)))

    def _answer(self, source: NodeId, number: int, row: memoryview) -> None:
        self._outbox.add(self._post.answer, source, ANSWER, number, row)

    # -- running: without the lock ---------------------------------------------------------------------

    def _begin(self, job: Job, function: Function) -> None:
        if not function.asynchronous:
            self._pool.submit(partial(self._run, job))
        else:
            self._hand_to_loop(job, None)

    def _hand_to_loop(self, job: Job, begun: Coroutine[Any, Any, Any] | None) -> None:
        with self._making:
            if self._loop is None and not self._closed:
                self._loop = Loop(f"{self._name}-async-calls")
            loop = self._loop
        if loop is not None:
            loop.soon(self._start, loop, job, begun)
        elif begun is not None:
            begun.close()

    def _run(self, job: Job) -> None:
        """In a thread of the pool."""
        if job.over:
            self._finish(job, EXPIRED)
            return
        try:
            value = job.run()
            if inspect.iscoroutine(value):  # of a function that does not look like what it is
                self._hand_to_loop(job, value)
                return
            row = job.returned(value)
        except BaseException as error:  # noqa: BLE001 - whatever it raises is its caller's
            row = raised(_without_us(error))
        self._finish(job, row)
        self._post.leave()

    def _start(self, loop: Loop, job: Job, begun: Coroutine[Any, Any, Any] | None) -> None:
        """In the loop's thread."""
        job.task = loop.start(self._run_async(job, begun), partial(self._ended, job, begun))
        if job.abandoned:
            job.task.cancel()

    async def _run_async(self, job: Job, begun: Coroutine[Any, Any, Any] | None) -> memoryview:
        try:
            async with asyncio.timeout(job.deadline - monotonic()) as limit:
                return job.returned(await (job.run() if begun is None else begun))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it raises is its caller's
            late = isinstance(error, TimeoutError) and limit.expired()
            return EXPIRED if late else raised(_without_us(error))

    def _ended(self, job: Job, begun: Coroutine[Any, Any, Any] | None, task: asyncio.Task[memoryview]) -> None:
        """In the loop's thread. A task that was cancelled before its first step has run nothing of the above."""
        if begun is not None:
            begun.close()
        self._finish(job, cancelled("the function was cancelled there") if task.cancelled() else task.result())

    def _finish(self, job: Job, row: memoryview) -> None:
        with self._lock:
            self._jobs.pop((job.source, job.number), None)
        if not job.abandoned:
            self._post.answer(job.source, ANSWER, job.number, row)

    # -- the end ---------------------------------------------------------------------------------------

    def tell(self) -> None:
        """Its threads end when what they run has ended. Never blocks. Idempotent."""
        with self._making:
            self._closed = True
            loop = self._loop
        self._pool.tell()
        if loop is not None:
            loop.tell()

    def close(self) -> None:
        """Wait a moment for what runs; the log tells of what goes on nevertheless. Idempotent."""
        self.tell()
        self._pool.close(_PATIENCE)
        if self._loop is not None:
            self._loop.close(_PATIENCE)


def _cancel(job: Job) -> None:
    """In the loop's thread. A task that has not begun yet sees for itself that it is abandoned."""
    if job.task is not None:
        job.task.cancel()


def _without_us(error: BaseException) -> BaseException:
    """Its traceback begins in the function, where there is one."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_globals.get("__name__", "").startswith("nexar.rpc."):
        found = found.tb_next
    return error.with_traceback(found) if found is not None else error
