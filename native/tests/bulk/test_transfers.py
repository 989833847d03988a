"""Transfers: sizes, order, reductions, redirecting, withdrawing, finishing."""

from __future__ import annotations

import random
import threading

import pytest
from bulk_peers import CHUNK, Channels, RawDialer, chunk, connect, dial, header, pattern, until
from nexar_native import bulk

np = pytest.importorskip("numpy")

SUM, PROD, MIN, AVG, BAND = 1, 2, 3, 5, 6
INT8, INT32, FLOAT16, FLOAT32, FLOAT64, COMPLEX128 = 2, 4, 10, 11, 12, 14


def land(pair: Channels, transfer: int = 1) -> None:
    event = pair.b.event(bulk.LANDED)
    assert event == (bulk.LANDED, pair.far.id, transfer, None)


@pytest.mark.parametrize("size", [0, 1, 31, 16384, CHUNK - 1, CHUNK, CHUNK + 1, 7 * CHUNK + 12345])
def test_a_transfer_arrives(channels: Channels, size: int) -> None:
    data, into = pattern(size), bytearray(size)
    channels.far.expect(1, into)
    channels.near.send(1, data)
    land(channels)
    assert into == data
    assert channels.a.event(bulk.SENT) == (bulk.SENT, channels.near.id, 1, None)
    assert channels.near.stats()["bytes_sent"] == channels.far.stats()["bytes_received"] == size
    assert channels.near.stats()["sending"] == channels.far.stats()["expected"] == 0
    data += b"x"  # neither is borrowed any longer
    into += b"x"


def test_the_largest_transfer_number(channels: Channels) -> None:
    into = bytearray(1)
    channels.far.expect(2**64 - 1, into)
    channels.near.send(2**64 - 1, b"x")
    land(channels, 2**64 - 1)
    with pytest.raises(OverflowError):
        channels.far.expect(2**64, into)


def test_many_transfers_in_both_directions_at_once(channels: Channels) -> None:
    sizes = [0, 1, CHUNK * 9 + 1, 100, CHUNK, 3 * CHUNK - 7] * 5
    near_data = [pattern(size, 10 + at) for at, size in enumerate(sizes)]
    far_data = [pattern(size, 90 + at) for at, size in enumerate(sizes)]
    near_into = [bytearray(size) for size in sizes]
    far_into = [bytearray(size) for size in sizes]
    for at in range(len(sizes)):
        channels.near.expect(at, near_into[at])
        channels.far.expect(at, far_into[at])
    for at in range(len(sizes)):
        channels.near.send(at, near_data[at])
        channels.far.send(at, far_data[at])
    for peer in (channels.a, channels.b):
        landed = {peer.event(bulk.LANDED)[2] for _ in sizes}
        assert landed == set(range(len(sizes)))
    assert (near_into, far_into) == (far_data, near_data)


def test_several_channels_between_two_peers(make_peer, plain: bool) -> None:
    a, b = make_peer("a"), make_peer("b")
    pairs = [connect(a, b, plain=plain) for _ in range(5)] + [connect(b, a, name="a", plain=plain)]
    for at, pair in enumerate(pairs):
        data, into = pattern(100_000, at), bytearray(100_000)
        pair.far.expect(1, into)
        pair.near.send(1, data)
        assert pair.b.event(bulk.LANDED)[1] == pair.far.id
        assert into == data
    assert a.endpoint.stats()["channels"] == len(pairs)


def test_all_connections_carry_chunks(make_peer, plain: bool) -> None:
    """A connection that is stopped does not stop the transfer: the others take its share."""
    a, b = make_peer("a", threads=4), make_peer("b", threads=4)
    pair = connect(a, b, connections=8, plain=plain)
    data, into = pattern(40 * CHUNK), bytearray(40 * CHUNK)
    pair.far.expect(1, into)
    pair.near.send(1, data)
    land(pair)
    assert into == data
    assert b.endpoint.stats()["threads"] == 4


def test_memory_of_other_kinds(channels: Channels) -> None:
    data = np.arange(1000, dtype=np.float64).reshape(10, 100)
    into = np.zeros((1000,), np.int64)
    channels.far.expect(1, into)
    channels.near.send(1, data)
    land(channels)
    assert into.tobytes() == data.tobytes()
    with pytest.raises((BufferError, ValueError)):
        channels.far.expect(2, b"read only")
    with pytest.raises((BufferError, ValueError)):
        channels.near.send(2, data.T)
    with pytest.raises(TypeError):
        channels.near.send(2, "text")  # type: ignore[arg-type]


