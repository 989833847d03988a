"""Requests (handles of non-blocking operations), and the wait for a leaving node's sends."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from copy import copy
from time import monotonic
from typing import TYPE_CHECKING, Any

from nexar.collectives.requests import DECLARE_AFTER, BackgroundCall, CallRunner
from nexar.errors import Cancelled, NexarError, RpcCancelled, UsageError
from nexar.group import checked_timeout, deadline_after
from nexar.links.link import Link
from nexar.links.link_state import PostedSend
from nexar.links.progress import Progress
from nexar.types import NodeId
from nexar.wire.frame import Space

if TYPE_CHECKING:
    from nexar.communicator.successors import ErrorResolver

_log = logging.getLogger(__name__)


class Request:
    """A non-blocking operation: wait for it, await it, or cancel it. Several threads may wait.

    Do not touch its buffers until it is done. Dropping the request cancels it. The node's progress thread advances it
    while no thread waits.

    A message is delivered when `wait` or `await` returns it or `done()` returns True. A receive that is cancelled or
    dropped earlier leaves its message to the next receive.
    """

    __slots__ = ("__weakref__", "_delivered", "_resolver", "_runner", "_running", "_timeout")

    def __init__(self, runner: CallRunner, running: BackgroundCall, timeout: float, resolver: ErrorResolver) -> None:
        self._resolver = resolver
        self._runner = runner
        self._running = running
        self._timeout = timeout
        self._delivered = False  # the caller has the result or knows that it exists

    def done(self) -> bool:
        """Whether the operation has a result or an error. Never blocks. True delivers a receive: it cannot be cancelled
        afterwards.
        """
        if not self._running.done:
            return False
        self._deliver()
        return True

    def _deliver(self) -> None:
        """From now on no message is given back."""
        self._delivered = True
        if self._running.done:
            self._running.settle()

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the request ends, or now if it has ended. The ending thread calls it under a lock: it
        must not block. A receive counts as delivered then.
        """
        running = self._running
        with running.lock:
            running.when_done(running.settle)  # first, so that the callback cannot lose the message
            running.when_done(callback)

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the operation ends; return its result or raise its error.

        Raises OperationTimeout after `timeout` seconds: the request continues, and you can wait again. Without
        `timeout`, only the operation's own timeout without progress applies.
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
        raise self._resolver.resolve_error(copy(running.error))

    def _waited(self) -> float:
        return 0.0

    def cancel(self) -> bool:
        """Cancel the operation and free its buffers. Cancelling a collective makes the other ranks raise.

        True: `wait` raises Cancelled, and the next receive takes a message that had arrived. False: the operation is
        done, and `wait` returns its result. A receive overtaken by a later one of the same source and tag is not
        cancelled, because that would reorder messages: this blocks for the rest of its message, at most for the
        operation's own timeout.
        """
        running = self._running
        if not self._delivered and not running.retract():
            self._runner.wait_until_done(running, self._timeout)
        return isinstance(running.error, Cancelled | RpcCancelled)

    def __await__(self) -> Generator[Any, None, Any]:
        """Return the result. Cancelling the awaiting task cancels the request."""
        from asyncio import get_running_loop  # noqa: PLC0415 - already loaded for callers that await; a cost for others

        loop = get_running_loop()
        running = self._running

        def watch() -> None:
            if not running.done:
                loop.run_in_executor(None, self._check_timeout)

        timers = loop.call_later(DECLARE_AFTER, self._declare), loop.call_later(self._timeout, watch)
        try:
            result = yield from running.__await__()
            self._deliver()
        except NexarError as error:
            outcome = self._resolver.outcome_to_await(error)
            if outcome is None:
                raise
            yield from outcome.__await__()  # raises the outcome
            raise
        except BaseException:
            if not self._delivered:  # the task was cancelled, perhaps after the message arrived
                running.undo()
            raise
        finally:
            for timer in timers:
                timer.cancel()
        return result

    def _declare(self) -> None:
        if not self._running.done:
            self._runner.declare(self._running.entry)

    def _check_timeout(self) -> None:
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
    """Wait for all requests, even if some fail. Returns their results in order.

    Raises the first error; its `others` holds the rest. `timeout` covers all together.
    """
    if isinstance(requests, Request):
        raise UsageError("wait_all takes a list of requests, and got one; call its wait()")
    handles: list[Any] = list(requests)
    invalid = [each for each in handles if not isinstance(each, Request)]
    if invalid:
        raise UsageError(f"wait_all takes requests, and got {invalid[0]!r}; start one with comm.start.<verb>(…)")
    deadline = None if timeout is None else deadline_after(checked_timeout(timeout))
    results: list[Any] = []
    errors: list[Exception] = []
    for each in handles:
        try:
            results.append(each._result(_left(deadline)))
        except Exception as error:  # noqa: BLE001  # also of a user's function; raised below
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


# Destination node, communicator, space, number within it.
_Message = tuple[NodeId, int, int, int]


def deliver_sends(
    links: Callable[[], Mapping[NodeId, Link]], progress: Progress, deadline: float
) -> Mapping[NodeId, int]:
    """Block until every message is delivered or the deadline (time.monotonic) passes. Returns the number of undelivered
    messages by node. Checks again after each wait: parts of a message are posted one by one.
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
        return  # the deadline, or the send's own error: the caller checks the send


def _message_of(send: PostedSend) -> _Message:
    frame = send.frame
    number = frame.tag if frame.space == Space.PART else frame.message
    return frame.destination, frame.communicator, frame.space, number
