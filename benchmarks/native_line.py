"""Benchmark talker over `nexar_native.quic`: one stream of one connection, no frames, no carriers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memory import touched
from nexar_native import quic

from nexar.links.progress import DEFAULT_SPIN
from nexar.security.certificates import Credentials, Trust, node_name

TIMEOUT = 60.0
_ACKNOWLEDGEMENT = b"all of it"


class NativeNode:
    """Implements PeerNode. Its line is a stream."""

    def __init__(
        self,
        credentials: Credentials,
        trust: Trust,
        schemes: Sequence[str],
        *,
        host: str,
        spin: float = DEFAULT_SPIN,
        **_: Any,
    ) -> None:
        self.spin = spin
        self._cluster = credentials.cluster
        mine = quic.Credentials(credentials.certificate_chain, credentials.private_key)
        self._endpoint = quic.Endpoint((host, 0), mine, quic.Trust(trust.authorities))
        self._accepting = self._endpoint.post_accept()
        self.completions = quic.Completions(self._endpoint)

    def addresses_for(self, peer: int) -> dict[str, str]:
        host, port = self._endpoint.address
        return {"native": f"{host} {port}"}

    def connect(self, peer: int, addresses: Mapping[str, str], timeout: float) -> quic.Stream:
        """The first byte announces the stream to the peer."""
        host, port = addresses["native"].split()
        self._connection = self._endpoint.connect((host, int(port)), node_name(peer, self._cluster), timeout)
        stream = self._connection.open_bi()
        stream.write(b"!")
        return stream

    def accept(self, timeout: float) -> quic.Stream:
        self._connection = self._done(self._accepting, timeout)
        stream: quic.Stream = self._done(self._connection.post_accept_bi(), timeout)
        self._done(stream.post_read(bytearray(1)), timeout)
        return stream

    def _done(self, operation: quic.Operation, timeout: float) -> Any:
        if not self._endpoint.wait([operation], timeout)[0]:
            raise TimeoutError("nobody dialed")
        return operation.result()

    def close(self) -> None:
        self._endpoint.close()


class NativeTalker:
    """Implements Talker."""

    def __init__(self, node: NativeNode, stream: quic.Stream) -> None:
        self._stream, self._completions, self._spin = stream, node.completions, node.spin

    def prepare(self, size: int) -> None:
        self.outgoing, self.incoming = memoryview(bytearray(size)), memoryview(bytearray(size))

    def expect(self) -> None:
        self._reading = self._read(self.incoming)

    def say(self) -> None:
        self._stream.write(self.outgoing)

    def hear(self) -> None:
        self._wait_for(self._reading)

    def stream(self, size: int, out: int, into: int) -> None:
        """One read, posted ahead of its data, and one write at a time."""
        data, place = touched(size), touched(size, 1)
        reading = self._read(place) if into else None
        writing = self._write(data) if out else None
        while reading or writing:
            self._wait_for(reading, writing)
            if reading and reading.done:
                reading.result()
                into -= 1
                reading = self._read(place) if into else None
            if writing and writing.done:
                writing.result()
                out -= 1
                writing = self._write(data) if out else None
        self._agree_on_the_end()

    def _agree_on_the_end(self) -> None:
        """Both sides confirm that they have received everything."""
        last = self._read(memoryview(bytearray(len(_ACKNOWLEDGEMENT))))
        self._stream.write(_ACKNOWLEDGEMENT)
        self._wait_for(last)

    def _read(self, place: memoryview) -> quic.Operation:
        return self._stream.post_read(place, self._completions)

    def _write(self, data: memoryview) -> quic.Operation:
        return self._stream.post_write(data, self._completions)

    def _wait_for(self, *operations: quic.Operation | None) -> None:
        """Blocks until one of them is done."""
        while not any(operation and operation.done for operation in operations):
            if not self._completions.wait(TIMEOUT, spin=self._spin)[0]:
                raise TimeoutError("the peer said nothing")
