"""The threads that tell torch's futures that their work is done.

What hangs on a future runs in the thread that completes it: code of the user's, which may compute, and may wait for
another future. So it must not be the thread that drives the node, and there must always be one more thread than there
are that wait. A thread takes one finished work at a time; before it goes on with it, it sees to it that another one is
there for the next.

torch's handle of a call, for calls that are done and for calls in flight.
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

_IDLE: Final = 2  # threads kept while nothing is to be done: none has to be started then for work that does not wait

Task = Callable[[], None]


class CompletionThreads:
    """Runs tasks, each at once and in a thread of its own. Whoever made it closes it."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()  # None: the end, which each thread leaves for the next
        self._lock = threading.Lock()
        self._idle = 0  # threads that wait for a task; under the lock
        self._threads: set[threading.Thread] = set()  # all that live; under the lock

    def hand_over(self, task: Task) -> None:
        """Never blocks, and takes no lock: from any thread, whatever it holds. `open()` was called before."""
        self._tasks.put(task)

    def open(self) -> None:
        """Have a thread ready for what will be handed over."""
        if self._idle == 0:
            self._start_one()

    def close(self) -> None:
        """What was handed over before is still done; wait for it, but not for the thread that calls this."""
        self._tasks.put(None)
        while others := self._others():
            for thread in others:
                thread.join()

    def _others(self) -> list[threading.Thread]:
        """Those that live: a forked child has none of its parent's threads, and nobody there takes them off the set."""
        with self._lock:
            return [each for each in self._threads if each.is_alive() and each is not threading.current_thread()]

    def _start_one(self) -> None:
        with self._lock:
            if self._idle:
                return
            self._idle += 1
            thread = threading.Thread(target=self._serve, name="nexar-torch-futures", daemon=True)
            self._threads.add(thread)
            thread.start()  # here, so that nobody sees a thread that cannot be joined yet

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
                    if self._idle >= _IDLE:
                        return
                    self._idle += 1
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())


_NOBODY = -1


class DoneWork(Work):
    """A call that has ended well before it returned. Made for each small call, so it is kept light."""

    __slots__ = ("_result_of", "_sequence")

    def __init__(self, result: Any, sequence: int) -> None:
        Work.__init__(self)
        self._result_of = result
        self._sequence = sequence

    def wait(self, timeout: timedelta | None = None) -> bool:
        """At once."""
        return True

    def is_completed(self) -> bool:
        """Yes."""
        return True

    def is_success(self) -> bool:
        """Yes."""
        return True

    def exception(self) -> None:
        """None."""

    def synchronize(self) -> None:
        """Nothing is left to be done."""

    def result(self) -> Any:
        """The tensors that hold it."""
        return self._result_of

    def get_future(self) -> Future[Any]:
        """One that is done."""
        future: Future[Any] = Future()
        future.set_result(self._result_of)
        return future

    def _get_sequence_number(self) -> int:
        return self._sequence


class PendingWork(Work):
    """A call in flight. Law: its future is completed exactly once, by the first of those who see that it has ended.

    An error is raised by `wait`, as it is. Through a future it comes as a RuntimeError that has its text: torch cannot
    carry more there. Code in C++ that waits for the future (DDP does) sees neither; so a call whose future is asked for
    during a backward pass is also waited for at the end of that pass, where an error comes out as it is. That holds for
    a call that has failed already, too: whether it fails before or after its future is asked for is chance.
    """

    def __init__(self, requests: Sequence[Request], result: Any, sequence: int, completion: CompletionThreads) -> None:
        super().__init__()
        self._requests = requests
        self._result_of = result
        self._sequence = sequence
        self._completion = completion
        self._lock = threading.Lock()
        self._trigger: Future[None] | None = None  # completing it completes the future; under the lock
        self._future: Future[Any] | None = None  # under the lock
        self._missing = 0  # requests that have not ended, once there is a future; under the node's lock

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is done; its error is raised. OperationTimeout after `timeout`: it goes on."""
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
        """Has it ended, well or not?"""
        return all(request.done() for request in self._requests)

    def is_success(self) -> bool:
        """Has it ended well?"""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Its error; None while it has none."""
        if not self.is_completed():
            return None
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001  # to be looked at
            return error
        return None

    def synchronize(self) -> None:
        """As wait."""
        self.wait()

    def result(self) -> Any:
        """The tensors that hold it, once it is done."""
        return self._result_of

    def _source_rank(self) -> int:
        """Who sent what was received. Waits for it."""
        self.wait()
        return self._result_of.source if isinstance(self._result_of, ReceivedTensors) else _NOBODY

    def _get_sequence_number(self) -> int:
        return self._sequence

    def get_future(self) -> Future[Any]:
        """Completed with the tensors, or with the error."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._trigger = Future()
            # set_exception() would be invisible to C++; what a callback raises is not.
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
        """Before DDP waits for the future: its callback is queued after ours."""
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
