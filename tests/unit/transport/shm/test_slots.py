"""Chunk slots and the payloads that pass through them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.transport.base import CarrierLost, Redirected
from nexar.transport.shm.lifetime import Lifetime
from nexar.transport.shm.payload_in import MOVED, NOTHING, PayloadReceiver
from nexar.transport.shm.payload_out import PayloadSender
from nexar.transport.shm.ring import Corrupt
from nexar.transport.shm.slots import Chunk, SlotReader, SlotWriter

CHUNK = 64
HEAD, TAIL = 0, 8


class Slots:
    def __init__(self, count: int = 3) -> None:
        self.counters = memoryview(bytearray(128)).cast("Q")
        descriptors = memoryview(bytearray(32 * count))
        memory = tuple(memoryview(bytearray(CHUNK)) for _ in range(count))
        self.writer = SlotWriter(self.counters, HEAD, TAIL, descriptors, memory)
        self.reader = SlotReader(self.counters, HEAD, TAIL, descriptors, memory)
        self.sender = PayloadSender(self.writer)
        self.life = Lifetime()
        self.receiver = PayloadReceiver(self.reader, self.life)

    def move_all(self) -> list[int]:
        done = []
        while self.sender.pump(1) + (outcome := self.receiver.receive()) != NOTHING:
            if outcome >= 0:
                done.append(outcome)
        return done


@given(st.lists(st.integers(0, 5 * CHUNK), min_size=1, max_size=8))
def test_payloads_of_any_size_arrive_whole_side_by_side(sizes: list[int]) -> None:
    slots = Slots()
    data = [bytes((number + index) % 251 for index in range(size)) for number, size in enumerate(sizes)]
    into = [bytearray(size) for size in sizes]
    for transfer, (source, target) in enumerate(zip(data, into, strict=True)):
        slots.receiver.expect(transfer, memoryview(target))
        slots.sender.add(transfer, memoryview(source))
    assert sorted(slots.move_all()) == list(range(len(sizes)))
    assert [bytes(target) for target in into] == data


def test_a_small_payload_overtakes_a_large_one() -> None:
    slots = Slots()
    for transfer, size in ((1, 50 * CHUNK), (2, CHUNK)):
        slots.receiver.expect(transfer, memoryview(bytearray(size)))
        slots.sender.add(transfer, memoryview(bytes(size)))
    assert slots.move_all() == [2, 1]


def test_a_redirected_payload_continues_elsewhere_and_leaves_the_old_memory_alone() -> None:
    slots = Slots(1)
    data, old, new = bytes(range(128)), bytearray(128), bytearray(128)
    slots.receiver.expect(7, memoryview(old))
    slots.sender.add(7, memoryview(data))
    slots.sender.pump(1)
    assert slots.receiver.receive() == MOVED
    assert slots.receiver.redirect(7, memoryview(new)) is Redirected.MOVED
    old[:] = bytes(128)
    assert slots.move_all() == [7]
    assert new == data
    assert old == bytes(128)
    assert slots.receiver.redirect(7, None) is Redirected.LANDED


def test_from_the_moment_of_the_end_nothing_is_expected_moved_or_landed() -> None:
    slots = Slots(1)
    slots.receiver.expect(7, memoryview(bytearray(128)))
    slots.life.end(CarrierLost("closed", "the end"))  # whoever ends it clears only after that
    assert slots.receiver.redirect(7, memoryview(bytearray(128))) is None
    assert slots.receiver.redirect(7, None) is None
    assert not slots.receiver.expect(8, memoryview(bytearray(1)))


def test_a_discarded_payload_is_drained_and_not_reported() -> None:
    slots = Slots()
    slots.receiver.expect(7, memoryview(bytearray(200)))
    slots.sender.add(7, memoryview(bytes(200)))
    slots.receiver.redirect(7, None)
    assert slots.move_all() == []


@pytest.mark.parametrize("discard_first", [True, False])
def test_a_withdrawn_payload_is_forgotten_on_both_sides(discard_first: bool) -> None:
    slots = Slots(1)
    slots.receiver.expect(7, memoryview(bytearray(200)))
    slots.sender.add(7, memoryview(bytes(200)))
    slots.sender.pump(1)
    slots.sender.withdraw(7)
    if discard_first:
        slots.receiver.redirect(7, None)
    assert slots.move_all() == []
    if not discard_first:
        slots.receiver.redirect(7, None)
    assert not slots.sender.waiting
    assert slots.receiver.expect(7, memoryview(bytearray(1))), "its number is free again"


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(9, 0, 10, 100),  # nobody expects it
        Chunk(7, 10, 10, 100),  # not the next byte
        Chunk(7, 0, 10, 99),  # another size
        Chunk(7, 0, 0, 100),  # nothing in it
        Chunk(7, 0, CHUNK + 1, 100),  # more than a slot holds
        Chunk(7, 2**64 - 1, 10, 100),
        Chunk(9, 0, 0, 2**64 - 1),  # the end of what nobody expects
    ],
)
def test_a_chunk_that_does_not_fit_is_refused_and_touches_nothing(chunk: Chunk) -> None:
    slots = Slots()
    into = bytearray(100)
    slots.receiver.expect(7, memoryview(into))
    slots.writer.write(chunk._replace(length=min(chunk.length, CHUNK)), memoryview(b"x" * min(chunk.length, CHUNK)))
    if chunk.length > CHUNK:
        slots.reader._descriptors.cast("Q")[2] = chunk.length
    with pytest.raises(Corrupt):
        slots.receiver.receive()
    assert into == bytes(100)


@pytest.mark.parametrize("head", [4, 2**63])
def test_a_chunk_head_that_runs_away_is_refused(head: int) -> None:
    slots = Slots()
    slots.counters[HEAD] = head
    with pytest.raises(Corrupt):
        slots.receiver.receive()


def test_a_chunk_tail_that_runs_away_is_refused() -> None:
    slots = Slots()
    slots.sender.add(1, memoryview(bytes(10 * CHUNK)))
    slots.counters[TAIL] = 77
    with pytest.raises(Corrupt):
        slots.sender.pump(9)
