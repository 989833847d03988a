"""A link over two carriers: the second joins without disturbing the order, and losing either is losing the link."""

import sys
import threading
import time
from typing import Any

import pytest

from nexar.errors import PeerLost
from nexar.links.link import Link
from nexar.transport.base import Expected
from tests.processes.scale import MIB, measured, schemes, sized
from tests.processes.star import Star
from tests.processes.talk import TalkingNode, await_that, echo, post, receive, round_trip, say, source_of_zeros

BEFORE, AFTER = 300, sized(1500, 20_000)  # messages sent by the first carrier alone, and when both are there
SMALL, LARGE = 8, 100_000
COUNTED, UNREAD, NEVER = 1, 2, 3
END = b"the end."


# -- order -----------------------------------------------------------------------------------------------------------


class Pourer(threading.Thread):
    """Sends numbered messages, small and large, until some time after `joined`; then the end."""

    def __init__(self, node: TalkingNode, link: Link) -> None:
        super().__init__()
        self.node, self.link = node, link
        self.begun, self.joined = threading.Event(), threading.Event()
        self.sent = 0

    def run(self) -> None:
        while not self.joined.is_set() or self.sent < BEFORE:
            self._pour()
        for _ in range(AFTER):
            self._pour()
        say(self.link, COUNTED, END)

    def _pour(self) -> None:
        size = LARGE if self.sent % 20 == 7 else SMALL
        send = say(self.link, COUNTED, self.sent.to_bytes(8, "little") + bytes(size - 8))
        self.sent += 1
        if self.sent == BEFORE:
            self.begun.set()
        if self.sent % 50 == 0 or size == LARGE:
            self.node.wait(send)


def drain(node: TalkingNode, source: int) -> int:
    """Receive until the end; every number must be the next."""
    expected = 0
    while (data := receive(node, source, COUNTED)) != END:
        assert int.from_bytes(data[:8], "little") == expected
        expected += 1
    return expected


def pour_and_join(node: TalkingNode, link: Link, scheme: str, address: str) -> list[int]:
    """Talk by the first carrier, add the second in the middle, go on; how many came and how many were sent."""
    pourer = Pourer(node, link)
    pourer.start()
    try:
        assert pourer.begun.wait(20)
        link.adopt(node.transports[scheme].connect(address, Expected(link.peer), time.monotonic() + 10))
    finally:
        pourer.joined.set()
    came = drain(node, link.peer)
    pourer.join()
    return [came, pourer.sent]


@pytest.mark.full
@schemes("shm+tls", "shm+quic")
def test_order_is_kept_when_a_second_carrier_joins(scheme: str, record_property: Any) -> None:
    joining, first = scheme.split("+")
    with Star([first, joining]) as star:
        number = 0x11  # of the first ray: the address of shared memory is made for one peer
        address = star.node.addresses_for(number)[joining]
        ray = star.start(pour_and_join, [joining, address], peer_dials=[first])
        pourer = Pourer(star.node, ray.link)
        pourer.start()
        await_that(lambda: f"{joining}.frames_received" in ray.link.stats(), "the second carrier")
        pourer.joined.set()
        came = drain(star.node, ray.number)
        pourer.join()
        frames = {name: ray.link.stats()[f"{name}.frames_sent"] for name in (first, joining)}
        assert ray.result() == [pourer.sent, came]
    measured(record_property, scheme=scheme, messages=came + pourer.sent, frames=frames)
    assert min(frames.values()) > 100


# -- ends ------------------------------------------------------------------------------------------------------------


def break_carrier(node: TalkingNode, link: Link, scheme: str) -> float:
    """Break one carrier below the link; when everybody here has been notified."""
    waiters = pending(node, link)
    echo(node, link)
    broken = time.monotonic()
    link._state.carriers[scheme].abort("broken by the test")
    expect_loss(node, waiters)
    return time.monotonic() - broken


def pending(node: TalkingNode, link: Link) -> list[Any]:
    return [
        post(node, link.peer, NEVER),
        post(node, link.peer, NEVER + 1),
        say(link, UNREAD, source_of_zeros(64 * MIB)),
    ]


def expect_loss(node: TalkingNode, operations: list[Any]) -> None:
    for operation in operations:
        with pytest.raises(PeerLost):
            node.wait(operation, timeout=10)


@pytest.mark.parametrize("broken", [0, 1], ids=["the first", "the second"])
@schemes("shm+tls", "shm+quic")
def test_the_loss_of_either_carrier_wakes_everybody_at_both_ends(
    scheme: str, broken: int, record_property: Any
) -> None:
    both = scheme.split("+")
    with Star(both, early_bytes=MIB) as star:
        ray = star.start(break_carrier, [both[broken]])
        waiters = pending(star.node, ray.link)
        round_trip(star.node, ray.link)
        say(ray.link, 8, b"the last")
        expect_loss(star.node, waiters)
        with pytest.raises(PeerLost):
            say(ray.link, 8, b"anybody?")
        woken = ray.result()
    measured(record_property, scheme=scheme, broken=both[broken], told_after_ms=round(woken * 1e3, 1))
    assert woken < 2


def say_much_and_close(node: TalkingNode, link: Link, count: int) -> None:
    receive(node, link.peer, NEVER)
    for number in range(count):
        say(link, COUNTED, number.to_bytes(8, "little") + bytes(2000))
    link.close()


def hold_the_interpreter(seconds: float) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    sys.setswitchinterval(interval)


@schemes("shm+tls", "shm+quic")
def test_a_polite_end_of_two_carriers_delivers_what_was_sent_before(scheme: str) -> None:
    with Star(scheme.split("+")) as star:
        ray = star.start(say_much_and_close, [300])
        say(ray.link, NEVER, b"go")
        hold_the_interpreter(0.5)  # so that messages and ends of both carriers lie there when they are looked at
        for number in range(300):
            assert receive(star.node, ray.number, COUNTED)[:8] == number.to_bytes(8, "little")
        with pytest.raises(PeerLost):
            receive(star.node, ray.number, COUNTED)
