"""Many threads on one endpoint: one drives, nobody is forgotten."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from conftest import MakeEndpoint
from harness import EVENT_TIMEOUT, Pair, connect, receive, result, take, until
from nexar_native import quic


@pytest.fixture(params=["usual", "frantic"])
def _switching(request: pytest.FixtureRequest) -> Iterator[None]:
    before = sys.getswitchinterval()
    if request.param == "frantic":
        sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_switching")
@pytest.mark.parametrize("spin", [0.0, 50e-6])
def test_no_wake_up_is_lost_among_threads_with_operations_of_their_own(pair: Pair, spin: float) -> None:
    streams = [pair.stream() for _ in range(8)]
    rounds = 150

    def play(endpoint: quic.Endpoint, stream: quic.Stream, serves: bool) -> None:
        queue = quic.Completions(endpoint)
        buffer = bytearray(8)
        for number in range(rounds):
            ball = number.to_bytes(8, "big")
            if serves:
                stream.write(ball)
            stream.post_read(buffer, queue)
            operations, _ = queue.wait(EVENT_TIMEOUT, spin=spin)
            assert operations, "a wake-up was lost"
            assert operations[0].result() == 8
            assert buffer == ball
            if not serves:
                stream.write(ball)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        games = [pool.submit(play, pair.a, here, True) for here, _ in streams]
        games += [pool.submit(play, pair.b, there, False) for _, there in streams]
        for game in games:
            game.result(4 * EVENT_TIMEOUT)


def test_the_leader_hands_over_when_it_leaves(pair: Pair) -> None:
    here, there = pair.stream()
    reading = there.post_read(bytearray(1))
    queue = quic.Completions(pair.b)
    done: list[int] = []
    leader = threading.Thread(target=lambda: queue.wait(EVENT_TIMEOUT))
    leader.start()
    until(lambda: pair.b.stats()["waiting"] == 1)
    follower = threading.Thread(target=lambda: done.append(result(pair.b, reading)))
    follower.start()
    until(lambda: pair.b.stats()["waiting"] == 2)
    queue.kick()
    leader.join()
    here.write(b"x")
    follower.join()
    assert done == [1]


def test_a_thread_that_spins_takes_over_from_one_that_sleeps(pair: Pair) -> None:
    here, there = pair.stream()
    sleeper = quic.Completions(pair.a)
    sleeping = threading.Thread(target=lambda: sleeper.wait(EVENT_TIMEOUT))
    sleeping.start()
    until(lambda: pair.a.stats()["waiting"] == 1)
    echo = quic.Completions(pair.b)

    def answer() -> None:
        buffer = bytearray(1)
        for _ in range(200):
            there.post_read(buffer, echo)
            take(echo)
            there.write(buffer)

    answering = threading.Thread(target=answer)
    answering.start()
    queue = quic.Completions(pair.a)
    buffer = bytearray(1)
    for _ in range(200):
        here.post_read(buffer, queue)
        here.write(b"x")
        assert queue.wait(EVENT_TIMEOUT, spin=1e-3)[0]
    answering.join()
    sleeper.kick()
    sleeping.join(EVENT_TIMEOUT)
    assert not sleeping.is_alive()


def test_a_write_by_another_thread_wakes_the_sleeping_leader_for_its_timers(
    make_endpoint: MakeEndpoint,
) -> None:
    """The leader sleeps until the idle timeout; a write whose packets are lost must be repeated
    long before that, so the leader has to learn of the earlier timer."""
    a = make_endpoint("a", idle_timeout=30, keep_alive_interval=0)
    b = make_endpoint("b", idle_timeout=30, keep_alive_interval=0)
    pair = connect(a, b)
    here, there = pair.stream()
    reading = there.post_read(bytearray(1 << 20))
    queue = quic.Completions(a)
    leader = threading.Thread(target=lambda: queue.wait(EVENT_TIMEOUT))
    leader.start()
    until(lambda: a.stats()["waiting"] == 1)
    start = time.monotonic()
    here.write(bytes(1 << 20))
    assert result(b, reading) == 1 << 20
    assert time.monotonic() - start < 5
    queue.kick()
    leader.join()


def test_bytes_beyond_the_window_flow_while_another_thread_leads(pair: Pair) -> None:
    """A post_write that is far larger than the window, by a thread that never waits."""
    here, there = pair.stream()
    queue = quic.Completions(pair.a)
    leader = threading.Thread(target=lambda: queue.wait(EVENT_TIMEOUT))
    leader.start()
    data = os.urandom(32 << 20)
    here.post_write(data)
    assert receive(pair.b, there, len(data)) == data
    queue.kick()
    leader.join()


def test_bytes_beyond_the_window_flow_while_nobody_waits(pair: Pair) -> None:
    here, there = pair.stream()
    data = os.urandom(32 << 20)
    writing = here.post_write(data)
    assert receive(pair.b, there, len(data)) == data
    assert writing.done


def test_two_connections_four_streams_each_both_ways_arrive_unharmed(
    make_endpoint: MakeEndpoint,
) -> None:
    a, b = make_endpoint("a"), make_endpoint("b")
    pairs = [connect(a, b) for _ in range(2)]
    streams = [pair.stream() for pair in pairs for _ in range(4)]
    size = 8 << 20

    def move(endpoint: quic.Endpoint, stream: quic.Stream, seed: int) -> bytes:
        data = (hashlib.sha256(b"%d" % seed).digest() * (size // 32 + 1))[:size]
        buffer = bytearray(size)
        queue = quic.Completions(endpoint)
        stream.post_write(data, queue)
        stream.post_read(buffer, queue)
        for operation in take(queue, 2):
            operation.result()
        return hashlib.sha256(data).digest() + hashlib.sha256(buffer).digest()

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        near = [pool.submit(move, a, here, n) for n, (here, _) in enumerate(streams)]
        far = [pool.submit(move, b, there, 100 + n) for n, (_, there) in enumerate(streams)]
        for mine, theirs in zip(near, far, strict=True):
            one, other = mine.result(), theirs.result()
            assert one[:32] == other[32:]
            assert one[32:] == other[:32]


def test_a_small_write_of_high_priority_passes_a_flood(pair: Pair) -> None:
    bulk_here, bulk_there = pair.stream()
    urgent_here, urgent_there = pair.stream()
    urgent_here.priority = 10
    assert urgent_here.priority == 10
    size = 1 << 30
    flood = bytearray(size)
    bulk = bulk_here.post_write(flood)
    sink = quic.Completions(pair.b)
    urgent = bytearray(8)
    stop = threading.Event()
    stamps: list[float] = []

    def drain() -> None:
        buffer = bytearray(4 << 20)
        bulk_there.post_read(buffer, sink, minimum=1, token="bulk")
        urgent_there.post_read(urgent, sink, token="urgent")
        got = 0
        while not stop.is_set() and got < size:
            for operation in sink.wait(EVENT_TIMEOUT)[0]:
                if stop.is_set():
                    return  # the flood was cancelled, and its stream reset by that
                if operation.token == "urgent":
                    stamps.append(time.monotonic())
                    if len(stamps) < 20:
                        urgent_there.post_read(urgent, sink, token="urgent")
                else:
                    got += operation.result()
                    bulk_there.post_read(buffer, sink, minimum=1, token="bulk")

    drainer = threading.Thread(target=drain)
    drainer.start()
    queue = quic.Completions(pair.a)
    driver = threading.Thread(target=lambda: queue.wait(EVENT_TIMEOUT * 3))
    driver.start()
    delays = []
    for number in range(20):
        start = time.monotonic()
        urgent_here.write(b"urgent!!")
        until(lambda number=number: len(stamps) > number)  # type: ignore[misc]
        delays.append(stamps[number] - start)
    passed = bulk.transferred < size
    stop.set()
    bulk.cancel()
    queue.kick()
    driver.join()
    sink.kick()
    drainer.join()
    assert passed, "the flood was over before the test"
    assert sorted(delays)[10] < 0.05, delays
