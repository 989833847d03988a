"""What both ends of a process test say: tagged messages, echoes, pings that are answered."""

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from nexar.errors import NexarError
from nexar.links.link import Link
from nexar.links.messages import Receive
from nexar.links.operation import Operation
from nexar.links.sending import MessageHeader
from nexar.types import AwaitedPeer
from nexar.wire.control import Message, Ping, Pong
from nexar.wire.frame import Space
from nexar_tools.bare_nodes import LinkedNode
from nexar_tools.transports import why_unavailable

IDLE_TIMEOUT = 2.0
KEEP_ALIVE = 0.4
_LAST = b"the last"
_LAST_TAG = 1 << 40


def tagged(tag: int) -> MessageHeader:
    return MessageHeader(space=Space.TAGGED, tag=tag)


def post(node: LinkedNode, source: int, tag: int, into: memoryview | None = None) -> Receive:
    return node.matching.post(into, source=source, space=Space.TAGGED, tag=tag)


def receive(node: LinkedNode, source: int, tag: int, timeout: float = 30.0) -> memoryview:
    operation = post(node, source, tag)
    node.wait(operation, timeout=timeout)
    assert operation.into is not None
    return operation.into


def say(link: Link, tag: int, data: Any) -> Operation:
    return link.post_send(0, memoryview(data).cast("B"), about=tagged(tag))


def source_of_zeros(size: int) -> memoryview:
    """Memory to send from that costs next to none: pages nobody writes are one and the same page."""
    return memoryview(mmap.mmap(-1, size)).toreadonly()


def noise(size: int) -> bytes:
    """Bytes whose hash shows when a piece of them went wrong."""
    block = os.urandom(min(size, (1 << 20) + 13))
    return (block * (size // len(block) + 1))[:size]


# -- echoes --------------------------------------------------------------------------------------------------------


def echo(node: LinkedNode, link: Link, tags: Sequence[int] = (8,)) -> int:
    """Answer on each tag, a thread for each but the first, until asked to end. Returns how many were answered."""
    counts = [0] * len(tags)
    threads = [threading.Thread(target=_echo, args=(node, link, tag, counts, n)) for n, tag in enumerate(tags) if n]
    for thread in threads:
        thread.start()
    _echo(node, link, tags[0], counts, 0)
    for thread in threads:
        thread.join()
    return sum(counts)


def _echo(node: LinkedNode, link: Link, tag: int, counts: list[int], place: int) -> None:
    while (data := receive(node, link.peer, tag)) != _LAST:
        node.wait(say(link, tag, data))
        counts[place] += 1


def end_echo(link: Link, *tags: int) -> None:
    for tag in tags or (8,):
        say(link, tag, _LAST)


def round_trip(node: LinkedNode, link: Link, tag: int = 8, data: bytes = b"8 bytes.", timeout: float = 30.0) -> float:
    """Seconds until an echo has come back."""
    begin = time.perf_counter()
    answer = post(node, link.peer, tag)
    say(link, tag, data)
    node.wait(answer, timeout=timeout)
    assert answer.into == data
    return time.perf_counter() - begin


# -- nodes ---------------------------------------------------------------------------------------------------------


class Answer(Operation):
    """Done when the Pong of one Ping has come, so that it can be waited for like everything else."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return "the wait for a pong"

    def awaited(self) -> AwaitedPeer:
        return AwaitedPeer(missing="a pong")

    def cancel(self) -> None:
        """Nothing is borrowed."""


def _impatient_quic() -> Any:
    if why_unavailable("quic") is not None:
        return None
    from nexar.transport.quic.transport import QuicSettings

    return QuicSettings(idle_timeout=IDLE_TIMEOUT, keep_alive_interval=KEEP_ALIVE)


class TalkingNode(LinkedNode):
    """Answers pings, knows what it lost and when, and gives up a silent QUIC connection soon."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.losses: list[tuple[float, Link, NexarError]] = []  # appended by the driving thread
        self.lost = threading.Event()
        self._numbers = itertools.count()
        self._answers: dict[int, Answer] = {}
        kwargs["quic_settings"] = _impatient_quic()
        super().__init__(*args, on_control=self._heard, on_lost=self._lost, **kwargs)

    def ping(self, link: Link, timeout: float = 30.0) -> float:
        """Seconds until the answer."""
        begin = time.perf_counter()
        number = next(self._numbers)
        answer = self._answers[number] = Answer(self.progress.lock)
        assert link.send_control(Ping(number))
        self.wait(answer, timeout=timeout)
        return time.perf_counter() - begin

    def _heard(self, link: Link, message: Message) -> None:
        if isinstance(message, Ping):
            with suppress(NexarError):  # who asked is gone
                link.send_control(Pong(message.number))
        elif isinstance(message, Pong):
            with self.progress.lock:
                if message.number in self._answers:
                    self._answers.pop(message.number).finish()

    def _lost(self, link: Link, error: NexarError) -> None:
        self.losses.append((time.monotonic(), link, error))
        self.lost.set()


TALKING = f"{TalkingNode.__module__}:{TalkingNode.__qualname__}"


class CarelessNode(TalkingNode):
    """Never closed: its process just ends."""

    def close(self) -> None:
        """Somebody forgot."""


CARELESS = f"{CarelessNode.__module__}:{CarelessNode.__qualname__}"


def await_that(condition: Callable[[], object], what: str, timeout: float = 10.0) -> None:
    """Until something is so that nobody announces."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout} s in vain for {what}"
        time.sleep(0.001)
