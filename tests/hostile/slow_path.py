"""A path with latency on loopback: TCP connections are passed on late, from an address of their own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

Place = tuple[str, int]
_SOURCE = "127.0.0.50"
_PATIENCE = 60.0


class SlowPath:
    """Passes everything on, both ways, `delay` seconds late. Runs in a thread of its own."""

    def __init__(self, target: Place, delay: float) -> None:
        self._target = target
        self._delay = delay
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.place: Place = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(_PATIENCE)

    async def _open(self) -> Place:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        place: Place = self._server.sockets[0].getsockname()
        return place

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            ahead, behind = await asyncio.open_connection(*self._target, local_addr=(_SOURCE, 0))
        except OSError:
            writer.close()
            return
        self._writers.add(behind)
        for source, sink in ((reader, behind), (ahead, writer)):
            task = self._loop.create_task(self._pass_on(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while piece := await source.read(1 << 16):
                self._loop.call_later(self._delay, sink.write, piece)
        except OSError:
            pass  # a reset is passed on as an end
        self._loop.call_later(self._delay, sink.close)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_PATIENCE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)  # aborted transports close their sockets in the next turn of the loop


@contextmanager
def slow_path(target: Place, delay: float) -> Iterator[SlowPath]:
    made = SlowPath(target, delay)
    try:
        yield made
    finally:
        made.close()
