"""Payloads: from the sender's memory into the receiver's, and out of both on demand."""

import gc
import mmap
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nexar.transport.base import Redirected
from tests.conformance.harness import Pair, anonymous_bytes, digest, pattern
from tests.processes.scale import measured

MIB = 1 << 20


@pytest.mark.parametrize("size", [0, 1, 65_537, 3 * MIB + 1, 64 * MIB])
def test_a_payload_of_any_size_arrives_intact(pair: Pair, size: int) -> None:
    data, into = memoryview(bytearray(pattern(size))), memoryview(bytearray(size))
    pair.right.carrier.expect_payload(7, into)
    pair.left.carrier.send_payload(7, data)
    pair.until(lambda: pair.right.received.payloads, f"a payload of {size} bytes")
    assert pair.right.received.payloads == [7]
    assert digest(into) == digest(data)


def test_a_payload_touches_nothing_beside_its_memory(pair: Pair) -> None:
    memory = bytearray(b"\xaa" * 300_000)
    pair.right.carrier.expect_payload(1, memoryview(memory)[1000:201_000])
    pair.left.carrier.send_payload(1, memoryview(pattern(200_000)))
    pair.until(lambda: pair.right.received.payloads, "a payload")
    assert memory[:1000] == b"\xaa" * 1000
    assert memory[201_000:] == b"\xaa" * 99_000
    assert memory[1000:201_000] == pattern(200_000)


def test_many_payloads_in_both_directions_at_once(pair: Pair) -> None:
    sizes = [0, 1, 100, 70_000, 2 * MIB + 3, 500_000] * 3
    landed: dict[tuple[str, int], bytearray] = {}
    kept = []
    for transfer, size in enumerate(sizes):
        for sender, receiver, name in ((pair.left, pair.right, "right"), (pair.right, pair.left, "left")):
            landed[name, transfer] = bytearray(size)
            receiver.carrier.expect_payload(transfer, memoryview(landed[name, transfer]))
            kept.append(memoryview(pattern(size, transfer + 1)))
            sender.carrier.send_payload(transfer, kept[-1])
    pair.until(
        lambda: len(pair.left.received.payloads) == len(pair.right.received.payloads) == len(sizes),
        "payloads both ways",
    )
    for (_, transfer), memory in landed.items():
        assert memory == pattern(sizes[transfer], transfer + 1)


def test_a_payload_waits_in_the_senders_memory_while_the_peer_does_not_poll(pair: Pair) -> None:
    size = 300 * MIB
    with mmap.mmap(-1, size, prot=mmap.PROT_READ) as source, mmap.mmap(-1, size) as target:
        with memoryview(source) as data, memoryview(target) as into:
            pair.right.carrier.expect_payload(1, into)
            before = anonymous_bytes()
            pair.left.carrier.send_payload(1, data)
            for _ in range(2000):
                pair.left.node.poll()
            grown = anonymous_bytes() - before
            pair.left.carrier.abort("enough")
            pair.right.carrier.abort("enough")
        assert grown < 96 * MIB


def test_what_has_arrived_moves_along_when_a_payload_is_redirected(pair: Pair) -> None:
    old, new = _begun(pair, transfer=5)
    assert pair.right.carrier.redirect_payload(5, memoryview(new)) is Redirected.MOVED
    old[:] = b"\xaa" * len(old)
    pair.until(lambda: pair.right.received.payloads, "the redirected payload")
    assert digest(new) == digest(pattern(len(new)))
    assert old == b"\xaa" * len(old)
    pair.check_usable()


def test_a_discarded_payload_is_not_reported_and_leaves_its_memory_alone(pair: Pair) -> None:
    old, _ = _begun(pair, transfer=5)
    assert pair.right.carrier.redirect_payload(5, None) is Redirected.MOVED
    old[:] = b"\xaa" * len(old)
    pair.check_usable()
    pair.quieten()
    assert 5 not in pair.right.received.payloads
    assert old == b"\xaa" * len(old)


def test_a_payload_discarded_before_its_first_byte_is_not_reported(pair: Pair) -> None:
    into = bytearray(5 * MIB)
    pair.right.carrier.expect_payload(1, memoryview(into))
    assert pair.right.carrier.redirect_payload(1, None) is Redirected.MOVED
    pair.left.carrier.send_payload(1, memoryview(pattern(5 * MIB)))
    pair.check_usable()
    pair.quieten()
    assert 1 not in pair.right.received.payloads
    assert not any(into)


def test_redirecting_what_is_unknown_or_has_landed_says_so(pair: Pair) -> None:
    into = bytearray(100)
    pair.right.carrier.expect_payload(1, memoryview(into))
    pair.left.carrier.send_payload(1, memoryview(pattern(100)))
    pair.until(lambda: pair.right.received.payloads, "a payload")
    other = bytearray(100)
    assert pair.right.carrier.redirect_payload(1, memoryview(other)) is Redirected.COMPLETE
    assert pair.right.carrier.redirect_payload(1, None) is Redirected.COMPLETE
    assert pair.right.carrier.redirect_payload(404, None) is Redirected.UNKNOWN
    assert into == pattern(100)
    assert not any(other)


