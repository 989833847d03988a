"""Payloads: into their place, elsewhere on the way, or nowhere."""

import gc
import random

import pytest

from nexar.transport.base import CarrierLost, Redirected
from nexar.transport.quic.protocol import StreamType, encode_preamble
from nexar.transport.quic.transport import QuicSettings
from nexar.wire.frame import Lane, encode_finish
from tests.conformance.harness import wait_for
from tests.unit.transport.quic.scene import send

MIB = 1 << 20


def test_a_payload_lands_in_the_memory_it_was_expected_in(scene):
    pair = scene.pair()
    data, into = bytes(range(256)) * 4096 * 5, bytearray(5 * MIB)
    pair.right.expect_payload(9, memoryview(into))
    pair.left.send_payload(9, memoryview(data))
    pair.drive(lambda: pair.right_sink.payloads)
    assert pair.right_sink.payloads == [9]
    assert into == data


def test_an_empty_payload_arrives_too(scene):
    pair = scene.pair()
    pair.right.expect_payload(1, memoryview(bytearray()))
    pair.left.send_payload(1, memoryview(b""))
    pair.drive(lambda: pair.right_sink.payloads == [1])


def test_payloads_wait_for_streams_where_the_peer_allows_few(scene):
    pair = scene.pair(QuicSettings(max_streams=3))
    buffers = [bytearray(10_000) for _ in range(40)]
    for transfer, buffer in enumerate(buffers):
        pair.right.expect_payload(transfer, memoryview(buffer))
    for transfer in range(40):
        pair.left.send_payload(transfer, memoryview(bytes([transfer]) * 10_000))
    pair.left.finish()
    pair.drive(lambda: pair.right_sink.finished)
    assert sorted(pair.right_sink.payloads) == list(range(40))
    assert [buffer[-1] for buffer in buffers] == list(range(40))


def test_a_payload_that_waits_for_a_stream_can_be_withdrawn(scene):
    pair = scene.pair(QuicSettings(max_streams=2))
    send(pair.left, b"opens the control stream")
    buffers = [bytearray(1000) for _ in range(6)]
    for transfer, buffer in enumerate(buffers):
        pair.right.expect_payload(transfer, memoryview(buffer))
        pair.left.send_payload(transfer, memoryview(bytes(1000)))
    for transfer in range(1, 6):
        pair.left.withdraw_payload(transfer)
    pair.left.finish()
    pair.drive(lambda: pair.right_sink.finished)
    assert pair.right_sink.payloads == [0]


def test_small_frames_overtake_a_large_payload(scene):
    pair = scene.pair()
    size = 256 * MIB
    into = memoryview(bytearray(size))
    pair.right.expect_payload(1, into)
    pair.left.send_payload(1, memoryview(bytearray(size)))
    for number in range(20):
        send(pair.left, b"urgent", Lane.CONTROL, message=number)
        pair.drive(lambda number=number: len(pair.right_sink.frames) == number + 1)
    assert pair.right_sink.payloads == []
    pair.drive(lambda: pair.right_sink.payloads == [1], timeout=40)


class SlowPeer:
    """Sends payload 5 by hand, so that it is known how much of it has come."""

    def __init__(self, scene, size):
        self.scene = scene
        self.node = scene.node(1)
        self.connection = scene.unauthenticated(self.node)
        scene.drive(lambda: self.node.acceptor.carriers)
        self.carrier, self.sink = self.node.acceptor.carriers[0], self.node.acceptor.sinks[0]
        self.data = bytes(1 + number % 251 for number in range(size))
        self.sent = 0
        self.stream = self.connection.open_uni()
        self.stream.write(encode_preamble(StreamType.PAYLOAD, 5, size=size))

    def send(self, until, into):
        """The bytes up to `until`, and wait for them to land."""
        self.stream.write(self.data[self.sent : until])
        self.sent = until
        self.scene.drive(lambda: into[until - 1] == self.data[until - 1])


