"""Stand-ins to wait with: operations that end when asked to, a transport that follows a script, a sleep on an event."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from nexar.errors import Cancelled
from nexar.links.operation import Operation
from nexar.links.progress import Progress
from nexar.transport.base import Acceptor, Carrier, Expected, Transport
from nexar.types import AwaitedPeer

LONG = 30.0
"""Seconds that nothing here should ever take."""


def in_a_while() -> float:
    """A deadline that no good test reaches."""
    return time.monotonic() + LONG


class Posted(Operation):
    """Ends when asked to."""

    __slots__ = ("_name", "cancelled")

    def __init__(self, lock: threading.Lock, name: str = "a receive") -> None:
        super().__init__(lock)
        self._name = name
        self.cancelled = False

    @property
    def name(self) -> str:
        return self._name

    def awaited(self) -> AwaitedPeer:
        return AwaitedPeer(node=7, missing=self._name)

    def cancel(self) -> None:
        with self.lock:
            if not self.done:
                self.cancelled = True
                self.finish(Cancelled(operation=self._name))

    def end(self, error: BaseException | None = None) -> None:
        """As a sink does it."""
        with self.lock:
            self.finish(error)


class Sleep:
    """A Sleeper that shows when somebody sleeps."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self._woken = threading.Event()

    def watch(self, descriptor: int, *, readable: bool = True, writable: bool = False) -> None: ...

    def unwatch(self, descriptor: int) -> None: ...

    def wake(self) -> None:
        self._woken.set()

    def sleep(self, timeout: float, spin: float) -> None:
        self.begun.set()
        self._woken.wait(timeout)
        self._woken.clear()


class ScriptedTransport(Transport):
    """Does at each poll the next thing of its script, in the driving thread."""

    scheme = "told"

    def __init__(self, sleep: Sleep) -> None:
        self._sleep = sleep
        self.todo: deque[Callable[[], object]] = deque()
        self.always: Callable[[], object] | None = None
        self.closed = self.abandoned = False
        self.on_close: Callable[[], object] = lambda: None

    def execute(self, *things: Callable[[], object]) -> None:
        self.todo.extend(things)
        self._sleep.wake()

    def poll(self) -> bool:
        if self.always is not None:
            self.always()
            return True
        if not self.todo:
            return False
        self.todo.popleft()()
        return True

    def listen(self, address: str, acceptor: Acceptor) -> str:
        raise NotImplementedError

    def connect(self, address: str, expected: Expected, deadline: float) -> Carrier:
        raise NotImplementedError

    def close(self) -> None:
        self.on_close()
        self.closed = True

    def abandon(self) -> None:
        self.abandoned = True


class Node:
    """A Progress with its stand-ins."""

    def __init__(
        self, wrap: Callable[[ScriptedTransport], Transport] = lambda transport: transport, **settings: Any
    ) -> None:
        """`wrap`: what is driven is this, around the transport; `settings`: of the Progress."""
        self.sleep = Sleep()
        self.transport = ScriptedTransport(self.sleep)
        self.progress = Progress(self.sleep, [wrap(self.transport)], **settings)

    def post(self, name: str = "a receive") -> Posted:
        return Posted(self.progress.lock, name)

    def wait(self, *operations: Operation, deadline: float | None = None) -> None:
        self.progress.wait(operations, in_a_while() if deadline is None else deadline)


class Waiting(threading.Thread):
    """Waits in a thread of its own and keeps what was raised."""

    def __init__(self, node: Node, operations: Sequence[Operation], deadline: float | None = None) -> None:
        super().__init__(daemon=True)
        self._node = node
        self._operations = operations
        self._deadline = deadline
        self.raised: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._node.wait(*self._operations, deadline=self._deadline)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.raised = error

    def is_driving(self) -> None:
        """Returns when this thread drives: whoever waits from now on follows."""
        driving: queue.SimpleQueue[int] = queue.SimpleQueue()
        leader = None
        while leader != self.ident:
            self._node.transport.execute(lambda: driving.put(threading.get_ident()))
            leader = driving.get(timeout=LONG)

    def ended(self, timeout: float = 10.0) -> BaseException | None:
        """What it raised. Fails if it still waits."""
        self.join(timeout)
        assert not self.is_alive(), "it still waits"
        return self.raised
