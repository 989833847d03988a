"""The completion queue of an endpoint, served by one thread at a time.

Law: an operation's `token` is a bound method that takes the operation. The driving thread waits in `turn`, which drives
the endpoint natively, and then calls the tokens of what finished, in that order, with no lock held. A chore that only
the driving thread may do (a call of a sink, above all) is left to it by `defer`; it is a bound method too.

Whatever leaves a handler (a sink that raises, Ctrl-C at the wrong moment) leaves it half done: the owner of the handler
is told and gives up its connection, the rest of the queue waits for the next turn, and the exception goes on its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol

from nexar.native import quic

_driving: set[int] = set()
"""The threads that are serving, each adding and removing itself. Of all transports: such a thread waits for no other,
because two that abort one another's carriers would wait for ever."""


def is_driving() -> bool:
    """Whether this thread is serving some queue, and so perhaps inside a sink."""
    return get_ident() in _driving


class CompletionHandler(Protocol):
    """The owner of a token."""

    def interrupted(self, error: BaseException) -> None:
        """A handler of this owner was left by `error`. Must not call a sink."""


class CompletionDriver:
    """Waits for operations and calls who posted them."""

    def __init__(self, endpoint: quic.Endpoint) -> None:
        self.completions = quic.Completions(endpoint)
        self._finished: deque[quic.Operation] = deque()  # the driving thread's: done, and not served yet
        self._chores: deque[Callable[[], None]] = deque()  # appended by any thread, done by the driving one

    def turn(self, timeout: float, spin: float) -> bool:
        """Wait at most `timeout` seconds, serve what finished. True if anything happened."""
        if self._finished or self._chores:
            timeout = spin = 0.0
        operations, descriptors = self.completions.wait(timeout, spin=spin)
        if operations:
            self._finished.extend(operations)
        happened = bool(self._finished or self._chores)
        if happened:
            self._work()
        return happened or bool(descriptors)

    def defer(self, chore: Callable[[], None]) -> None:
        """Let the driving thread do this soon. Callable from any thread."""
        self._chores.append(chore)
        self.completions.kick()

    def _work(self) -> None:
        thread = get_ident()
        _driving.add(thread)
        try:
            self._serve()
            self._do_chores()
        finally:
            _driving.discard(thread)

    def _serve(self) -> None:
        finished = self._finished
        while finished:
            operation = finished.popleft()
            try:
                operation.token(operation)
            except BaseException as error:
                _tell_owner(operation.token, error)
                raise

    def _do_chores(self) -> None:
        while self._chores:
            chore = self._chores.popleft()
            try:
                chore()
            except BaseException as error:
                _tell_owner(chore, error)
                raise


def _tell_owner(call: Any, error: BaseException) -> None:
    owner: CompletionHandler = call.__self__
    owner.interrupted(error)
