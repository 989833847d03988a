"""What the tests share: connecting, waiting for a result, moving whole messages, child processes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nexar_native import quic

EVENT_TIMEOUT = 45.0
"""Seconds until a test gives up. Nothing takes long by itself, but a starved process may sleep for many seconds."""
HERE = str(Path(__file__).parent)


class Pair:
    """Both ends of one connection."""

    def __init__(
        self,
        a: quic.Endpoint,
        b: quic.Endpoint,
        near: quic.Connection,
        far: quic.Connection,
    ) -> None:
        self.a, self.b, self.near, self.far = a, b, near, far

    def stream(self) -> tuple[quic.Stream, quic.Stream]:
        """A two-way stream, both ends of it: the first byte opens it, and is read."""
        here = self.near.open_bi()
        here.write(b"!")
        there: quic.Stream = result(self.b, self.far.post_accept_bi())
        assert receive(self.b, there, 1) == b"!"
        return here, there

    def forget(self) -> None:
        del self.near, self.far


def connect(a: quic.Endpoint, b: quic.Endpoint, name: str = "b", **options: Any) -> Pair:
    accepting = b.post_accept()
    near = a.connect(b.address, name, EVENT_TIMEOUT, **options)
    return Pair(a, b, near, result(b, accepting))


def result(endpoint: quic.Endpoint, operation: quic.Operation, timeout: float = EVENT_TIMEOUT) -> Any:
    """Wait for one operation and give its result."""
    done, _ = endpoint.wait([operation], timeout)
    assert done == [operation], "not done in time"
    return operation.result()


def receive(endpoint: quic.Endpoint, stream: quic.Stream, count: int) -> bytes:
    buffer = bytearray(count)
    filled = result(endpoint, stream.post_read(buffer))
    return bytes(buffer[:filled])


def receive_all(endpoint: quic.Endpoint, stream: quic.Stream) -> bytes:
    """Everything up to the end of the stream."""
    whole = bytearray()
    while True:
        piece = receive(endpoint, stream, 65536)
        whole += piece
        if len(piece) < 65536:
            return bytes(whole)


def until(condition: Callable[[], bool]) -> None:
    """Look again and again until it holds."""
    deadline = time.monotonic() + EVENT_TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.0005)


def native_threads() -> int:
    """Background threads in this process (each names itself as it starts)."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("nexar-quic")


def take(queue: quic.Completions, count: int = 1) -> list[quic.Operation]:
    """The next `count` finished operations of a queue."""
    found: list[quic.Operation] = []
    while len(found) < count:
        operations, _ = queue.wait(EVENT_TIMEOUT)
        assert operations, "nothing finished in time"
        found += operations
    return found


def spawn(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Run `code` in a process of its own, with this directory on its path."""
    prologue = f"import sys; sys.path.insert(0, {HERE!r})\n"
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", prologue + textwrap.dedent(code), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = EVENT_TIMEOUT) -> tuple[int, str, str]:
    """Wait for a spawned process: its exit code, output and errors."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, out, err


PEM_ENVIRONMENT = """
import json, sys
from nexar_native import quic
given = json.loads(sys.stdin.readline())
credentials = quic.Credentials(given["chain"].encode(), given["key"].encode())
trust = quic.Trust(given["authorities"].encode())
"""


def identity(name: str) -> str:
    """One line for a child that runs PEM_ENVIRONMENT: who it is and whom it trusts."""
    import json

    import certificates

    leaf = certificates.node(name)
    return (
        json.dumps(
            {
                "chain": leaf.pem.decode(),
                "key": leaf.key_pem.decode(),
                "authorities": certificates.authority().pem.decode(),
            }
        )
        + "\n"
    )
