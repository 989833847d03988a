"""Streams: bytes, ends, resets, stops, limits."""

from __future__ import annotations

import gc

import pytest
from conftest import MakeEndpoint
from harness import EVENT_TIMEOUT, Pair, connect, receive, receive_all, result, take
from nexar_native import quic


def test_bytes_arrive_in_order_and_the_end_is_seen(pair: Pair) -> None:
    here, there = pair.stream()
    here.write(b"one ", bytearray(b"two "), memoryview(b"three"))
    here.finish()
    assert receive_all(pair.b, there) == b"one two three"
    assert result(pair.b, there.post_read(bytearray(4))) == 0


def test_a_one_way_stream_goes_one_way(pair: Pair) -> None:
    here = pair.near.open_uni()
    here.write(b"x")
    there = result(pair.b, pair.far.post_accept_uni())
    assert receive(pair.b, there, 1) == b"x"
    assert there.id == here.id
    with pytest.raises(quic.StreamError) as caught:
        there.write(b"y")
    assert caught.value.kind == "closed"
    with pytest.raises(quic.StreamError):
        result(pair.a, here.post_read(bytearray(1)))


def test_finished_means_that_the_peer_has_everything(pair: Pair) -> None:
    here = pair.near.open_uni()
    data = bytes(range(256)) * 4096
    here.write(data)
    here.finish()
    result(pair.a, here.post_finished())
    assert here.queued_bytes == 0
    pair.near.close(3, "polite")
    there = result(pair.b, pair.far.post_accept_uni())
    buffer = bytearray(len(data))
    assert result(pair.b, there.post_read(buffer)) == len(data)
    assert buffer == data


def test_nothing_can_be_written_after_the_end(pair: Pair) -> None:
    here, _ = pair.stream()
    here.finish()
    with pytest.raises(quic.StreamError) as caught:
        here.write(b"more")
    assert caught.value.kind == "closed"
    with pytest.raises(quic.StreamError):
        here.post_write(b"more")


def test_a_reset_reaches_the_reader_with_its_code(pair: Pair) -> None:
    here, there = pair.stream()
    reading = there.post_read(bytearray(10))
    here.reset(42)
    with pytest.raises(quic.StreamError) as caught:
        result(pair.b, reading)
    assert (caught.value.kind, caught.value.code) == ("reset", 42)


def test_a_stop_reaches_the_writer_with_its_code(pair: Pair) -> None:
    here, there = pair.stream()
    writing = here.post_write(bytes(256 << 20))
    there.stop(7)
    with pytest.raises(quic.StreamError) as caught:
        result(pair.a, writing)
    assert (caught.value.kind, caught.value.code) == ("stopped", 7)
    with pytest.raises(quic.StreamError) as caught:
        here.write(b"x")
    assert caught.value.kind == "stopped"


def test_a_reader_that_knows_the_length_does_not_disturb_the_writers_end(pair: Pair) -> None:
    for _ in range(20):
        here = pair.near.open_uni()
        here.write(bytes(5000))
        there = result(pair.b, pair.far.post_accept_uni())
        assert len(receive(pair.b, there, 5000)) == 5000
        del there
        here.finish()
        result(pair.a, here.post_finished())


def test_read_streams_are_given_back_to_the_peer(make_endpoint: MakeEndpoint) -> None:
    pair = connect(make_endpoint("a"), make_endpoint("b", max_streams=4))
    for number in range(50):
        here = result(pair.a, pair.near.post_open_uni())
        here.write(b"%d" % number)
        here.finish()
        there = result(pair.b, pair.far.post_accept_uni())
        assert receive_all(pair.b, there) == b"%d" % number
    assert pair.far.stats()["streams"] <= 4


def test_an_abandoned_stream_is_reset_and_given_back(make_endpoint: MakeEndpoint) -> None:
    pair = connect(make_endpoint("a"), make_endpoint("b", max_streams=1))
    here, there = pair.stream()
    reading = there.post_read(bytearray(10))
    del here
    gc.collect()
    with pytest.raises(quic.StreamError) as caught:
        result(pair.b, reading)
    assert caught.value.kind == "reset"
    del there, reading
    gc.collect()
    result(pair.a, pair.near.post_open_bi())