def test_a_number_in_use_is_an_error(channels: Channels) -> None:
    channels.far.expect(1, bytearray(5))
    with pytest.raises(ValueError, match="expected already"):
        channels.far.expect(1, bytearray(5))
    channels.far.redirect(1, None)
    with pytest.raises(ValueError, match="expected already"):
        channels.far.expect(1, bytearray(5))


def test_a_landed_number_may_be_used_again(channels: Channels) -> None:
    for content in (b"one", b"two"):
        into = bytearray(3)
        channels.far.expect(1, into)
        channels.near.send(1, content)
        land(channels)
        channels.a.event(bulk.SENT)
        assert into == content


# -- reductions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "kind", "reference"),
    [
        ((SUM, FLOAT32), np.float32, np.add),
        ((PROD, FLOAT64), np.float64, np.multiply),
        ((MIN, INT8), np.int8, np.minimum),
        ((SUM, FLOAT16), np.float16, np.add),
        ((SUM, COMPLEX128), np.complex128, np.add),
        ((AVG, FLOAT32), np.float32, np.add),
        ((BAND, INT32), np.int32, np.bitwise_and),
    ],
)
@pytest.mark.parametrize("count", [0, 1, 40_000, 300_001])
def test_a_transfer_is_reduced(channels: Channels, codes: tuple[int, int], kind, reference, count: int) -> None:
    generator = np.random.default_rng(count)
    data = (generator.standard_normal(count) * 50).astype(kind)
    into = (generator.standard_normal(count) * 50).astype(kind)
    expected = reference(into, data)
    channels.far.expect(1, into, op=codes[0], dtype=codes[1])
    channels.near.send(1, data)
    land(channels)
    assert into.tobytes() == expected.tobytes()


def test_the_order_of_the_operands(channels: Channels) -> None:
    """Of two NaNs, of a product of complex numbers and the like the order may show; of a minimum of zeros it does."""
    into, data = np.array([0.0, -0.0]), np.array([-0.0, 0.0])
    for before in (False, True):
        total = into.copy()
        channels.far.expect(1, total, op=MIN, dtype=FLOAT64, before=before)
        channels.near.send(1, data)
        land(channels)
        channels.a.event(bulk.SENT)
        operands = (data, into) if before else (into, data)
        assert total.tobytes() == np.where(operands[0] < operands[1], operands[0], operands[1]).tobytes()


def test_reductions_that_are_not_defined_are_errors(channels: Channels) -> None:
    for op, dtype, size in ((BAND, FLOAT32, 8), (99, 1, 8), (SUM, 0, 8), (0, FLOAT32, 8), (-1, -1, 8)):
        with pytest.raises(ValueError, match="not defined"):
            channels.far.expect(1, bytearray(size), op=op, dtype=dtype)
    with pytest.raises(ValueError, match="multiple"):
        channels.far.expect(1, bytearray(7), op=SUM, dtype=FLOAT32)


@pytest.mark.parametrize("dtype", [COMPLEX128, FLOAT64, INT8])
def test_elements_that_arrive_in_pieces_are_reduced_once(make_peer, plain: bool, dtype: int) -> None:
    """A peer may cut its records anywhere."""
    b = make_peer("b")
    kind = {COMPLEX128: np.complex128, FLOAT64: np.float64, INT8: np.int8}[dtype]
    data = np.arange(500).astype(kind)
    into = (np.arange(500) * 3).astype(kind)
    expected = into + data
    cuts = random.Random(3)
    with RawDialer(b.address) as raw:
        raw.open(plain=plain)
        channel = b.event(bulk.ACCEPTED)[3]
        channel.expect(1, into, op=SUM, dtype=dtype)
        left = chunk(1, data.tobytes())
        while left:
            count = cuts.choice([1, 2, 3, 7, 16, 17, 100])
            piece, left = left[:count], left[count:]
            if plain:
                raw.socket.sendall(piece)
            else:
                raw.send(piece)
            expected_ranges = channel.applied(1)
            assert all(begin % into.itemsize == end % into.itemsize == 0 for begin, end in expected_ranges)
        b.event(bulk.LANDED)
        assert channel.applied(1) == [(0, into.nbytes)]
    assert into.tobytes() == expected.tobytes()


