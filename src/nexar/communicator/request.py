"""The handle of an operation in flight.

Waits for messages whose sends were started and have not ended. For a node that is about to leave.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from copy import copy
from time import monotonic
from typing import Any, Protocol

from nexar.collectives.requests import DECLARE_AFTER, BackgroundCall, CallRunner
from nexar.errors import Cancelled, NexarError, RpcCancelled, UsageError
from nexar.group import checked_timeout, deadline_after
from nexar.links.link import Link
from nexar.links.link_state import PostedSend
from nexar.links.operation import Operation
from nexar.links.progress import Progress
from nexar.types import NodeId
from nexar.wire.frame import Space

_log = logging.getLogger(__name__)


class ErrorResolver(Protocol):
    """Knows what an error means to the communicator that it came from."""

    def judge(self, error: BaseException) -> BaseException:
        """What is to be raised. May wait until the survivors have agreed."""

    def outcome_after(self, error: BaseException) -> Operation | None:
        """What to wait for before that is known; None: the error is to be raised as it is."""


class Request:
    """One verb that was started: wait for it, await it, or cancel it. May be waited for from several threads.

    Its buffers must be left alone until it is done. A request that is dropped is cancelled. Whoever waits drives; while
    nobody does, the node's progress thread.

    Law: a message is delivered when `wait` or `await` returns it, or `done()` says True. A receive that is cancelled or
    dropped before that gives its message back, and the next receive takes it.
    """

    __slots__ = ("__weakref__", "_delivered", "_judge", "_runner", "_running", "_timeout")

    def __init__(self, runner: CallRunner, running: BackgroundCall, timeout: float, judge: ErrorResolver) -> None:
        """`timeout`: the operation's own. `judge` knows what its error means to the communicator."""
        self._judge = judge
        self._runner = runner
        self._running = running
        self._timeout = timeout
        self._delivered = False  # somebody knows its result, or that it is there

    def done(self) -> bool:
        """Has it ended, well or not? Never blocks. A receive that has is delivered: it cannot be cancelled any more."""
        if not self._running.done:
            return False
        self._deliver()
        return True

    def _deliver(self) -> None:
        """The caller has the result, or knows that it is there: nothing is given back any more."""
        self._delivered = True
        if self._running.done:
            self._running.settle()

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call it once the request has ended, well or not; at once if it has. It is run by whoever ends the request,
        under a lock: it may only hand over. A receive counts as delivered then, and not before: it can be cancelled
        until it has ended.
        """
        running = self._running
        with running.lock:
            running.when_done(running.settle)  # first, so that nobody who is told can lose the message
            running.when_done(callback)

    def wait(self, timeout: float | None = None) -> Any:
        """The verb's result, or its error raised.

        OperationTimeout after `timeout` seconds: the request goes on, and can be waited for again. Without one, the
        operation's own timeout holds: it ends an operation in which nobody makes progress.
        """
        result = self._result(timeout)
        self._deliver()
        return result

    def _result(self, timeout: float | None) -> Any:
        seconds = None if timeout is None else checked_timeout(timeout)
        running = self._running
        if not running.done:
            if seconds is not None:
                self._runner.wait(running, seconds)
            else:
                self._runner.wait_until_done(running, self._timeout, waited=self._waited())
        if running.error is None:
            return running.value()
        raise self._judge.judge(copy(running.error))

    def _waited(self) -> float:
        """How many seconds of the operation's own timeout were over when somebody began to wait: none, where nobody
        else is kept waiting before.
        """
        return 0.0

    def cancel(self) -> bool:
        """Give up: when this returns, its buffers are free. Of a collective the others are told, and raise.

        True: it was cancelled, and `wait` raises Cancelled; a message that had come for it is the next one that a
        receive takes. False: it is done, and `wait` gives its outcome. That is so if it was done() before, and for a
        receive that a later one of the same source and tag has overtaken: to give its message back would change the
        order. This waits for the rest of that message, at most for the operation's own timeout.
        """
        running = self._running
        if not self._delivered and not running.retract():
            self._runner.wait_until_done(running, self._timeout)
        return isinstance(running.error, Cancelled | RpcCancelled)

    def __await__(self) -> Generator[Any, None, Any]:
        """The verb's result. Cancelling the task that awaits it cancels the request."""
        from asyncio import get_running_loop  # noqa: PLC0415 - whoever awaits has it; nobody else pays for it

        loop = get_running_loop()
        running = self._running

        def watch() -> None:
            """The operation's own timeout, judged where it may block."""
            if not running.done:
                loop.run_in_executor(None, self._attend)

        timers = loop.call_later(DECLARE_AFTER, self._declare), loop.call_later(self._timeout, watch)
        try:
            result = yield from running.__await__()
            self._deliver()
        except NexarError as error:
            outcome = self._judge.outcome_after(error)
            if outcome is None:
                raise
            yield from outcome.__await__()  # raises it
            raise
        except BaseException:
            if not self._delivered:  # the task was cancelled, perhaps after the message had come
                running.undo()
            raise
        finally:
            for timer in timers:
                timer.cancel()
        return result

    def _declare(self) -> None:
        if not self._running.done:
            self._runner.declare(self._running.entry)

    def _attend(self) -> None:
        self._runner.wait_until_done(self._running, self._timeout, waited=self._timeout)

    def __del__(self) -> None:
        running = getattr(self, "_running", None)
        if running is None or (running.done and (self._delivered or not running.takes)):
            return
        if not running.done:
            _log.warning("%r was dropped, which cancels it; keep it, and wait for it", self)
        running.drop()

    def __repr__(self) -> str:
        state = "in flight" if not self._running.done else "failed" if self._running.error is not None else "done"
        return f"<nexar.Request {self._running.name}, {state}>"


