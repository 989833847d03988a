"""Peers that are authenticated and hostile: each ends with a typed loss, and costs little memory."""

from __future__ import annotations

import random
import struct
import time

import pytest
from bulk_peers import CHUNK, Peer, RawDialer, chunk, header, memory, until
from nexar_native import bulk


class Victim:
    def __init__(self, peer: Peer, channel: bulk.Channel, raw: RawDialer, plain: bool) -> None:
        self.peer, self.channel, self.raw, self.plain = peer, channel, raw, plain

    def send(self, data: bytes) -> None:
        if self.plain:
            self.raw.socket.sendall(data)
        else:
            self.raw.send(data)

    def lost(self) -> tuple[str, str]:
        event = self.peer.event(bulk.LOST)
        assert event[1] == self.channel.id
        detail: tuple[str, str] = event[3]
        return detail


@pytest.fixture
def victim(make_peer, plain: bool):
    peer = make_peer("b")
    with RawDialer(peer.address) as raw:
        raw.open(plain=plain)
        yield Victim(peer, peer.event(bulk.ACCEPTED)[3], raw, plain)


def test_a_violation_is_a_typed_loss_and_the_peer_is_told(victim: Victim) -> None:
    into = bytearray(10)
    victim.channel.expect(1, into)
    victim.send(header(9))
    assert victim.lost() == ("protocol", "a frame of unknown kind")
    with pytest.raises(bulk.ConnectionLost) as caught:
        victim.channel.expect(2, into)
    assert (caught.value.kind, caught.value.reason) == ("protocol", "a frame of unknown kind")
    into += b"x"
    received = victim.raw.socket.recv(1000) if victim.plain else victim.raw.receive()
    assert b"protocol violation: a frame of unknown kind" in received
    until(lambda: victim.peer.endpoint.stats()["connections"] == 0)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (chunk(2, b"data"), "not expected"),
        (chunk(1, b"data" * 4), "another length"),
        (chunk(1, b"dat"), "another length"),
        (header(1, 4, 1, 0, 2**64 - 1), "does not fit"),
        (header(1, 2**32 - 1, 1, 0, 2**32 - 1), "does not fit"),
        (header(1, CHUNK, 1, 0, 2**63), "another length"),
        (header(1, 0, 1, 0, 4), "does not fit"),
        (header(1, 2, 1, 2, 4), "does not fit"),
        (header(1, 0, 1, CHUNK, 4), "beyond"),
        (chunk(1, b"data") + chunk(1, b"data"), "not expected"),
        (b"\x01\x01" + chunk(1, b"data")[2:], "unused fields"),
        (header(2, 0, 1, 5), "impossible"),
        (header(2, 0, 1, 0) * 2, "impossible"),
        (header(3) + header(3), "after the end"),
        (header(3) + chunk(1, b"data"), "after the end"),
        (header(4, 257), "too long"),
        (b"\0" * 32, "unknown kind"),
    ],
)
def test_frames_that_violate_the_protocol(victim: Victim, data: bytes, reason: str) -> None:
    into = bytearray(4)
    victim.channel.expect(1, into)
    victim.send(data)
    kind, text = victim.lost()
    assert kind == "protocol"
    assert reason in text


def test_a_chunk_that_comes_twice(victim: Victim) -> None:
    into = bytearray(2 * CHUNK)
    victim.channel.expect(1, into)
    victim.send(chunk(1, bytes(CHUNK), offset=CHUNK, total=2 * CHUNK))
    victim.send(header(1, CHUNK, 1, CHUNK, 2 * CHUNK))
    assert "arrived already" in victim.lost()[1]
    assert victim.channel.applied(1) == [(CHUNK, 2 * CHUNK)]


def test_an_abort_carries_the_reason(victim: Victim) -> None:
    victim.send(header(4, 256) + b"\xff" * 256)
    kind, reason = victim.lost()
    assert (kind, reason) == ("peer_closed", "\ufffd" * 256)


def test_declared_lengths_allocate_nothing(make_peer, plain: bool) -> None:
    """Thousands of transfers and the largest numbers: memory follows what this side expects."""
    peer = make_peer("b")
    before = memory()
    for number in range(50):
        with RawDialer(peer.address) as raw:
            raw.open(plain=plain, nonce=number.to_bytes(16, "big"))
            channel = peer.event(bulk.ACCEPTED)[3]
            data = header(1, CHUNK, number, 0, 2**62)
            if plain:
                raw.socket.sendall(data)
            else:
                raw.send(data)
            peer.event(bulk.LOST)
            del channel
    until(lambda: peer.endpoint.stats()["connections"] == 0)
    assert memory() - before < 32 << 20