# -- redirecting and withdrawing --------------------------------------------------------------------------


@pytest.fixture
def raw_channel(make_peer, plain: bool):
    """A channel whose dialer sends byte by byte what a test wants."""
    b = make_peer("b")
    with RawDialer(b.address) as raw:
        raw.open(plain=plain)
        channel = b.event(bulk.ACCEPTED)[3]
        yield b, channel, raw.socket.sendall if plain else raw.send


def test_a_redirected_transfer_continues_elsewhere(raw_channel) -> None:
    b, channel, send = raw_channel
    data = bytes(pattern(2 * CHUNK + 1000))
    old, new = bytearray(len(data)), bytearray(len(data))
    channel.expect(1, old)
    send(chunk(1, data[2 * CHUNK :], offset=2 * CHUNK, total=len(data)))
    send(chunk(1, data[:CHUNK], offset=0, total=len(data))[:5000])
    until(lambda: channel.applied(1) == [(0, 4968), (2 * CHUNK, len(data))])
    assert channel.redirect(1, new) == bulk.MOVED
    old[:] = bytes(len(old))
    old += b"x"  # not borrowed any longer
    assert new[:4968] == data[:4968]
    send(data[4968:CHUNK])
    send(chunk(1, data[CHUNK : 2 * CHUNK], offset=CHUNK, total=len(data)))
    b.event(bulk.LANDED)
    assert new == data
    assert not any(old[:100])
    assert channel.redirect(1, old) == bulk.LANDED


def test_a_redirect_before_anything_has_arrived(channels: Channels) -> None:
    old, new = bytearray(100), bytearray(100)
    channels.far.expect(1, old)
    assert channels.far.redirect(1, new) == bulk.MOVED
    channels.near.send(1, pattern(100))
    land(channels)
    assert new == pattern(100)
    assert not any(old[:100])


def test_what_cannot_be_redirected(channels: Channels) -> None:
    far = channels.far
    assert far.redirect(9, bytearray(5)) == bulk.UNKNOWN
    assert far.redirect(9, None) == bulk.UNKNOWN
    far.expect(1, bytearray(5))
    with pytest.raises(ValueError, match="5 bytes"):
        far.redirect(1, bytearray(6))
    far.expect(2, bytearray(8), op=SUM, dtype=FLOAT32)
    with pytest.raises(ValueError, match="not moved"):
        far.redirect(2, bytearray(8))
    assert far.redirect(2, None) == bulk.MOVED
    assert far.redirect(2, None) == bulk.UNKNOWN


def test_a_discarded_transfer_is_not_reported(channels: Channels) -> None:
    channels.far.expect(1, bytearray(3 * CHUNK))
    assert channels.far.redirect(1, None) == bulk.MOVED
    channels.near.send(1, pattern(3 * CHUNK))
    channels.far.expect(2, bytearray(1))
    channels.near.send(2, b"x")
    land(channels, 2)
    until(lambda: channels.far.stats()["expected"] == 0)
    assert channels.b.poll() == []
    channels.far.expect(1, bytearray(1))  # its number is free again


def test_half_an_element_of_a_discarded_reduction(raw_channel) -> None:
    _, channel, send = raw_channel
    into = np.zeros(4)
    channel.expect(1, into, op=SUM, dtype=FLOAT64)
    whole = chunk(1, np.ones(4).tobytes())
    send(whole[: 32 + 12])
    until(lambda: channel.applied(1) == [(0, 8)])
    assert channel.redirect(1, None) == bulk.MOVED
    assert into.tolist() == [1, 0, 0, 0]
    send(whole[32 + 12 :])
    until(lambda: channel.stats()["expected"] == 0)


def test_a_withdrawn_transfer_is_forgotten_by_both(make_peer, plain: bool) -> None:
    a, b = make_peer("a"), make_peer("b")
    pair = connect(a, b, connections=2, plain=plain)
    for transfer in range(30):
        data, into = pattern(20 * CHUNK), bytearray(20 * CHUNK)
        pair.far.expect(transfer, into)
        pair.near.send(transfer, data)
        if transfer % 3:
            until(lambda transfer=transfer: pair.far.applied(transfer) != [])
        pair.near.withdraw(transfer)
        data[:] = bytes(len(data))  # what follows would be seen below
        data += b"x"
        for begin, end in pair.far.applied(transfer):
            assert into[begin:end] == pattern(20 * CHUNK)[begin:end]
        if pair.far.redirect(transfer, None) == bulk.LANDED:
            assert into == pattern(20 * CHUNK)
    until(lambda: pair.far.stats()["expected"] == 0)
    assert pair.near.stats()["sending"] == 0
    pair.near.withdraw(5)
    pair.near.withdraw(12345)
    pair.far.expect(99, bytearray(1))
    pair.near.send(99, b"x")
    while b.event(bulk.LANDED)[2] != 99:
        pass


