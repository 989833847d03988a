"""The handle of an operation in flight."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from copy import copy
from time import monotonic
from typing import Any, Protocol

from nexar.collectives.conductor import DECLARE, Conductor
from nexar.collectives.work import Running
from nexar.errors import NexarError, UsageError
from nexar.group import checked_timeout, deadline_after
from nexar.links.operation import Operation

_log = logging.getLogger(__name__)


class Judge(Protocol):
    """Knows what an error means to the communicator that it came from."""

    def judge(self, error: BaseException) -> BaseException:
        """What is to be raised. May wait until the survivors have agreed."""

    def fate_after(self, error: BaseException) -> Operation | None:
        """What to wait for before that is known; None: the error is to be raised as it is."""


class Request:
    """One verb that was started: wait for it, await it, or cancel it. May be waited for from several threads.

    Its buffers must be left alone until it is done. A request that is dropped is cancelled. Whoever waits drives; while
    nobody does, the node's progress thread.
    """

    __slots__ = ("__weakref__", "_conductor", "_judge", "_running", "_timeout")

    def __init__(self, conductor: Conductor, running: Running, timeout: float, judge: Judge) -> None:
        """`timeout`: the operation's own. `judge` knows what its error means to the communicator."""
        self._judge = judge
        self._conductor = conductor
        self._running = running
        self._timeout = timeout

    def done(self) -> bool:
        """Has it ended, well or not? Never blocks."""
        return self._running.done

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call it once the request has ended, well or not; at once if it has. It is run by whoever ends the request,
        under a lock: it may only hand over.
        """
        with self._running.lock:
            self._running.when_done(callback)

    def wait(self, timeout: float | None = None) -> Any:
        """The verb's result, or its error raised.

        OperationTimeout after `timeout` seconds: the request goes on, and can be waited for again. Without one, the
        operation's own timeout holds: it ends an operation in which nobody makes progress.
        """
        seconds = None if timeout is None else checked_timeout(timeout)
        running = self._running
        if not running.done:
            if seconds is not None:
                self._conductor.wait(running, seconds)
            else:
                self._conductor.attend(running, self._timeout, waited=self._waited())
        if running.error is None:
            return running.value()
        raise self._judge.judge(copy(running.error))

    def _waited(self) -> float:
        """How many seconds of the operation's own timeout were over when somebody began to wait: none, where nobody
        else is kept waiting before.
        """
        return 0.0

    def cancel(self) -> None:
        """Give up: when this returns, its buffers are free. Of a collective the others are told, and raise.

        A request that is done is left alone.
        """
        self._running.cancel()

    def __await__(self) -> Generator[Any, None, Any]:
        """The verb's result. Cancelling the task that awaits it cancels the request."""
        from asyncio import get_running_loop  # noqa: PLC0415 - whoever awaits has it; nobody else pays for it

        loop = get_running_loop()
        running = self._running

        def watch() -> None:
            """The operation's own timeout, judged where it may block."""
            if not running.done:
                loop.run_in_executor(None, self._attend)

        timers = loop.call_later(DECLARE, self._declare), loop.call_later(self._timeout, watch)
        try:
            return (yield from running.__await__())
        except NexarError as error:
            fate = self._judge.fate_after(error)
            if fate is None:
                raise
            yield from fate.__await__()  # raises it
            raise
        finally:
            for timer in timers:
                timer.cancel()

    def _declare(self) -> None:
        if not self._running.done:
            self._conductor.declare(self._running.entry)

    def _attend(self) -> None:
        self._conductor.attend(self._running, self._timeout, waited=self._timeout)

    def __del__(self) -> None:
        running = getattr(self, "_running", None)
        if running is not None and not running.done:
            running.drop()
            _log.warning("%r was dropped, which cancels it; keep it, and wait for it", self)

    def __repr__(self) -> str:
        state = "in flight" if not self.done() else "failed" if self._running.error is not None else "done"
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
            results.append(each.wait(_left(deadline)))
        except Exception as error:  # noqa: BLE001  # also those of a user's function; raised below
            errors.append(error)
    if errors:
        raise _first(errors)
    return results


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(1e-6, deadline - monotonic())


def _first(errors: list[Exception]) -> Exception:
    first, *others = errors
    first.others = others  # type: ignore[attr-defined]
    for other in others:
        first.add_note(f"also: {type(other).__name__}: {other}")
    return first