@pytest.mark.parametrize("end", ["close", "reset"])
def test_data_that_is_cut_at_any_byte(make_peer, plain: bool, end: str) -> None:
    peer = make_peer("b")
    content = b"ABCDEFGH"
    whole = chunk(1, content)
    for cut in range(0, 62 if not plain else len(whole), 1 if end == "close" else 7):
        with RawDialer(peer.address) as raw:
            raw.open(plain=plain, nonce=cut.to_bytes(16, "big"))
            channel = peer.event(bulk.ACCEPTED)[3]
            into = bytearray(8)
            channel.expect(1, into)
            raw.socket.sendall((whole if plain else raw.sealed(whole))[:cut])
            if end == "reset":
                raw.socket.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER
            raw.socket.close()
            kind, _ = peer.event(bulk.LOST, channel=channel.id)[3]
            assert kind == "peer_closed" if end == "close" else kind in ("reset", "peer_closed")
            applied = channel.applied(1)
            done = applied[0][1] if applied else 0
            assert done <= max(0, cut - 32)
            assert into == content[:done] + bytes(8 - done)
            if plain and end == "close":
                assert done == max(0, cut - 32)


def test_changed_ciphertext_is_never_applied(make_peer) -> None:
    peer = make_peer("b")
    for at in range(3, 62, 3):  # the bytes before are not part of what TLS protects
        with RawDialer(peer.address) as raw:
            raw.open(nonce=at.to_bytes(16, "big"))
            channel = peer.event(bulk.ACCEPTED)[3]
            into = bytearray(8)
            channel.expect(1, into)
            sealed = bytearray(raw.sealed(chunk(1, b"ABCDEFGH")))
            sealed[at] ^= 1
            raw.socket.sendall(sealed)
            raw.socket.shutdown(1)
            kind, _ = peer.event(bulk.LOST, channel=channel.id)[3]
            assert kind in ("protocol", "peer_closed")
            assert not any(into)


@pytest.mark.parametrize("seed", range(8))
def test_random_bytes_end_the_channel(make_peer, plain: bool, seed: int) -> None:
    """Valid frames, damaged here and there, in pieces of any size."""
    generator = random.Random(seed)
    peer = make_peer("b")
    for number in range(8):
        with RawDialer(peer.address) as raw:
            raw.open(plain=plain, nonce=number.to_bytes(16, "big"))
            channel = peer.event(bulk.ACCEPTED)[3]
            into = [bytearray(1000) for _ in range(5)]
            for transfer, each in enumerate(into):
                channel.expect(transfer, each)
            frames = b"".join(chunk(transfer, b"x" * 1000) for transfer in range(5))
            damaged = bytearray(frames)
            for _ in range(generator.randrange(1, 4)):
                damaged[generator.randrange(5) * 1032 + generator.randrange(32)] = generator.randrange(256)
            damaged += header(9)
            at = 0
            try:
                while at < len(damaged):
                    count = generator.choice([1, 31, 33, 500, 2000])
                    piece = bytes(damaged[at : at + count])
                    raw.socket.sendall(piece) if plain else raw.send(piece)
                    at += count
            except OSError:
                pass
            assert peer.event(bulk.LOST, channel=channel.id)[3][0] in ("protocol", "peer_closed")
            for each in into:
                assert each.strip(b"x").strip(b"\0") == b"" or b"x" in each
    until(lambda: peer.endpoint.stats()["connections"] == 0)


def test_a_peer_that_reads_nothing_costs_bounded_memory(victim: Victim) -> None:
    data = bytes(64 << 20)
    before = memory()
    victim.channel.send(1, data)
    counted = -1.0
    while counted != (counted := victim.channel.stats()["bytes_sent"]):
        time.sleep(0.2)
    assert counted < len(data)
    assert memory() - before < 16 << 20
    victim.channel.abort("enough")
    until(lambda: victim.peer.endpoint.stats()["connections"] == 0)


def test_empty_records_without_end(make_peer) -> None:
    peer = make_peer("b")
    with RawDialer(peer.address) as raw:
        raw.open()
        channel = peer.event(bulk.ACCEPTED)[3]
        into = bytearray(4)
        channel.expect(1, into)
        raw.send(*[b"x"[:0] for _ in range(10)], chunk(1, b"data"))
        assert peer.event(bulk.LANDED, bulk.LOST)[0] == bulk.LANDED
