"""Receives that are cancelled at random moments: no message is lost, none comes twice, and their order is kept.

One rank sends numbered messages of 8 bytes to 8 MB. The other receives them in every way that can be given up: a
request that is cancelled, dropped or awaited, a wait that times out, several receives at a time. NEXAR_FULL=1 gives up
10,000 times on each transport.
"""

import asyncio
import random
import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest

from nexar.communicator.communicator import Communicator
from nexar.errors import Cancelled, OperationTimeout
from tests.conformance.worlds import ranks_over
from tests.processes.scale import measured, sized
from tests.ranks import on_every

CANCELS = sized(400, 10_000)
LARGEST = 8_000_000
TAG = 7


def length_of(number: int) -> int:
    """Bytes of a message: evenly spread over the orders of magnitude."""
    return min(LARGEST, int(8 * 10 ** (6 * random.Random(number).random()))) // 8 * 8


def message(number: int) -> np.ndarray[Any, Any]:
    return np.full(length_of(number) // 8, number, np.uint64).view(np.uint8)


class Receiver:
    """Receives until the end, gives up often, and writes down what it got."""

    def __init__(self, comm: Communicator, seed: int) -> None:
        self.comm = comm
        self.random = random.Random(seed)
        self.numbers: list[int] = []
        self.cancels = 0
        self.ways: list[Callable[[], None]] = [
            self.cancel, self.drop, self.time_out, self.wait_for, self.cancel_several, self.receive,
        ]  # fmt: skip

    def moment(self) -> float:
        """Seconds until it gives up: from far too short to enough for the largest."""
        return float(10 ** self.random.uniform(-5.5, -1.7))

    def got(self, array: np.ndarray[Any, Any]) -> None:
        words = np.ascontiguousarray(array).view(np.uint64)
        assert (words == words[0]).all(), "bytes of two messages in one"
        self.numbers.append(int(words[0]))

    def gave_up(self, into: np.ndarray[Any, Any] | None) -> None:
        self.cancels += 1
        if into is not None:
            into[:] = 255  # it is ours again: whatever still came from here, or landed here, would show

    def cancel(self) -> None:
        into = self.fitting()
        request = self.comm.start.recv(into, 0, TAG)
        sleep(self.moment())
        if request.cancel():
            self.gave_up(into)
            with pytest.raises(Cancelled):
                request.wait()
        else:
            self.got(request.wait())

    def drop(self) -> None:
        into = self.fitting()
        try:
            self.got(self.comm.start.recv(into, 0, TAG).wait(self.moment()))
        except OperationTimeout:
            self.gave_up(None)

    def time_out(self) -> None:
        into = self.fitting()
        try:
            self.got(self.comm.recv(into, 0, TAG, timeout=self.moment()))
        except OperationTimeout:
            self.gave_up(into)

    def wait_for(self) -> None:
        into = self.fitting()
        try:
            self.got(asyncio.run(self._awaited(into, self.moment())))
        except TimeoutError:
            self.gave_up(into)

    async def _awaited(self, into: Any, seconds: float) -> Any:
        return await asyncio.wait_for(self.comm.start.recv(into, 0, TAG), seconds)

    def cancel_several(self) -> None:
        requests = [self.comm.start.recv(None, 0, TAG) for _ in range(3)]
        sleep(self.moment())
        for request in requests:
            if request.cancel():
                self.gave_up(None)
            else:
                self.got(request.wait())

    def receive(self) -> None:
        self.got(self.comm.recv(self.fitting(), 0, TAG))

    def fitting(self) -> np.ndarray[Any, Any] | None:
        """Memory for the message that comes next, half of the time."""
        if self.random.random() < 0.5:
            return None
        return np.empty(length_of(len(self.numbers)), np.uint8)


@pytest.mark.full
@pytest.mark.timeout(sized(300, 900))
@pytest.mark.parametrize("scheme", ["memory", "shm", "tls", "quic"])
def test_no_message_is_lost_comes_twice_or_out_of_order_whenever_receives_are_cancelled(
    scheme: str, record_property: Callable[[str, object], None]
) -> None:
    enough = threading.Event()

    def say(comm: Communicator) -> int:
        number = 0
        while not enough.is_set():
            comm.send(message(number), 1, TAG, timeout=120)
            number += 1
        comm.send(np.zeros(0, np.uint8), 1, TAG + 1)
        return number

    def start_receiver(comm: Communicator) -> Receiver:
        receiver = Receiver(comm, seed=len(scheme))
        try:
            while receiver.cancels < CANCELS:
                receiver.random.choice(receiver.ways)()
        finally:
            enough.set()
        while comm.probe(0, TAG + 1, timeout=0) is None:
            if comm.probe(0, TAG, timeout=0) is not None:
                receiver.receive()
        while comm.probe(0, TAG, timeout=0) is not None:
            receiver.receive()
        return receiver

    begin = monotonic()
    with ranks_over(scheme, 2) as pair:
        sent, receiver = on_every(pair, lambda comm: say(comm) if comm.rank == 0 else start_receiver(comm))
        left = pair[1]._group.matching
        assert [len(left._posted), left._unexpected_buffers.budget.used] == [0, 0]
    assert receiver.numbers == list(range(sent))
    measured(record_property, cancels=receiver.cancels, messages=sent, secs=round(monotonic() - begin, 1))