def wait_all(requests: Iterable[Request], timeout: float | None = None) -> list[Any]:
    """Wait for all of them, also if some fail; their results, in order.

    Then raises the first error, with the others as its `others`. `timeout` is for all together.
    """
    if isinstance(requests, Request):
        raise UsageError("wait_all takes a list of requests, and got one; call its wait()")
    handles: list[Any] = list(requests)
    strangers = [each for each in handles if not isinstance(each, Request)]
    if strangers:
        raise UsageError(f"wait_all takes requests, and got {strangers[0]!r}; start one with comm.start.<verb>(…)")
    deadline = None if timeout is None else deadline_after(checked_timeout(timeout))
    results: list[Any] = []
    errors: list[Exception] = []
    for each in handles:
        try:
            results.append(each._result(_left(deadline)))
        except Exception as error:  # noqa: BLE001  # also those of a user's function; raised below
            errors.append(error)
    if errors:
        raise _first(errors)
    for each in handles:
        each._deliver()
    return results


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(1e-6, deadline - monotonic())


def _first(errors: list[Exception]) -> Exception:
    first, *others = errors
    first.others = others  # type: ignore[attr-defined]
    for other in others:
        first.add_note(f"also: {type(other).__name__}: {other}")
    return first


_Message = tuple[NodeId, int, int, int]
"""Destination, communicator, and what tells messages of one communicator apart."""


def deliver_sends(
    links: Callable[[], Mapping[NodeId, Link]], progress: Progress, deadline: float
) -> Mapping[NodeId, int]:
    """Wait until every message is delivered, or the deadline (time.monotonic) is over.

    Returns how many messages each node did not take. Sends that are not done by then are left as they are. A message in
    parts posts one part after the other, so links are looked at again until none has an unfinished send.
    """
    failed: set[_Message] = set()
    while sends := [send for link in links().values() for send in link.unfinished_sends()]:
        late = False
        for send in sends:
            _wait(send, progress, deadline)
            late = late or not send.done
            if send.error is not None or not send.done:
                failed.add(_message_of(send))
        if late:
            break
    return Counter(node for node, *_ in failed)


def _wait(send: PostedSend, progress: Progress, deadline: float) -> None:
    try:
        progress.wait((send,), deadline, keep=True)
    except NexarError:
        return  # the deadline, or the error of the send: the caller looks at the send


def _message_of(send: PostedSend) -> _Message:
    """All parts of a message have the tag that its first part gave; other messages have a number each."""
    frame = send.frame
    number = frame.tag if frame.space == Space.PART else frame.message
    return frame.destination, frame.communicator, frame.space, number
