"""A thread with an asyncio loop, for functions that are `async def`."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

from nexar.types import format_seconds

_log = logging.getLogger(__name__)

T = TypeVar("T")

_LONGEST_END: Final = 1.0  # seconds that cancelled tasks have to end


class Loop:
    """One thread. Close it: its tasks are cancelled first."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()  # of the loop's thread
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def soon(self, act: Callable[..., None], *facts: Any) -> None:
        """Run it in the loop's thread. From any thread; never blocks. Dropped once the loop has ended."""
        with suppress(RuntimeError):  # closed: whatever it concerned is over
            self._loop.call_soon_threadsafe(act, *facts)

    def start(self, work: Coroutine[Any, Any, T], ended: Callable[[asyncio.Task[T]], None]) -> asyncio.Task[T]:
        """In the loop's thread. The task is kept until it is done; then `ended` is told."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(ended)
        return task

    def tell(self) -> None:
        """Cancel every task, then end. Never blocks. Idempotent."""
        self.soon(self._ending.set)

    def close(self, patience: float) -> None:
        """Tell, and wait for the thread for so many seconds. Idempotent."""
        self.tell()
        if self._thread is threading.current_thread():
            return
        self._thread.join(patience)
        if self._thread.is_alive():
            _log.warning(
                "async functions that others called have not ended within %s of the end of their communicator, "
                "although they were cancelled; %s goes on", format_seconds(patience), self._thread.name,
            )  # fmt: skip

    def _run(self) -> None:
        """A function that stops the loop, or wants to end the process, does not end the others."""
        end = self._loop.create_task(self._until_told())
        end.add_done_callback(lambda _: self._loop.stop())
        try:
            while not end.done():
                with suppress(SystemExit, KeyboardInterrupt):  # its task has it, too, and its caller is told
                    self._loop.run_forever()
            end.result()
        finally:
            self._loop.close()

    async def _until_told(self) -> None:
        await self._ending.wait()
        mine = asyncio.current_task()
        left = [task for task in asyncio.all_tasks() if task is not mine]  # with what the functions have started
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_LONGEST_END)
        ending = [asyncio.ensure_future(self._loop.shutdown_asyncgens())]
        ending.append(asyncio.ensure_future(self._loop.shutdown_default_executor()))
        await asyncio.wait(ending, timeout=_LONGEST_END)
