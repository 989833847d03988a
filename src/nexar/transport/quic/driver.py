"""The completion queue of an endpoint, served by one thread at a time.

The token of an operation is a bound method that takes the operation. `run_once` drives the endpoint, then calls the
tokens of finished operations in order, without a lock. If one raises (a sink, Ctrl-C), its owner is notified and ends
its connection. The rest of the queue waits for the next round, and the exception propagates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol

from nexar.native import quic

# Threads that serve a queue of any transport. They never wait for each other: two that abort one another's carriers
# would deadlock.
_driving: set[int] = set()


def is_driving() -> bool:
    """Whether this thread serves a queue and so may be inside a sink."""
    return get_ident() in _driving


class CompletionHandler(Protocol):
    """Owner of a token."""

    def interrupted(self, error: BaseException) -> None:
        """A handler of this owner raised `error`. Must not call a sink."""


class CompletionDriver:
    """Waits for operations and calls their tokens."""

    def __init__(self, endpoint: quic.Endpoint) -> None:
        self.completions = quic.Completions(endpoint)
        self._finished: deque[quic.Operation] = deque()  # driver only: finished, not yet handled
        self._deferred: deque[Callable[[], None]] = deque()  # appended by any thread, run by the driver

    def run_once(self, timeout: float, spin: float) -> bool:
        """Wait up to `timeout` seconds and handle finished operations. Returns whether anything happened."""
        if self._finished or self._deferred:
            timeout = spin = 0.0
        operations, descriptors = self.completions.wait(timeout, spin=spin)
        if operations:
            self._finished.extend(operations)
        happened = bool(self._finished or self._deferred)
        if happened:
            self._work()
        return happened or bool(descriptors)

    def defer(self, call: Callable[[], None]) -> None:
        """Let the driver call `call` soon. Any thread."""
        self._deferred.append(call)
        self.completions.kick()

    def _work(self) -> None:
        thread = get_ident()
        _driving.add(thread)
        try:
            self._serve()
            self._run_deferred()
        finally:
            _driving.discard(thread)

    def _serve(self) -> None:
        finished = self._finished
        while finished:
            operation = finished.popleft()
            try:
                operation.token(operation)
            except BaseException as error:
                _notify_owner(operation.token, error)
                raise

    def _run_deferred(self) -> None:
        while self._deferred:
            call = self._deferred.popleft()
            try:
                call()
            except BaseException as error:
                _notify_owner(call, error)
                raise


def _notify_owner(call: Any, error: BaseException) -> None:
    owner: CompletionHandler = call.__self__
    owner.interrupted(error)
