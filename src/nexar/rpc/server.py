"""The serving side: accepts calls, refuses those above the limit, runs functions and answers.

Invariant: every call that arrives is answered once, unless its caller withdrew it or is gone. A call holds a place from
its arrival (a large one: its announcement) until its function has ended. The place is free before the answer is sent,
so a sequential caller never finds its own place taken.
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
    """A call, which holds a place until its answer."""

    __slots__ = ("_body", "_values", "abandoned", "deadline", "function", "number", "source", "task")

    def __init__(self, source: NodeId, number: int, values: ValueCodec) -> None:
        self.source = source
        self.number = number
        self._values = values
        self._body = Body(BodyKind.CALL)
        self.function: ServedFunction | None = None  # None until the body has arrived
        self.deadline = 0.0  # of time.monotonic; set with the function
        self.abandoned = False  # nobody waits for the answer; written under the node's lock
        self.task: asyncio.Task[memoryview] | None = None  # used by the loop's thread only

    def set_work(self, function: ServedFunction, body: Body) -> None:
        """Called before any thread runs it."""
        self.function = function
        self._body = body
        self.deadline = monotonic() + body.seconds

    @property
    def over(self) -> bool:
        return self.abandoned or monotonic() >= self.deadline

    def run(self) -> Any:
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
        assert self.function is not None
        pickle = self._body.pickled and self.function.pickle
        pieces = self._values.encode(value, pickle=pickle)
        try:
            return encode(Body(BodyKind.RETURNED, pieces=pieces, pickled=pickle))
        except ValueError as error:
            raise UsageError(f"the result of {self.function.name} takes {error}; send large arrays") from error


def raised_answer(error: BaseException) -> memoryview:
    """Answer with an exception."""
    return encode(Body(BodyKind.RAISED, "".join(traceback.format_exception(error))))


def cancelled_answer(reason: str) -> memoryview:
    """Answer of a cancelled call."""
    return encode(Body(BodyKind.CANCELLED, reason))


_log = logging.getLogger(__name__)


class WorkerPool:
    """Daemon threads for user functions: the driver must never run one, and a function that never returns must not keep
    the process alive.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []  # under the lock
        self._free = 0  # idle threads; under the lock
        self._closed = False  # under the lock

    def submit(self, task: Callable[[], None]) -> None:
        """Runs at once below the limit. The task must not raise. Dropped after `close`."""
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
            del task  # its references must not live until the next task
            with self._lock:
                self._free += 1

    def stop(self) -> None:
        """Threads end when their task returns. Never blocks. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in self._threads:
                self._tasks.put(None)

    def close(self, timeout: float) -> None:
        """Wait up to `timeout` seconds and log the threads that still run. Idempotent."""
        self.stop()
        deadline = monotonic() + timeout
        others = [each for each in self._threads if each is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, deadline - monotonic()))
        late = [each.name for each in others if each.is_alive()]
        if late:
            _log.warning(
                "remote functions did not return within %s after the end of their communicator; "
                "they continue in %s and their results are dropped",
                format_seconds(timeout), ", ".join(late),
            )  # fmt: skip


T = TypeVar("T")

_CANCEL_TIMEOUT: Final = 1.0  # seconds for cancelled tasks to end


class AsyncThread:
    """A thread with an asyncio loop, for `async def` functions."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()  # used by the loop's thread only
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call_soon(self, act: Callable[..., None], *facts: Any) -> None:
        """Any thread; never blocks. Dropped once the loop has ended."""
        with suppress(RuntimeError):  # the loop is closed: its calls are over
            self._loop.call_soon_threadsafe(act, *facts)

    def start(self, work: Coroutine[Any, Any, T], ended: Callable[[asyncio.Task[T]], None]) -> asyncio.Task[T]:
        """Call it in the loop's thread. Keeps the task until it is done, then calls `ended`."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(ended)
        return task

    def stop(self) -> None:
        """Cancel every task, then end. Never blocks. Idempotent."""
        self.call_soon(self._ending.set)

    def close(self, timeout: float) -> None:
        """Wait up to `timeout` seconds. Idempotent."""
        self.stop()
        if self._thread is threading.current_thread():
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            _log.warning(
                "remote async functions did not end within %s after the end of their communicator, "
                "although they were cancelled; %s continues", format_seconds(timeout), self._thread.name,
            )  # fmt: skip

    def _run(self) -> None:
        # A function that stops the loop or raises SystemExit does not end the others.
        end = self._loop.create_task(self._until_stopped())
        end.add_done_callback(lambda _: self._loop.stop())
        try:
            while not end.done():
                with suppress(SystemExit, KeyboardInterrupt):  # its task has it too, and answers the caller
                    self._loop.run_forever()
            end.result()
        finally:
            self._loop.close()

    async def _until_stopped(self) -> None:
        await self._ending.wait()
        mine = asyncio.current_task()
        left = [task for task in asyncio.all_tasks() if task is not mine]  # also tasks that the functions started
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_CANCEL_TIMEOUT)
        ending = [asyncio.ensure_future(self._loop.shutdown_asyncgens())]
        ending.append(asyncio.ensure_future(self._loop.shutdown_default_executor()))
        await asyncio.wait(ending, timeout=_CANCEL_TIMEOUT)


_CLOSE_TIMEOUT: Final = 2.0  # seconds that closing waits for running functions
_FULL: Final = "the limit of concurrent calls is reached"


class Server:
    """Serves one communicator. Close it without the node's lock."""

    def __init__(
        self, lock: threading.Lock, deferred_io: DeferredIO, sender: CallSender, values: ValueCodec, registry: Registry,
        *, limit: int, name: str,
    ) -> None:  # fmt: skip
        """`lock`: the node's. `limit`: concurrent calls."""
        self._lock = lock
        self._deferred_io = deferred_io
        self._sender = sender
        self._values = values
        self._registry = registry
        self._limit = limit
        self._name = name
        self._calls: dict[tuple[NodeId, int], ServedCall] = {}  # by caller and its number; under the lock
        self._pool = WorkerPool(f"{name}-call", limit)
        self._loop_lock = threading.Lock()
        self._loop: AsyncThread | None = None  # created by the first async call; under `_loop_lock`
        self._closed = False  # written under `_loop_lock`

    # -- under the node's lock, on the driving thread ----------------------------------------------------

    def expects(self, source: NodeId, number: int) -> str | None:
        """Why the announced call has no place, if so."""
        if (source, number) in self._calls:
            return "this call has already arrived"
        if len(self._calls) >= self._limit:
            self._reject(source, number)
            return _FULL
        self._calls[source, number] = ServedCall(source, number, self._values)
        return None

    def called(self, source: NodeId, number: int, row: memoryview) -> None:
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
            self._accept(source, number, call, body)
        elif call.abandoned:
            del self._calls[source, number]  # withdrawn before its body arrived

    def _accept(self, source: NodeId, number: int, call: ServedCall | None, body: Body) -> None:
        # `call` holds a place already; None: it needs one.
        function = self._registry.find(body.function)
        if function is None:
            self._calls.pop((source, number), None)
            self._answer(source, number, encode(Body(BodyKind.UNKNOWN, "\n".join(self._registry.names()))))
            return
        if call is None:
            if len(self._calls) >= self._limit:
                self._reject(source, number)
                return
            call = self._calls[source, number] = ServedCall(source, number, self._values)
        call.set_work(function, body)
        self._deferred_io.add(self._begin, call, function)

    def missed(self, source: NodeId, number: int, error: BaseException) -> None:
        call = self._calls.pop((source, number), None)
        if call is not None and not call.abandoned:
            self._answer(source, number, raised_answer(error))

    def lost(self, source: NodeId) -> None:
        for call in [call for call in self._calls.values() if call.source == source]:
            self._abandon(call)

    def end(self, reason: str) -> None:
        """Answers every waiting caller."""
        for call in list(self._calls.values()):
            if not call.abandoned:
                self._answer(call.source, call.number, cancelled_answer(reason))
                self._abandon(call)
        self._deferred_io.add(self.stop)

    def _abandon(self, call: ServedCall) -> None:
        call.abandoned = True
        if self._loop is not None:
            self._loop.call_soon(_cancel, call)

    def _reject(self, source: NodeId, number: int) -> None:
        self._answer(source, number, encode(Body(BodyKind.OVERLOADED, number=self._limit)))

    def _answer(self, source: NodeId, number: int, row: memoryview) -> None:
        self._deferred_io.add(self._sender.answer, source, ANSWER, number, row)

    # -- running: without the lock ---------------------------------------------------------------------

    def _begin(self, call: ServedCall, function: ServedFunction) -> None:
        if not function.asynchronous:
            self._pool.submit(partial(self._run, call))
        else:
            self._run_in_loop(call, None)

    def _run_in_loop(self, call: ServedCall, coroutine: Coroutine[Any, Any, Any] | None) -> None:
        with self._loop_lock:
            if self._loop is None and not self._closed:
                self._loop = AsyncThread(f"{self._name}-async-calls")
            loop = self._loop
        if loop is not None:
            loop.call_soon(self._start, loop, call, coroutine)
        elif coroutine is not None:
            coroutine.close()

    def _run(self, call: ServedCall) -> None:
        # In a thread of the pool.
        if call.over:
            self._finish(call, EXPIRED)
            return
        try:
            value = call.run()
            if inspect.iscoroutine(value):  # the function is asynchronous without `async def`
                self._run_in_loop(call, value)
                return
            row = call.returned(value)
        except BaseException as error:  # noqa: BLE001 - whatever it raises is its caller's
            row = raised_answer(_user_traceback(error))
        self._finish(call, row)
        self._sender.function_ended()

    def _start(self, loop: AsyncThread, call: ServedCall, coroutine: Coroutine[Any, Any, Any] | None) -> None:
        # In the loop's thread.
        call.task = loop.start(self._run_async(call, coroutine), partial(self._task_ended, call, coroutine))
        if call.abandoned:
            call.task.cancel()

    async def _run_async(self, call: ServedCall, coroutine: Coroutine[Any, Any, Any] | None) -> memoryview:
        try:
            async with asyncio.timeout(call.deadline - monotonic()) as limit:
                return call.returned(await (call.run() if coroutine is None else coroutine))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it raises is its caller's
            late = isinstance(error, TimeoutError) and limit.expired()
            return EXPIRED if late else raised_answer(_user_traceback(error))

    def _task_ended(
        self, call: ServedCall, coroutine: Coroutine[Any, Any, Any] | None, task: asyncio.Task[memoryview]
    ) -> None:
        # In the loop's thread. A task cancelled before its first step has run nothing of `_run_async`.
        if coroutine is not None:
            coroutine.close()
        self._finish(call, cancelled_answer("the function was cancelled there") if task.cancelled() else task.result())

    def _finish(self, call: ServedCall, row: memoryview) -> None:
        with self._lock:
            self._calls.pop((call.source, call.number), None)
        if not call.abandoned:
            self._sender.answer(call.source, ANSWER, call.number, row)

    # -- the end ---------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Threads end after their running calls. Never blocks. Idempotent."""
        with self._loop_lock:
            self._closed = True
            loop = self._loop
        self._pool.stop()
        if loop is not None:
            loop.stop()

    def close(self) -> None:
        """Wait up to _CLOSE_TIMEOUT; log functions that continue. Idempotent."""
        self.stop()
        self._pool.close(_CLOSE_TIMEOUT)
        if self._loop is not None:
            self._loop.close(_CLOSE_TIMEOUT)


def _cancel(call: ServedCall) -> None:
    # In the loop's thread. A task not yet created checks `abandoned` itself.
    if call.task is not None:
        call.task.cancel()


def _user_traceback(error: BaseException) -> BaseException:
    # The error with a traceback that begins in the user's function, if it reached it.
    found = error.__traceback__
    while found is not None and found.tb_frame.f_globals.get("__name__", "").startswith("nexar.rpc."):
        found = found.tb_next
    return error.with_traceback(found) if found is not None else error
