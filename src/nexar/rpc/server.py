"""One call that this rank runs for another.

Threads that run functions of the user's: never the driving thread, which everything else waits for.

A thread with an asyncio loop, for functions that are `async def`.

The serving side: takes calls in, turns those away that are too many, and answers all of them.

Law: every call that arrives is answered once, unless its caller has withdrawn it or is gone. A call has a place from
its arrival (a large one: from when it was announced) until its function has ended; the place is free before the answer
leaves, so that who calls one after the other never finds its own place taken.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any, Final, TypeVar

from nexar.errors import UsageError
from nexar.links.operation import DeferredIO
from nexar.rpc.call_channel import ANSWER, CallSender
from nexar.rpc.caller import ValueCodec
from nexar.rpc.registry import Registry, ServedFunction
from nexar.types import NodeId, format_seconds
from nexar.wire.rpc import Body, BodyKind, decode, encode

EXPIRED: Final = encode(Body(BodyKind.EXPIRED))


class ServedCall:
    """Holds one of the places that calls have, from its arrival to its answer."""

    __slots__ = ("_body", "_values", "abandoned", "deadline", "function", "number", "source", "task")

    def __init__(self, source: NodeId, number: int, values: ValueCodec) -> None:
        self.source = source
        self.number = number
        self._values = values
        self._body = Body(BodyKind.CALL)
        self.function: ServedFunction | None = None  # set with the body; None while that is still on its way
        self.deadline = 0.0  # of time.monotonic; likewise
        self.abandoned = False  # nobody waits for the answer; written under the node's lock
        self.task: asyncio.Task[memoryview] | None = None  # of the loop's thread

    def bring(self, function: ServedFunction, body: Body) -> None:
        """What is to be done. By who takes the call in, before anybody runs it."""
        self.function = function
        self._body = body
        self.deadline = monotonic() + body.seconds

    @property
    def over(self) -> bool:
        """Nobody would hear the answer."""
        return self.abandoned or monotonic() >= self.deadline

    def run(self) -> Any:
        """Call the function: what it gives. Raises whatever it raises."""
        assert self.function is not None
        arguments, named = self._arguments(self.function)
        self._body = self._body._replace(pieces=())
        return self.function.run(*arguments, **named)

    def _arguments(self, function: ServedFunction) -> tuple[list[Any], dict[str, Any]]:
        body = self._body
        if body.pickled and not function.pickle:
            raise UsageError(
                f"the arguments of {function.name} were pickled, and reading them would run code of the caller's "
                "choice; call it without pickle=True, or serve it with pickle=True if you trust its callers"
            )
        arguments, named = self._values.decode(body.pieces, pickle=function.pickle)
        return arguments, named

    def returned(self, value: Any) -> memoryview:
        """The answer that carries this. Raises if it cannot be sent."""
        assert self.function is not None
        pickle = self._body.pickled and self.function.pickle
        pieces = self._values.encode(value, pickle=pickle)
        try:
            return encode(Body(BodyKind.RETURNED, pieces=pieces, pickled=pickle))
        except ValueError as error:
            raise UsageError(f"the result of {self.function.name} takes {error}; send large arrays") from error


def raised_answer(error: BaseException) -> memoryview:
    """The answer of a call that ended with this."""
    return encode(Body(BodyKind.RAISED, "".join(traceback.format_exception(error))))


def cancelled_answer(reason: str) -> memoryview:
    """The answer of a call that was cancelled here."""
    return encode(Body(BodyKind.CANCELLED, reason))


_log = logging.getLogger(__name__)


class WorkerPool:
    """Threads of one communicator, made when they are needed. Close it: each ends as soon as what it runs returns.

    They are daemons: a function that never returns must not keep the process from ending.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []  # under the lock
        self._free = 0  # threads that nothing was handed to; under the lock
        self._closed = False  # under the lock

    def submit(self, task: Callable[[], None]) -> None:
        """A thread runs it, at once while there are fewer than the limit. It must not raise. After `close`: dropped."""
        with self._lock:
            if self._closed:
                return
            if self._free:
                self._free -= 1
            elif len(self._threads) < self._limit:
                self._start()
            self._tasks.put(task)

    def _start(self) -> None:
        number = len(self._threads) + 1
        thread = threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # what it holds must not live until the next one comes
            with self._lock:
                self._free += 1

    def tell(self) -> None:
        """Every thread ends when what it runs has returned. Never blocks. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in self._threads:
                self._tasks.put(None)

    def close(self, patience: float) -> None:
        """Tell, and wait for them for so many seconds; the log names those that are still at it. Idempotent."""
        self.tell()
        deadline = monotonic() + patience
        others = [each for each in self._threads if each is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, deadline - monotonic()))
        late = [each.name for each in others if each.is_alive()]
        if late:
            _log.warning(
                "functions that others called have not returned within %s of the end of their communicator; "
                "they go on in %s, and nobody hears of their results",
                format_seconds(patience), ", ".join(late),
            )  # fmt: skip


T = TypeVar("T")

_LONGEST_END: Final = 1.0  # seconds that cancelled tasks have to end


class AsyncThread:
    """One thread. Close it: its tasks are cancelled first."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()  # of the loop's thread
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def soon(self, act: Callable[..., None], *facts: Any) -> None:
        """Run it in the loop's thread. From any thread; never blocks. Dropped once the loop has ended."""
        with suppress(RuntimeError):  # closed: whatever it concerned is over
            self._loop.call_soon_threadsafe(act, *facts)

    def start(self, work: Coroutine[Any, Any, T], ended: Callable[[asyncio.Task[T]], None]) -> asyncio.Task[T]:
        """In the loop's thread. The task is kept until it is done; then `ended` is told."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(ended)
        return task

    def tell(self) -> None:
        """Cancel every task, then end. Never blocks. Idempotent."""
        self.soon(self._ending.set)

    def close(self, patience: float) -> None:
        """Tell, and wait for the thread for so many seconds. Idempotent."""
        self.tell()
        if self._thread is threading.current_thread():
            return
        self._thread.join(patience)
        if self._thread.is_alive():
            _log.warning(
                "async functions that others called have not ended within %s of the end of their communicator, "
                "although they were cancelled; %s goes on", format_seconds(patience), self._thread.name,
            )  # fmt: skip

    def _run(self) -> None:
        """A function that stops the loop, or wants to end the process, does not end the others."""
        end = self._loop.create_task(self._until_told())
        end.add_done_callback(lambda _: self._loop.stop())
        try:
            while not end.done():
                with suppress(SystemExit, KeyboardInterrupt):  # its task has it, too, and its caller is told
                    self._loop.run_forever()
            end.result()
        finally:
            self._loop.close()

    async def _until_told(self) -> None:
        await self._ending.wait()
        mine = asyncio.current_task()
        left = [task for task in asyncio.all_tasks() if task is not mine]  # with what the functions have started
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_LONGEST_END)
        ending = [asyncio.ensure_future(self._loop.shutdown_asyncgens())]
        ending.append(asyncio.ensure_future(self._loop.shutdown_default_executor()))
        await asyncio.wait(ending, timeout=_LONGEST_END)


_CLOSE_TIMEOUT: Final = 2.0
"""Seconds for which closing waits for functions that run."""
_FULL: Final = "as many calls run as are allowed"


class Server:
    """Of one communicator. Close it, without the node's lock."""

    def __init__(
        self, lock: threading.Lock, deferred_io: DeferredIO, post: CallSender, values: ValueCodec, registry: Registry,
        *, limit: int, name: str,
    ) -> None:  # fmt: skip
        """`lock`: the node's. `limit`: calls that run at once. `name`: of its threads."""
        self._lock = lock
        self._deferred_io = deferred_io
        self._post = post
        self._values = values
        self._registry = registry
        self._limit = limit
        self._name = name
        self._calls: dict[tuple[NodeId, int], ServedCall] = {}  # by caller and its number; under the lock
        self._pool = WorkerPool(f"{name}-call", limit)
        self._making = threading.Lock()
        self._loop: AsyncThread | None = None  # made with the first async function that is called; under `_making`
        self._closed = False  # written under `_making`

    # -- under the node's lock, on the driving thread ----------------------------------------------------

    def expects(self, source: NodeId, number: int) -> str | None:
        """A large call is announced. None: it has a place; else it was turned away, for this reason."""
        if (source, number) in self._calls:
            return "this call is here already"
        if len(self._calls) >= self._limit:
            self._turn_away(source, number)
            return _FULL
        self._calls[source, number] = ServedCall(source, number, self._values)
        return None

    def called(self, source: NodeId, number: int, row: memoryview) -> None:
        """A call has arrived, or the word that one is withdrawn."""
        call = self._calls.get((source, number))
        try:
            body = decode(row)
            if not body.is_call:
                raise ValueError(f"an answer ({body.what.name}) instead of a call")
        except ValueError as error:
            self._calls.pop((source, number), None)
            self._answer(source, number, raised_answer(error))
            return
        if body.what == BodyKind.WITHDRAW:
            if call is not None:
                self._abandon(call)
        elif call is None or (call.function is None and not call.abandoned):
            self._take(source, number, call, body)
        elif call.abandoned:
            del self._calls[source, number]  # withdrawn while it was on its way

    def _take(self, source: NodeId, number: int, call: ServedCall | None, body: Body) -> None:
        """`job`: whose place it has; None: it has none yet."""
        function = self._registry.find(body.function)
        if function is None:
            self._calls.pop((source, number), None)
            self._answer(source, number, encode(Body(BodyKind.UNKNOWN, "\n".join(self._registry.names()))))
            return
        if call is None:
            if len(self._calls) >= self._limit:
                self._turn_away(source, number)
                return
            call = self._calls[source, number] = ServedCall(source, number, self._values)
        call.bring(function, body)
        self._deferred_io.add(self._begin, call, function)

    def missed(self, source: NodeId, number: int, error: BaseException) -> None:
        """A call that has a place was announced, and did not come."""
        call = self._calls.pop((source, number), None)
        if call is not None and not call.abandoned:
            self._answer(source, number, raised_answer(error))

    def lost(self, source: NodeId) -> None:
        """Nobody is there any more to hear answers."""
        for call in [call for call in self._calls.values() if call.source == source]:
            self._abandon(call)

    def end(self, reason: str) -> None:
        """Every caller that waits is told, and every function that can be is cancelled."""
        for call in list(self._calls.values()):
            if not call.abandoned:
                self._answer(call.source, call.number, cancelled_answer(reason))
                self._abandon(call)
        self._deferred_io.add(self.tell)

    def _abandon(self, call: ServedCall) -> None:
        call.abandoned = True
        if self._loop is not None:
            self._loop.soon(_cancel, call)

    def _turn_away(self, source: NodeId, number: int) -> None:
        self._answer(source, number, encode(Body(BodyKind.OVERLOADED, number=self._limit)))

    def _answer(self, source: NodeId, number: int, row: memoryview) -> None:
        self._deferred_io.add(self._post.answer, source, ANSWER, number, row)

    # -- running: without the lock ---------------------------------------------------------------------

    def _begin(self, call: ServedCall, function: ServedFunction) -> None:
        if not function.asynchronous:
            self._pool.submit(partial(self._run, call))
        else:
            self._hand_to_loop(call, None)

    def _hand_to_loop(self, call: ServedCall, begun: Coroutine[Any, Any, Any] | None) -> None:
        with self._making:
            if self._loop is None and not self._closed:
                self._loop = AsyncThread(f"{self._name}-async-calls")
            loop = self._loop
        if loop is not None:
            loop.soon(self._start, loop, call, begun)
        elif begun is not None:
            begun.close()

    def _run(self, call: ServedCall) -> None:
        """In a thread of the pool."""
        if call.over:
            self._finish(call, EXPIRED)
            return
        try:
            value = call.run()
            if inspect.iscoroutine(value):  # of a function that does not look like what it is
                self._hand_to_loop(call, value)
                return
            row = call.returned(value)
        except BaseException as error:  # noqa: BLE001 - whatever it raises is its caller's
            row = raised_answer(_without_us(error))
        self._finish(call, row)
        self._post.leave()

    def _start(self, loop: AsyncThread, call: ServedCall, begun: Coroutine[Any, Any, Any] | None) -> None:
        """In the loop's thread."""
        call.task = loop.start(self._run_async(call, begun), partial(self._ended, call, begun))
        if call.abandoned:
            call.task.cancel()

    async def _run_async(self, call: ServedCall, begun: Coroutine[Any, Any, Any] | None) -> memoryview:
        try:
            async with asyncio.timeout(call.deadline - monotonic()) as limit:
                return call.returned(await (call.run() if begun is None else begun))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it raises is its caller's
            late = isinstance(error, TimeoutError) and limit.expired()
            return EXPIRED if late else raised_answer(_without_us(error))

    def _ended(self, call: ServedCall, begun: Coroutine[Any, Any, Any] | None, task: asyncio.Task[memoryview]) -> None:
        """In the loop's thread. A task that was cancelled before its first step has run nothing of the above."""
        if begun is not None:
            begun.close()
        self._finish(call, cancelled_answer("the function was cancelled there") if task.cancelled() else task.result())

    def _finish(self, call: ServedCall, row: memoryview) -> None:
        with self._lock:
            self._calls.pop((call.source, call.number), None)
        if not call.abandoned:
            self._post.answer(call.source, ANSWER, call.number, row)

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
        self._pool.close(_CLOSE_TIMEOUT)
        if self._loop is not None:
            self._loop.close(_CLOSE_TIMEOUT)


def _cancel(call: ServedCall) -> None:
    """In the loop's thread. A task that has not begun yet sees for itself that it is abandoned."""
    if call.task is not None:
        call.task.cancel()


def _without_us(error: BaseException) -> BaseException:
    """Its traceback begins in the function, where there is one."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_globals.get("__name__", "").startswith("nexar.rpc."):
        found = found.tb_next
    return error.with_traceback(found) if found is not None else error