def test_a_payload_redirected_on_the_way_lands_elsewhere_whole(scene):
    peer = SlowPeer(scene, 100_000)
    into, elsewhere = bytearray(100_000), bytearray(100_000)
    peer.carrier.expect_payload(5, memoryview(into))
    peer.send(70_000, into)
    assert peer.carrier.redirect_payload(5, memoryview(elsewhere)) is Redirected.MOVED
    assert elsewhere[:70_000] == peer.data[:70_000]
    into[:] = bytes(len(into))
    peer.send(100_000, elsewhere)
    scene.drive(lambda: peer.sink.payloads == [5])
    assert elsewhere == peer.data
    assert not any(into)


def test_a_payload_can_be_redirected_again_and_again(scene):
    peer = SlowPeer(scene, 10_000)
    into = bytearray(10_000)
    peer.carrier.expect_payload(5, memoryview(into))
    for step in range(1, 10):
        peer.send(step * 1000, into)
        into = bytearray(10_000)
        assert peer.carrier.redirect_payload(5, memoryview(into)) is Redirected.MOVED
    peer.send(10_000, into)
    scene.drive(lambda: peer.sink.payloads == [5])
    assert into == peer.data


def test_a_discarded_payload_is_never_reported_and_its_memory_is_free(scene):
    peer = SlowPeer(scene, 10_000)
    into = bytearray(10_000)
    peer.carrier.expect_payload(5, memoryview(into))
    peer.send(5000, into)
    assert peer.carrier.redirect_payload(5, None) is Redirected.MOVED
    into[:] = bytes(len(into))
    control = peer.connection.open_uni()
    control.write(encode_preamble(StreamType.ORDERED) + encode_finish(2))
    control.finish()
    scene.drive(lambda: peer.sink.finished)
    assert peer.sink.payloads == []
    assert not any(into)
    assert peer.carrier.redirect_payload(5, None) is Redirected.UNKNOWN


def test_a_redirect_to_memory_of_another_size_is_refused(scene):
    pair = scene.pair()
    pair.right.expect_payload(5, memoryview(bytearray(10)))
    with pytest.raises(ValueError, match="10 bytes"):
        pair.right.redirect_payload(5, memoryview(bytearray(11)))


def test_a_payload_discarded_before_its_stream_came_is_no_offence(scene):
    pair = scene.pair()
    pair.right.expect_payload(5, memoryview(bytearray(10)))
    assert pair.right.redirect_payload(5, None) is Redirected.MOVED
    pair.left.send_payload(5, memoryview(bytes(10)))
    pair.left.finish()
    pair.drive(lambda: pair.right_sink.finished)
    assert pair.right.stats()["unexpected_payloads"] == 1


def test_a_payload_redirected_before_its_stream_came_lands_elsewhere(scene):
    pair = scene.pair()
    elsewhere = bytearray(10)
    pair.right.expect_payload(5, memoryview(bytearray(10)))
    assert pair.right.redirect_payload(5, memoryview(elsewhere)) is Redirected.MOVED
    pair.left.send_payload(5, memoryview(b"0123456789"))
    pair.drive(lambda: pair.right_sink.payloads == [5])
    assert elsewhere == b"0123456789"


def test_a_redirect_that_comes_too_late_says_so(scene):
    pair = scene.pair()
    pair.right.expect_payload(5, memoryview(bytearray(10)))
    pair.left.send_payload(5, memoryview(bytes(10)))
    pair.drive(lambda: pair.right_sink.payloads == [5])
    assert pair.right.redirect_payload(5, memoryview(bytearray(10))) is Redirected.COMPLETE
    assert pair.right.redirect_payload(77, None) is Redirected.UNKNOWN


def _landed_unnoticed(scene):
    """A payload that is whole, while nobody has looked yet: native code took it in."""
    peer, into = SlowPeer(scene, 10_000), bytearray(10_000)
    peer.carrier.expect_payload(5, memoryview(into))
    peer.send(5000, into)
    peer.stream.write(peer.data[5000:])
    wait_for(lambda: into[-1], "the last byte")
    assert peer.sink.payloads == []
    return peer, into