def test_what_was_begun_before_a_withdrawal_arrives_unchanged(make_peer, plain: bool) -> None:
    """The dialer's socket is full, so that chunks are under way while the transfer is withdrawn."""
    b = make_peer("b")
    with RawDialer(b.address) as raw:
        raw.open(plain=plain)
        channel = b.event(bulk.ACCEPTED)[3]
        data = pattern(100 * CHUNK)
        channel.send(1, data)
        counted = -1
        while counted != (counted := channel.stats()["bytes_sent"]):
            threading.Event().wait(0.1)
        channel.withdraw(1)
        data[:] = b"\xff" * len(data)
        original = pattern(100 * CHUNK)
        got = b""

        def take(count: int) -> bytes:
            nonlocal got
            while len(got) < count:
                got += raw.socket.recv(1 << 20) if plain else raw.receive()
            taken, got = got[:count], got[count:]
            return taken

        chunks = 0
        while True:
            head = take(32)
            if head[0] == 2:
                break
            assert head == header(1, CHUNK, 1, chunks * CHUNK, len(data))
            assert take(CHUNK) == original[chunks * CHUNK :][:CHUNK]
            chunks += 1
        assert head == header(2, 0, 1, chunks * CHUNK)


def test_memory_is_never_written_after_a_redirect(make_peer, plain: bool) -> None:
    a, b = make_peer("a", threads=2), make_peer("b", threads=2)
    pair = connect(a, b, connections=4, plain=plain)
    data = pattern(8 * CHUNK)
    delays = random.Random(5)
    landed = 0
    for transfer in range(100):
        into = bytearray(len(data))
        pair.far.expect(transfer, into)
        pair.near.send(transfer, data)
        for _ in range(delays.randrange(300)):
            pass
        outcome = pair.far.redirect(transfer, None)
        if outcome == bulk.MOVED:
            into[:] = b"\x55" * len(into)
            assert into.count(0x55) == len(into)
            assert b.poll() is not None
            assert into.count(0x55) == len(into)
        else:
            assert outcome == bulk.LANDED
            landed += 1
            assert into == data
        b.events.clear()
        a.poll()
        a.events.clear()
    until(lambda: pair.far.stats()["expected"] == 0)


# -- finishing --------------------------------------------------------------------------------------------


def test_a_finished_channel_delivers_everything_first(channels: Channels) -> None:
    data, into = pattern(30 * CHUNK), bytearray(30 * CHUNK)
    channels.far.expect(1, into)
    channels.near.send(1, data)
    channels.near.finish()
    channels.near.finish()
    with pytest.raises(ValueError, match="finished"):
        channels.near.send(2, b"")
    land(channels)
    assert into == data
    assert channels.b.event(bulk.FINISHED) == (bulk.FINISHED, channels.far.id, 0, None)
    # The other direction is still open.
    back = bytearray(5)
    channels.near.expect(1, back)
    channels.far.send(1, b"hello")
    channels.a.event(bulk.LANDED)
    channels.far.finish()
    channels.a.event(bulk.FINISHED)
    for peer in (channels.a, channels.b):
        until(lambda peer=peer: peer.endpoint.stats()["connections"] == 0)
        assert peer.endpoint.stats()["channels"] == 0
        assert not [event for event in peer.poll() if event[0] == bulk.LOST]
    with pytest.raises(bulk.ConnectionLost) as caught:
        channels.near.send(3, b"")
    assert caught.value.kind == "closed"


def test_a_channel_that_is_finished_at_once(make_peer, plain: bool) -> None:
    a, b = make_peer("a"), make_peer("b")
    channel = dial(a, b, connections=4, plain=plain)
    channel.finish()
    far = b.event(bulk.ACCEPTED)[3]
    b.event(bulk.FINISHED)
    far.finish()
    until(lambda: a.endpoint.stats()["connections"] == b.endpoint.stats()["connections"] == 0)
