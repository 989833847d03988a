"""Waiting: queues, kicks, foreign descriptors, asyncio, cancellation."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time

import pytest
from harness import EVENT_TIMEOUT, Pair, receive, result, take, until
from nexar_native import quic


def test_each_operation_appears_in_exactly_one_result(pair: Pair) -> None:
    queue = quic.Completions(pair.a)
    posted = [pair.near.post_open_uni(queue, token=number) for number in range(100)]
    assert all(operation.done for operation in posted)
    found = take(queue, 100)
    assert [operation.token for operation in found] == list(range(100))
    assert queue.wait(0) == ([], [])


def test_a_cancelled_operation_appears_too(pair: Pair) -> None:
    queue = quic.Completions(pair.a)
    accepting = pair.near.post_accept_uni(queue)
    assert accepting.cancel()
    assert take(queue) == [accepting]
    with pytest.raises(quic.Cancelled):
        accepting.result()


def test_a_timeout_gives_nothing(pair: Pair) -> None:
    queue = quic.Completions(pair.a)
    start = time.monotonic()
    assert queue.wait(0.05) == ([], [])
    assert time.monotonic() - start >= 0.05
    assert queue.wait(0) == ([], [])
    assert queue.wait(0.001, spin=0.01) == ([], [])
    with pytest.raises(ValueError, match="timeout"):
        queue.wait(float("nan"))


def test_a_kick_ends_the_current_wait(pair: Pair) -> None:
    queue = quic.Completions(pair.a)

    def kick() -> None:
        until(lambda: pair.a.stats()["waiting"] == 1)
        queue.kick()

    thread = threading.Thread(target=kick)
    thread.start()
    assert queue.wait(EVENT_TIMEOUT) == ([], [])
    thread.join()


def test_a_kick_without_a_wait_ends_the_next_one_only(pair: Pair) -> None:
    queue = quic.Completions(pair.a)
    queue.kick()
    queue.kick()
    assert queue.wait(EVENT_TIMEOUT) == ([], [])
    start = time.monotonic()
    assert queue.wait(0.05) == ([], [])
    assert time.monotonic() - start >= 0.05


@pytest.mark.parametrize("spin", [0.0, 0.01])
def test_a_foreign_descriptor_ends_a_wait(pair: Pair, spin: float) -> None:
    queue = quic.Completions(pair.a)
    left, right = socket.socketpair()
    with left, right:
        queue.watch(left.fileno())
        assert queue.wait(0) == ([], [])
        timer = threading.Timer(0.02, right.send, [b"x"])
        timer.start()
        assert queue.wait(EVENT_TIMEOUT, spin=spin) == ([], [left.fileno()])
        timer.join()
        left.recv(1)
        assert queue.wait(0) == ([], [])
        queue.watch(left.fileno(), readable=False, writable=True)
        assert queue.wait(EVENT_TIMEOUT) == ([], [left.fileno()])
        queue.unwatch(left.fileno())
        assert queue.wait(0) == ([], [])


def test_a_descriptor_watched_during_a_wait_counts(pair: Pair) -> None:
    queue = quic.Completions(pair.a)
    left, right = socket.socketpair()
    with left, right:
        right.send(b"x")

        def watch() -> None:
            until(lambda: pair.a.stats()["waiting"] == 1)
            queue.watch(left.fileno())

        thread = threading.Thread(target=watch)
        thread.start()
        assert queue.wait(EVENT_TIMEOUT) == ([], [left.fileno()])
        thread.join()


def test_operations_and_descriptors_are_returned_together(pair: Pair) -> None:
    queue = quic.Completions(pair.a)
    left, right = socket.socketpair()
    with left, right:
        queue.watch(left.fileno())
        right.send(b"x")
        opening = pair.near.post_open_uni(queue)
        assert queue.wait(EVENT_TIMEOUT) == ([opening], [left.fileno()])


def test_a_descriptor_ends_a_wait_for_named_operations(pair: Pair) -> None:
    accepting = pair.near.post_accept_uni()
    reader, writer = os.pipe()
    try:
        os.write(writer, b"x")
        assert pair.a.wait([accepting], EVENT_TIMEOUT, descriptors=[reader]) == ([], [reader])
    finally:
        os.close(reader)
        os.close(writer)


def test_descriptors_of_a_follower_wake_it_too(pair: Pair) -> None:
    left, right = socket.socketpair()
    with left, right:
        following: list[object] = []
        queue = quic.Completions(pair.a)
        leader = threading.Thread(target=lambda: queue.wait(EVENT_TIMEOUT, spin=1e-6))
        leader.start()
        until(lambda: pair.a.stats()["waiting"] == 1)
        follower = threading.Thread(
            target=lambda: following.append(pair.a.wait([], EVENT_TIMEOUT, descriptors=[left.fileno()]))
        )
        follower.start()
        until(lambda: pair.a.stats()["waiting"] == 2)
        right.send(b"x")
        follower.join()
        assert following == [([], [left.fileno()])]
        queue.kick()
        leader.join()


def test_asyncio_is_notified_by_the_eventfd(pair: Pair) -> None:
    here, there = pair.stream()
    queue = quic.Completions(pair.a)
    echo = quic.Completions(pair.b)
    rounds = 50

    def answer() -> None:
        buffer = bytearray(1)
        for _ in range(rounds):
            there.post_read(buffer, echo)
            take(echo)
            there.write(buffer)

    async def ask() -> float:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        loop.add_reader(queue.fileno(), arrived.set)
        start = time.monotonic()
        for number in range(rounds):
            buffer = bytearray(1)
            here.post_read(buffer, queue)
            here.write(bytes([number]))
            operations: list[quic.Operation] = []
            while not operations:
                await asyncio.wait_for(arrived.wait(), EVENT_TIMEOUT)
                arrived.clear()
                operations, _ = queue.wait(0)
            assert buffer == bytes([number])
        loop.remove_reader(queue.fileno())
        return time.monotonic() - start

    thread = threading.Thread(target=answer)
    thread.start()
    asyncio.run(ask())
    thread.join()


def test_the_eventfd_is_readable_exactly_while_something_is_queued(pair: Pair) -> None:
    queue = quic.Completions(pair.a)
    pair.near.post_open_uni(queue)
    fileno = queue.fileno()
    assert queue.fileno() == fileno

    def readable() -> bool:
        return pair.a.wait([], 0, descriptors=[fileno]) == ([], [fileno])

    assert readable()
    take(queue)
    assert not readable()
    pair.near.post_open_uni(queue)
    assert readable()
    take(queue)


def test_a_read_cancelled_half_way_keeps_its_bytes_and_the_stream_goes_on(pair: Pair) -> None:
    here, there = pair.stream()
    buffer = bytearray(10)
    reading = there.post_read(buffer)
    here.write(b"abcd")
    while reading.transferred < 4:
        pair.b.wait([reading], 0.01)
    assert reading.cancel()
    assert reading.transferred == 4
    assert buffer[:4] == b"abcd"
    here.write(b"efgh")
    assert receive(pair.b, there, 4) == b"efgh"
    assert buffer == b"abcd" + bytes(6)


def test_a_timed_out_wait_leaves_the_operation_posted(pair: Pair) -> None:
    here, there = pair.stream()
    buffer = bytearray(4)
    reading = there.post_read(buffer)
    assert pair.b.wait([reading], 0.02) == ([], [])
    here.write(b"late")
    assert result(pair.b, reading) == 4
    assert buffer == b"late"


def test_after_a_cancellation_nothing_touches_the_buffer(pair: Pair) -> None:
    here, there = pair.stream()
    for _ in range(200):
        buffer = bytearray(64)
        reading = there.post_read(buffer)
        here.write(b"x" * 64)
        if reading.cancel():
            before = bytes(buffer)
            rest = 64 - reading.transferred
            assert len(receive(pair.b, there, rest)) == rest
            assert bytes(buffer) == before
        else:
            assert reading.result() == 64
        buffer.append(0)


def test_a_borrowed_buffer_is_given_back_when_its_operation_is_done(pair: Pair) -> None:
    here, there = pair.stream()
    outgoing, incoming = bytearray(b"data"), bytearray(4)
    reading = there.post_read(incoming)
    with pytest.raises(BufferError):
        incoming.append(0)
    result(pair.a, here.post_write(outgoing))
    result(pair.b, reading)
    incoming.append(0)
    outgoing.append(0)


def test_a_write_cancelled_half_way_resets_the_stream(pair: Pair) -> None:
    here, there = pair.stream()
    data = bytearray(64 << 20)
    writing = here.post_write(data)
    assert writing.cancel()
    assert 0 < writing.transferred < len(data)
    data.append(0)
    with pytest.raises(quic.StreamError) as caught:
        result(pair.b, there.post_read(bytearray(len(data))))
    assert (caught.value.kind, caught.value.code) == ("reset", 0)


def test_a_write_cancelled_before_its_turn_leaves_the_stream_alone(pair: Pair) -> None:
    here, there = pair.stream()
    first = here.post_write(bytes(16 << 20))
    second = here.post_write(b"never")
    assert second.cancel()
    assert second.transferred == 0
    here.write(b"then")
    here.finish()
    queue = quic.Completions(pair.a)
    here.post_finished(queue)
    buffer = bytearray((16 << 20) + 9)
    assert result(pair.b, there.post_read(buffer)) == (16 << 20) + 4
    assert buffer[16 << 20 :] == b"then" + bytes(5)
    take(queue)
    assert first.done


def test_buffers_that_cannot_be_used_are_refused(pair: Pair) -> None:
    here, _ = pair.stream()
    with pytest.raises((BufferError, TypeError)):
        here.post_read(b"read only")
    with pytest.raises(TypeError):
        here.write("text")  # type: ignore[arg-type]
