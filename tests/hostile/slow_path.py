"""A path with latency on loopback: TCP and UDP are passed on late, from an address of their own."""

import asyncio
import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Place = tuple[str, int]
_SOURCE = "127.0.0.50"
_EVENT_TIMEOUT = 60.0


class _Flow(asyncio.DatagramProtocol):
    """One socket of the path. Each datagram goes to `pass_on`."""

    def __init__(self, pass_on: Callable[[bytes, Place], None]) -> None:
        self._pass_on = pass_on

    def datagram_received(self, data: bytes, addr: Place) -> None:
        self._pass_on(data, addr)


class SlowPath:
    """Passes everything on, both ways, `delay` seconds late. Runs in a thread of its own."""

    def __init__(self, target: Place, delay: float) -> None:
        self._target = target
        self._delay = delay
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._ahead: dict[Place, asyncio.Task[asyncio.DatagramTransport]] = {}  # by the address of who sends on it
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.place: Place = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(_EVENT_TIMEOUT)

    async def _open(self) -> Place:
        """Listen at one port of TCP and UDP. A port that is free for TCP may be in use for UDP: then take another."""
        while True:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            place: Place = self._server.sockets[0].getsockname()
            try:
                self._behind, _ = await self._bind_udp(place, self._send_ahead)
            except OSError as error:
                self._server.close()
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return place

    async def _bind_udp(
        self, place: Place, pass_on: Callable[[bytes, Place], None]
    ) -> tuple[asyncio.DatagramTransport, _Flow]:
        return await self._loop.create_datagram_endpoint(lambda: _Flow(pass_on), local_addr=place)

    def _send_ahead(self, data: bytes, sender: Place) -> None:
        """Open one socket for each sender, however many datagrams come before it is open."""
        if sender not in self._ahead:
            self._ahead[sender] = self._loop.create_task(self._open_flow(sender))
        self._ahead[sender].add_done_callback(lambda opened: self._send_late(opened, data))

    def _send_late(self, opened: asyncio.Task[asyncio.DatagramTransport], data: bytes) -> None:
        if not opened.cancelled():
            self._loop.call_later(self._delay, opened.result().sendto, data, self._target)

    async def _open_flow(self, sender: Place) -> asyncio.DatagramTransport:
        def send_back(data: bytes, _: Place) -> None:
            self._loop.call_later(self._delay, self._behind.sendto, data, sender)

        transport, _ = await self._bind_udp((_SOURCE, 0), send_back)
        return transport

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
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_EVENT_TIMEOUT)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        self._behind.abort()
        tasks = [*self._tasks, *self._ahead.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for opened in self._ahead.values():
            if not opened.cancelled():
                opened.result().abort()
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