def test_a_payload_that_landed_unnoticed_cannot_be_redirected_and_is_reported(scene):
    peer, into = _landed_unnoticed(scene)
    assert peer.carrier.redirect_payload(5, memoryview(bytearray(10_000))) is Redirected.COMPLETE
    assert peer.carrier.redirect_payload(5, None) is Redirected.COMPLETE
    scene.drive(lambda: peer.sink.payloads == [5])
    assert into == peer.data


def test_a_payload_that_landed_unnoticed_is_reported_before_the_loss_that_came_behind_it(scene):
    peer, _ = _landed_unnoticed(scene)
    peer.carrier.fail(CarrierLost("fault", "a test ends it"))
    with pytest.raises(CarrierLost, match="a test ends it"):
        peer.carrier.redirect_payload(5, None)
    scene.drive(lambda: peer.sink.lost)
    assert peer.sink.payloads == [5]
    assert [lost.reason for lost in peer.sink.lost] == ["a test ends it"]


def test_a_withdrawn_payload_stops_and_may_be_sent_again(scene):
    pair = scene.pair()
    data, into = bytes(range(256)) * (96 * MIB // 256), bytearray(96 * MIB)
    pair.right.expect_payload(5, memoryview(into))
    pair.left.send_payload(5, memoryview(data))  # more than fits into the windows: it cannot all leave unread
    pair.left.withdraw_payload(5)
    send(pair.left, b"withdrawn")
    pair.drive(lambda: pair.right_sink.frames)
    assert pair.right_sink.payloads == []
    pair.left.send_payload(5, memoryview(data))
    pair.drive(lambda: pair.right_sink.payloads == [5])
    assert into == data


def test_payloads_withdrawn_at_once_are_no_offence(scene):
    pair = scene.pair()
    for transfer in range(200):
        pair.right.expect_payload(transfer, memoryview(bytearray(100_000)))
        pair.left.send_payload(transfer, memoryview(bytes(100_000)))
        pair.left.withdraw_payload(transfer)
    pair.left.finish()
    pair.drive(lambda: pair.right_sink.finished or pair.right_sink.lost)
    assert pair.right_sink.lost == []


@pytest.mark.parametrize("seed", range(8))
def test_whatever_becomes_of_the_payloads_the_polite_end_comes(scene, seed):
    chance = random.Random(seed)
    pair = scene.pair(QuicSettings(max_streams=chance.choice([4, 4096])))
    kept = set()
    for transfer in range(60):
        size = chance.choice([0, 1, 5000, 300_000])
        pair.right.expect_payload(transfer, memoryview(bytearray(size)))
        pair.left.send_payload(transfer, memoryview(bytes(size)))
        send(pair.left, b"envelope", Lane.DATA, transfer % 5)
        outcome = chance.choice(["arrive", "withdraw", "discard", "redirect"])
        for node in scene.nodes * chance.randrange(4):
            node.transport.poll()
        if outcome == "withdraw":
            pair.left.withdraw_payload(transfer)
        elif outcome == "discard":
            pair.right.redirect_payload(transfer, None)
        else:
            kept.add(transfer)
        if outcome == "redirect":
            pair.right.redirect_payload(transfer, memoryview(bytearray(size)))
    pair.left.finish()
    pair.right.finish()
    pair.drive(lambda: not any(node.transport._carriers for node in scene.nodes))
    assert pair.left_sink.lost == pair.right_sink.lost == []
    assert pair.left_sink.finished == pair.right_sink.finished == 1
    assert kept <= set(pair.right_sink.payloads)


def test_withdrawing_frees_the_senders_memory(scene):
    pair = scene.pair()
    data = bytearray(96 * MIB)
    pair.right.expect_payload(5, memoryview(bytearray(96 * MIB)))
    pair.left.send_payload(5, memoryview(data))
    pair.left.withdraw_payload(5)
    pair.left.withdraw_payload(5)
    gc.collect()
    data.clear()  # BufferError if anybody still held it
