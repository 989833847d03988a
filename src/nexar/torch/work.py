"""torch's handles for calls, and the threads that complete their futures.

The thread that completes a future runs its callbacks, which are user code and may wait for another future. So the
driver must not complete futures, and before a thread runs a task, it ensures that another waits for the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from nexar.communicator.request import Request, wait_all
from nexar.torch.tensors import ReceivedTensors

_MAX_IDLE: Final = 2  # idle threads that are kept, so that tasks that do not wait start no thread

Task = Callable[[], None]


class CompletionThreads:
    """Runs each task at once in its own thread."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()  # None: the end; each thread passes it on
        self._lock = threading.Lock()
        self._idle = 0  # waiting threads; guarded by the lock
        self._threads: set[threading.Thread] = set()  # all running threads; guarded by the lock

    def hand_over(self, task: Task) -> None:
        """Never blocks, takes no lock. Call `open()` first."""
        self._tasks.put(task)

    def open(self) -> None:
        if self._idle == 0:
            self._start_one()

    def close(self) -> None:
        """Waits for all tasks except the calling thread's."""
        self._tasks.put(None)
        while others := self._others():
            for thread in others:
                thread.join()

    def _others(self) -> list[threading.Thread]:
        """A forked child lists its parent's threads, which are dead there."""
        with self._lock:
            return [each for each in self._threads if each.is_alive() and each is not threading.current_thread()]

    def _start_one(self) -> None:
        with self._lock:
            if self._idle:
                return
            self._idle += 1
            thread = threading.Thread(target=self._serve, name="nexar-torch-futures", daemon=True)
            self._threads.add(thread)
            thread.start()  # under the lock: a listed thread can be joined

    def _serve(self) -> None:
        try:
            while True:
                task = self._tasks.get()
                with self._lock:
                    self._idle -= 1
                if task is None:
                    self._tasks.put(None)
                    return
                self._start_one()
                task()
                with self._lock:
                    if self._idle >= _MAX_IDLE:
                        return
                    self._idle += 1
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())


_NO_SOURCE = -1


class DoneWork(Work):
    """A call that succeeded before it returned."""

    __slots__ = ("_result_of", "_sequence")

    def __init__(self, result: Any, sequence: int) -> None:
        Work.__init__(self)
        self._result_of = result
        self._sequence = sequence

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def result(self) -> Any:
        return self._result_of

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._result_of)
        return future

    def _get_sequence_number(self) -> int:
        return self._sequence


class PendingWork(Work):
    """A call in flight.

    Invariant: the first thread that sees that the call has ended completes its future, exactly once.

    `wait` raises the call's error unchanged. A future carries only the text, and C++ code such as DDP sees nothing. So
    if a future is requested during a backward pass, the end of that pass waits for the call and raises its error.
    """

    def __init__(self, requests: Sequence[Request], result: Any, sequence: int, completion: CompletionThreads) -> None:
        super().__init__()
        self._requests = requests
        self._result_of = result
        self._sequence = sequence
        self._completion = completion
        self._lock = threading.Lock()
        self._trigger: Future[None] | None = None  # completing it completes the future; guarded by the lock
        self._future: Future[Any] | None = None  # guarded by the lock
        self._missing = 0  # unfinished requests, once there is a future; guarded by the node's lock

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises the call's error, or OperationTimeout after `timeout`; the call then continues."""
        seconds = 0.0 if timeout is None else timeout.total_seconds()
        try:
            if len(self._requests) == 1:
                self._requests[0].wait(seconds if seconds > 0 else None)
            else:
                wait_all(self._requests, seconds if seconds > 0 else None)
        finally:
            if self._trigger is not None and self.is_completed():
                self._complete()
        return True

    def is_completed(self) -> bool:
        return all(request.done() for request in self._requests)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        if not self.is_completed():
            return None
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001  # returned to the caller
            return error
        return None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self._result_of

    def _source_rank(self) -> int:
        """Blocks."""
        self.wait()
        return self._result_of.source if isinstance(self._result_of, ReceivedTensors) else _NO_SOURCE

    def _get_sequence_number(self) -> int:
        return self._sequence

    def get_future(self) -> Future[Any]:
        with self._lock:
            if self._future is not None:
                return self._future
            self._trigger = Future()
            # C++ does not see set_exception(), but it sees an exception of a callback.
            self._future = future = self._trigger.then(self._outcome)
        if not self.is_success() and torch._C._current_graph_task_id() >= 0:
            torch.autograd.Variable._execution_engine.queue_callback(self._at_the_end_of_backward)
        if self.is_completed():
            self._complete()
        else:
            self._watch()
        return future

    def _watch(self) -> None:
        self._completion.open()
        self._missing = len(self._requests)
        for request in self._requests:
            request.when_done(self._count)

    def _count(self) -> None:
        """Under the node's lock."""
        self._missing -= 1
        if not self._missing:
            self._completion.hand_over(self._complete)

    def _at_the_end_of_backward(self) -> None:
        """Completes the future before DDP's callback, queued later, waits for it."""
        self.wait()
        self._complete()

    def _complete(self) -> None:
        with self._lock:
            trigger, self._trigger = self._trigger, None
        if trigger is not None:
            trigger.set_result(None)

    def _outcome(self, _: Future[None]) -> Any:
        self.wait()
        return self._result_of
