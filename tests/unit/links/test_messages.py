"""Receives that take no arrays, or nothing at all: matching alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.errors import BufferMismatch, Cancelled, NexarError, PeerMisbehaved, UsageError
from nexar.links.matching import Matching
from nexar.links.messages import (
    ANY,
    BUFFERS,
    OBJECT,
    PICKLE,
    BuffersReceive,
    FifoByKey,
    ObjectReceive,
    PartReceive,
    Probe,
    Receive,
    ReceiveKind,
)
from nexar.wire.frame import Frame, FrameKind, Space
from tests.unit.links.scripted_origin import TAGGED, ScriptedOrigin, announce, arrive, make


def ask(matching: Matching, kind: ReceiveKind = Receive, dtype: int = 0, source: int = 1, tag: int = 7) -> Receive:
    return matching.post(None, source=source, space=TAGGED, tag=tag, dtype=dtype, ask=kind)


def error_of(receive: Receive) -> NexarError:
    assert receive.done
    assert isinstance(receive.error, NexarError)
    return receive.error


def arrive_as(
    matching: Matching, origin: ScriptedOrigin, data: bytes, form: int, *, space: int = TAGGED, total: int = 0
) -> None:
    frame = Frame(kind=FrameKind.EAGER, space=space, tag=7, dtype=form, count=total, length=len(data), body=len(data))
    with matching.lock:
        matching.arrive(origin, 1, frame, (), memoryview(data))
    matching._deferred_io.flush()


# ---------------------------------------------------------------- probes


@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_a_probe_sees_a_message_and_leaves_it(wild: bool, early: bool) -> None:
    matching, origin = make()
    if early:
        arrive(matching, origin, b"abc")
    probe = ask(matching, Probe, source=ANY if wild else 1, tag=ANY if wild else 7)
    assert probe.done == early
    if not early:
        arrive(matching, origin, b"abc")
    assert isinstance(probe, Probe)
    assert (probe.error, probe.source, probe.frame.length) == (None, 1, 3)
    assert bytes(ask(matching).into or b"") == b"abc"


def test_a_probe_sees_a_large_message_before_its_bytes_are_here() -> None:
    matching, origin = make(early_bytes=1)
    probe = ask(matching, Probe)
    announce(matching, origin, 100, 5)
    assert probe.done
    assert probe.frame.length == 100
    assert origin.granted == []


def test_a_receive_behind_a_probe_gets_the_message_all_the_same() -> None:
    matching, origin = make()
    probes = [ask(matching, Probe), ask(matching, Probe, source=ANY)]
    receive = ask(matching)
    arrive(matching, origin, b"abc")
    assert all(probe.done for probe in probes)
    assert bytes(receive.into or b"") == b"abc"


def test_a_probe_that_is_cancelled_is_no_more() -> None:
    matching, origin = make()
    probe = ask(matching, Probe)
    assert probe.name == "the probe with tag 7"
    probe.cancel()
    assert isinstance(probe.error, Cancelled)
    assert not arrive(matching, origin, b"abc")


# ---------------------------------------------------------------- forms


@pytest.mark.parametrize("form", [OBJECT, PICKLE, BUFFERS])
@pytest.mark.parametrize("into", [None, memoryview(bytearray(3))], ids=["new", "buffer"])
@pytest.mark.parametrize("early", [False, True])
def test_what_is_no_array_is_kept_for_who_asks_for_it(form: int, into: memoryview | None, early: bool) -> None:
    matching, origin = make()
    if early:
        arrive_as(matching, origin, b"abc", form)
    receive = matching.post(into, source=1, space=TAGGED, tag=7)
    if not early:
        arrive_as(matching, origin, b"abc", form)
    error = error_of(receive)
    assert isinstance(error, UsageError)
    assert "rank 3" in str(error)
    assert "it is kept: take it with recv_" in str(error)
    assert matching.probe(source=1, space=TAGGED, tag=7) is not None


def test_a_pickled_object_is_taken_only_by_who_asked_for_it() -> None:
    matching, origin = make()
    arrive_as(matching, origin, b"abc", PICKLE)
    assert "recv_object(pickle=True)" in str(error_of(ask(matching, ObjectReceive, OBJECT)))
    arrive_as(matching, origin, b"def", OBJECT)
    taken = [ask(matching, ObjectReceive, PICKLE) for _ in range(2)]
    assert [bytes(each.into or b"") for each in taken] == [b"abc", b"def"]


def test_an_array_is_no_object() -> None:
    matching, origin = make()
    arrive(matching, origin, bytes(8), dtype=11)
    assert "float32[2], but the receive is for an object" in str(error_of(ask(matching, ObjectReceive, OBJECT)))
    assert ask(matching).error is None


def test_buffers_are_taken_when_they_are_as_long_in_all() -> None:
    matching, origin = make()
    arrive_as(matching, origin, b"abc", BUFFERS, total=1000)
    error = error_of(ask(matching, lambda owner, key, _into, _dtype: BuffersReceive(owner, key, 999, 2)))
    assert isinstance(error, BufferMismatch)
    assert "999 bytes in 2 buffers" in str(error)
    assert "1000 bytes" in str(error)
    assert ask(matching, lambda owner, key, _into, _dtype: BuffersReceive(owner, key, 1000, 2)).error is None
    arrive(matching, origin, b"abc")
    error = error_of(ask(matching, lambda owner, key, _into, _dtype: BuffersReceive(owner, key, 3, 1)))
    assert "a list of buffers" in str(error)


# ---------------------------------------------------------------- parts


def part(matching: Matching, size: int) -> Receive:
    return matching.post(memoryview(bytearray(size)), source=1, space=Space.PART, tag=7, ask=PartReceive)


def test_parts_are_nobody_elses() -> None:
    matching, origin = make()
    arrive_as(matching, origin, b"abc", 0, space=Space.PART)
    assert not ask(matching, source=ANY, tag=ANY).done
    assert bytes(part(matching, 3).into or b"") == b"abc"


def test_a_part_without_bytes_says_that_the_sender_gave_up() -> None:
    matching, origin = make()
    waiting = [part(matching, 3), part(matching, 4)]
    arrive_as(matching, origin, b"", 0, space=Space.PART)
    for receive in waiting:
        assert isinstance(receive.error, Cancelled)
        assert "rank 3" in str(receive.error)


def test_a_part_of_another_length_is_the_senders_fault() -> None:
    matching, origin = make()
    receive = part(matching, 3)
    arrive_as(matching, origin, b"abcd", 0, space=Space.PART)
    assert isinstance(receive.error, PeerMisbehaved)


@dataclass(eq=False)
class Thing:
    order: int


KEYS = st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 1))


@given(st.lists(st.tuples(st.sampled_from(["put", "drop_first", "put_back", "remove"]), KEYS)))
def test_a_queue_is_a_list_for_each_key(steps: list[tuple[str, tuple[int, int, int]]]) -> None:
    fifo: FifoByKey[Thing] = FifoByKey()
    model: dict[tuple[int, int, int], list[Thing]] = {}
    for number, (verb, key) in enumerate(steps):
        queue = model.setdefault(key, [])
        if verb == "put":
            thing = Thing(number)
            fifo.put(key, thing)
            queue.append(thing)
        elif verb == "put_back" and queue:
            thing = queue[len(queue) // 2]  # taken from the middle, it comes back to the middle
            assert fifo.remove(key, thing)
            fifo.put(key, thing)
        elif verb == "drop_first" and queue:
            assert fifo.first(key) is queue.pop(0)
            fifo.drop_first(key)
        elif queue:
            thing = queue.pop(len(queue) // 2)
            assert fifo.remove(key, thing)
        else:
            assert not fifo.remove(key, Thing(0))
        assert fifo.first(key) is (queue[0] if queue else None)
        assert len(fifo) == sum(map(len, model.values()))
        assert {k for k, _ in fifo.heads()} == {k for k, q in model.items() if q}


def test_an_empty_queue_holds_no_trace_of_its_keys() -> None:
    fifo: FifoByKey[Thing] = FifoByKey()
    for tag in range(1000):
        fifo.put((1, 2, tag), Thing(tag))
        fifo.put((1, 2, tag), Thing(tag + 1))
        fifo.drop_first((1, 2, tag))
        fifo.drop_first((1, 2, tag))
    assert not fifo.oldest
    assert not fifo._more