def test_opening_beyond_the_limit_blocks_or_waits(make_endpoint: MakeEndpoint) -> None:
    pair = connect(make_endpoint("a"), make_endpoint("b", max_streams=2))
    opened = [pair.near.open_uni() for _ in range(2)]
    with pytest.raises(BlockingIOError):
        pair.near.open_uni()
    waiting = pair.near.post_open_uni()
    assert pair.a.wait([waiting], 0.05) == ([], [])
    opened[0].finish()
    there = result(pair.b, pair.far.post_accept_uni())
    assert receive_all(pair.b, there) == b""
    assert isinstance(result(pair.a, waiting), quic.Stream)


def test_only_one_read_at_a_time(pair: Pair) -> None:
    _, there = pair.stream()
    reading = there.post_read(bytearray(1))
    with pytest.raises(ValueError, match="already"):
        there.post_read(bytearray(1))
    assert reading.cancel()
    assert not there.post_read(bytearray(1)).done


def test_a_read_gives_what_is_there_beyond_its_minimum(pair: Pair) -> None:
    here, there = pair.stream()
    reading = there.post_read(bytearray(100), minimum=3)
    here.write(b"ab")
    assert pair.b.wait([reading], 0.05) == ([], [])
    assert reading.transferred == 2
    here.write(b"cdef")
    assert result(pair.b, reading) == 6
    with pytest.raises(ValueError, match="minimum"):
        there.post_read(bytearray(1), minimum=2)


def test_a_write_never_blocks_and_queues_what_does_not_fit(pair: Pair) -> None:
    here, there = pair.stream()
    block = bytes(1 << 20)
    for _ in range(32):
        here.write(block)
    assert here.queued_bytes > 0
    here.finish()
    got = 0
    buffer = bytearray(8 << 20)
    queue_a, queue_b = quic.Completions(pair.a), quic.Completions(pair.b)
    here.post_finished(queue_a)
    while got < 32 << 20:
        there.post_read(buffer, queue_b)
        (operation,) = take(queue_b)
        got += operation.result()
    assert got == 32 << 20
    (operation,) = take(queue_a)
    operation.result()


def test_the_operation_knows_its_token_and_gives_one_object(pair: Pair) -> None:
    token = object()
    opening = pair.near.post_open_bi(token=token)
    first = result(pair.a, opening)
    assert opening.token is token
    assert opening.result() is first
    opening.token = None
    assert opening.token is None


def test_a_result_before_the_end_is_a_runtime_error(pair: Pair) -> None:
    accepting = pair.near.post_accept_bi()
    with pytest.raises(RuntimeError, match="not done"):
        accepting.result()
    assert accepting.cancel()
    assert not accepting.cancel()
    with pytest.raises(quic.Cancelled):
        accepting.result()


def test_closing_a_connection_ends_everything_on_it(pair: Pair) -> None:
    here, there = pair.stream()
    posted = [
        there.post_read(bytearray(10)),
        pair.far.post_accept_uni(),
        pair.far.post_closed(),
    ]
    pair.near.close(9, "enough")
    for operation in posted:
        with pytest.raises(quic.ConnectionLost) as caught:
            result(pair.b, operation)
        assert (caught.value.kind, caught.value.code) == ("peer_closed", 9)
        assert caught.value.reason == "enough"
    with pytest.raises(quic.ConnectionLost) as caught:
        here.write(b"x")
    assert caught.value.kind == "closed"
    pair.near.close()


def test_an_abandoned_connection_is_closed(make_endpoint: MakeEndpoint) -> None:
    pair = connect(make_endpoint("a"), make_endpoint("b"))
    closed = pair.far.post_closed()
    del pair.near
    gc.collect()
    with pytest.raises(quic.ConnectionLost) as caught:
        result(pair.b, closed)
    assert caught.value.kind == "peer_closed"


def test_a_silent_peer_is_lost_at_the_idle_timeout(make_endpoint: MakeEndpoint) -> None:
    a = make_endpoint("a", idle_timeout=0.5, keep_alive_interval=0)
    pair = connect(a, make_endpoint("b", keep_alive_interval=0))
    with pytest.raises(quic.ConnectionLost) as caught:
        result(pair.a, pair.near.post_closed(), EVENT_TIMEOUT)
    assert caught.value.kind == "timed_out"


def test_the_connection_reports_how_it_is_doing(pair: Pair) -> None:
    here, there = pair.stream()
    before = pair.far.stats()
    here.write(bytes(100_000))
    assert len(receive(pair.b, there, 100_000)) == 100_000
    after = pair.far.stats()
    assert after["bytes_received"] - before["bytes_received"] >= 100_000
    assert 0 <= after["last_received"] < EVENT_TIMEOUT
    assert after["rtt"] > 0
    assert after["mtu"] >= 1200
    assert pair.a.stats()["connections"] == 1
