"""A device that is none: arrays whose memory NumPy cannot see, and copies that are only done when they are looked at.

So whoever uses host memory before a copy is over, or writes to it, sees wrong values at once.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.device_adapter import DeviceAdapter, Outline
from nexar.errors import UsageError


class Slate:
    """An array on the device."""

    __slots__ = ("_chalk", "engine")

    def __init__(self, values: Any, engine: "Engine | None" = None) -> None:
        self._chalk = np.array(values)
        self.engine = engine or ENGINE

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._chalk.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._chalk.shape

    def values(self) -> NDArray[Any]:
        """After all that was begun so far, as every look at a device array is."""
        self.engine.run_all()
        return self._chalk.copy()


class Engine:
    """Does copies in order, each some looks after it was begun. `broken`: the name of what fails from now on."""

    def __init__(self, patience: int = 3) -> None:
        self.patience = patience
        self.broken: str | None = None
        self.begun: list[str] = []
        self.done = 0  # copies; under the lock
        self._lock = threading.RLock()  # over the queue, and while copies are done
        self._queue: deque[Work] = deque()

    def begin(self, name: str, copy: Callable[[], None]) -> "Work":
        if self.broken == name:
            raise RuntimeError(f"the chalk broke during {name}")
        with self._lock:
            self.begun.append(name)
            self._queue.append(Work(self, copy, self.patience))
            return self._queue[-1]

    def run_until(self, work: "Work") -> None:
        with self._lock:
            while not work.over:
                first = self._queue.popleft()
                first.copy()
                first.over = True
                self.done += 1
                first.copy = _nothing

    def run_all(self) -> None:
        with self._lock:
            while self._queue:
                self.run_until(self._queue[-1])


def _nothing() -> None:
    """It is done."""


ENGINE = Engine()


class Work:
    def __init__(self, engine: Engine, copy: Callable[[], None], looks: int) -> None:
        self._engine = engine
        self._looks = looks
        self.copy = copy
        self.over = False

    def done(self) -> bool:
        if self._engine.broken == "done":
            raise RuntimeError("the chalk broke on the way")
        if not self.over and self._looks:
            self._looks -= 1
        elif not self.over:
            self._engine.run_until(self)
        return self.over


class SlateAdapter(DeviceAdapter):
    name = "slate"

    def recognises(self, value: object) -> bool:
        return isinstance(value, Slate)

    def outline(self, value: Slate) -> Outline:
        if value.dtype == object:
            raise UsageError("a slate of objects cannot be read; write numbers on it")
        return Outline(value.dtype, value.shape, "slate:0")

    def stream_of(self, value: Slate) -> Engine:
        return value.engine

    def stage_out(self, values: Sequence[Slate], into: NDArray[Any], stream: Engine) -> Work:
        def copy() -> None:
            np.concatenate([value._chalk.reshape(-1) for value in values], out=into)

        return stream.begin("stage_out", copy)

    def stage_in(self, values: Sequence[Slate], source: NDArray[Any], stream: Engine) -> Work:
        def copy() -> None:
            start = 0
            for value in values:
                stop = start + value._chalk.size
                value._chalk[...] = source[start:stop].reshape(value.shape)
                start = stop

        return stream.begin("stage_in", copy)

    def empty(self, like: Slate, shape: tuple[int, ...], dtype: np.dtype[Any], stream: Engine) -> Slate:
        return Slate(np.empty(shape, dtype), like.engine)

    def reduce(self, op: str, into: Slate, other: Slate, stream: Engine) -> bool:
        if op != "sum":
            return False
        stream.begin("reduce", lambda: np.copyto(into._chalk, into._chalk + other._chalk))
        return True
