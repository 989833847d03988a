"""A path with latency on loopback: TCP and UDP at one port, passed on late, from an address of its own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

Place = tuple[str, int]
_SOURCE = "127.0.0.50"


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
        self.place: Place = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)

    async def _open(self) -> Place:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        place: Place = self._server.sockets[0].getsockname()
        self._udp, _ = await self._loop.create_datagram_endpoint(lambda: _Front(self), place)
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
            pass
        self._loop.call_later(self._delay, sink.close)

    def later(self, transport: asyncio.DatagramTransport, data: bytes, place: Place | None = None) -> None:
        self._loop.call_later(self._delay, transport.sendto, data, place)

    async def connect(self, back: "_Back") -> asyncio.DatagramTransport:
        made, _ = await self._loop.create_datagram_endpoint(
            lambda: back, local_addr=(_SOURCE, 0), remote_addr=self._target
        )
        return made

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()
        protocol = self._udp.get_protocol()
        assert isinstance(protocol, _Front)
        protocol.close()
        self._udp.close()
        await asyncio.sleep(0)


class _Front(asyncio.DatagramProtocol):
    """Where clients send to."""

    def __init__(self, path: SlowPath) -> None:
        self._path = path
        self._backs: dict[Place, _Back] = {}
        self.transport: asyncio.DatagramTransport

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Place) -> None:
        if addr not in self._backs:
            self._backs[addr] = _Back(self._path, self.transport, addr)
        self._backs[addr].send(data)

    def close(self) -> None:
        for back in self._backs.values():
            back.close()


class _Back(asyncio.DatagramProtocol):
    """Where one client's datagrams leave from."""

    def __init__(self, path: SlowPath, front: asyncio.DatagramTransport, client: Place) -> None:
        self._path = path
        self._front = front
        self._client = client
        self._made = asyncio.ensure_future(path.connect(self))

    def send(self, data: bytes) -> None:
        self._made.add_done_callback(lambda made: self._path.later(made.result(), data))

    def datagram_received(self, data: bytes, addr: Place) -> None:
        self._path.later(self._front, data, self._client)

    def close(self) -> None:
        if self._made.done():
            self._made.result().close()


@contextmanager
def slow_path(target: Place, delay: float) -> Iterator[SlowPath]:
    made = SlowPath(target, delay)
    try:
        yield made
    finally:
        made.close()