def test_a_withdrawn_payload_is_not_read_any_more(pair: Pair) -> None:
    data = bytearray(pattern(64 * MIB))
    into = bytearray(64 * MIB)
    pair.right.carrier.expect_payload(5, memoryview(into))
    pair.left.carrier.send_payload(5, memoryview(data))
    pair.until(lambda: into[0] or pair.right.received.payloads, "the first bytes of a payload")
    assert not pair.right.received.payloads, "a poll took in 64 MiB at once: frames waited meanwhile"
    pair.left.carrier.withdraw_payload(5)
    original = pattern(64 * MIB)
    data[:] = bytes(len(data))  # whatever arrives from now on is either the original or was never written
    pair.check_usable()
    pair.quieten()
    assert pair.right.carrier.redirect_payload(5, None) is Redirected.MOVED
    arrived = into.find(0)
    assert arrived > 0
    assert digest(memoryview(into)[:arrived]) == digest(memoryview(original)[:arrived])
    pair.check_usable()
    assert 5 not in pair.right.received.payloads


def test_a_payload_withdrawn_and_discarded_in_mid_transfer_leaves_the_link_usable(pair: Pair) -> None:
    for transfer in range(3):
        _begun(pair, transfer)
        pair.left.carrier.withdraw_payload(transfer)
        pair.right.carrier.redirect_payload(transfer, None)
        pair.check_usable()
    assert {0, 1, 2}.isdisjoint(pair.right.received.payloads)


def test_withdrawing_what_is_unknown_or_was_delivered_is_ignored(pair: Pair) -> None:
    pair.left.carrier.withdraw_payload(404)
    pair.check_usable()
    for transfer in (1_000_000, 1_000_001):
        pair.left.carrier.withdraw_payload(transfer)
    pair.check_usable()


def test_a_payload_withdrawn_at_once_never_arrives(pair: Pair) -> None:
    pair.right.carrier.expect_payload(1, memoryview(bytearray(30 * MIB)))
    pair.left.carrier.send_payload(1, memoryview(bytearray(30 * MIB)))
    pair.left.carrier.withdraw_payload(1)
    pair.check_usable()
    pair.quieten()
    assert 1 not in pair.right.received.payloads


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """So that only what nobody holds any more is freed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("fate", ["lands", "is discarded", "is withdrawn"])
def test_memory_is_let_go_at_once_when_its_payload(pair: Pair, fate: str) -> None:
    """Not when the collector comes by: that may be many payloads later, and each may be large."""
    held = _memory_of_a_payload_that(pair, fate)
    pair.check_usable()
    pair.quieten()
    assert [memory() is None for memory in held] == [True, True]


def _memory_of_a_payload_that(pair: Pair, fate: str) -> list[weakref.ref[Any]]:
    size = 64 * MIB
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    pair.right.carrier.expect_payload(5, target.data)
    pair.left.carrier.send_payload(5, source.data)
    pair.until(lambda: target[0], "the first bytes of a payload")
    if fate == "lands":
        pair.until(lambda: pair.right.received.payloads, "a payload")
    elif fate == "is withdrawn":
        pair.left.carrier.withdraw_payload(5)
    pair.right.carrier.redirect_payload(5, None)
    return [weakref.ref(source), weakref.ref(target)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_payload_of_5_gib_passes_with_little_memory(
    pair: Pair, run_slow: bool, tmp_path: Path, record_property: Any
) -> None:
    """Source: pages nobody ever wrote. Target: a file's. So what is anonymous is what the transport itself holds."""
    size = 5 << 30 if run_slow else 300 * MIB
    begin = time.monotonic()
    with (tmp_path / "target").open("wb+") as file:
        file.truncate(size)
        source, target = mmap.mmap(-1, size, prot=mmap.PROT_READ), mmap.mmap(file.fileno(), size)
        with source, target, memoryview(source) as data, memoryview(target) as into:
            into[size - 1] = into[size // 2] = into[0] = 1
            before = peak = anonymous_bytes()
            pair.right.carrier.expect_payload(1, into)
            pair.left.carrier.send_payload(1, data)
            while not pair.right.received.payloads:
                marks = iter(range(100))
                pair.until(lambda: pair.right.received.payloads or next(marks, None) is None, "a large payload")  # noqa: B023
                peak = max(peak, anonymous_bytes())
            assert [into[0], into[size // 2], into[size - 1]] == [0, 0, 0]
            pair.left.carrier.withdraw_payload(1)  # what was sent stays borrowed until then
    (tmp_path / "target").unlink()
    seconds = round(time.monotonic() - begin, 1)
    measured(record_property, mib=size // MIB, seconds=seconds, growth_mib=(peak - before) // MIB)
    assert peak - before < 96 * MIB


def _begun(pair: Pair, transfer: int) -> tuple[bytearray, bytearray]:
    """A large payload of which some bytes have arrived and most have not; its memory, and other memory as large."""
    size = 64 * MIB
    old = bytearray(size)
    pair.right.carrier.expect_payload(transfer, memoryview(old))
    pair.left.carrier.send_payload(transfer, memoryview(pattern(size)))
    pair.until(lambda: old[0] or transfer in pair.right.received.payloads, "the first bytes of a payload")
    assert transfer not in pair.right.received.payloads, "a poll took in 64 MiB at once: frames waited meanwhile"
    return old, bytearray(size)
