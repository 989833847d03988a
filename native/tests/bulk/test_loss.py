"""Losing connections and peers, aborting: what was applied is known, and no memory is used afterwards."""

from __future__ import annotations

import random
import signal

import pytest
from bulk_peers import CHUNK, Channels, Proxy, connect, dialing_child, finish, pattern, until
from nexar_native import bulk

np = pytest.importorskip("numpy")
SUM, FLOAT32 = 1, 11


@pytest.mark.parametrize("which", [0, 1, "all"])
def test_losing_connections_loses_the_channel(make_peer, plain: bool, which: int | str) -> None:
    a, b = make_peer("a"), make_peer("b")
    with Proxy(b.address) as proxy:
        pair = connect(a, b, address=proxy.address, connections=2, plain=plain)
        count = 16 << 20
        data, into = np.ones(count, np.float32), np.full(count, 2, np.float32)
        pair.far.expect(1, into, op=SUM, dtype=FLOAT32)
        pair.near.send(1, data)
        until(lambda: sum(end - begin for begin, end in pair.far.applied(1)) > 1 << 20)
        for each in range(2) if which == "all" else [which]:
            proxy.cut(each)
        for peer, channel in ((a, pair.near), (b, pair.far)):
            kind, reason = peer.event(bulk.LOST, channel=channel.id)[3]
            assert kind in ("peer_closed", "reset")
            assert reason
            assert not [event for event in peer.poll() if event[0] == bulk.LOST]
            with pytest.raises(bulk.ConnectionLost) as caught:
                channel.send(2, b"x")
            assert caught.value.kind == kind
        applied = np.zeros(into.nbytes, bool)
        for begin, end in pair.far.applied(1):
            assert begin % 4 == end % 4 == 0
            applied[begin:end] = True
        # Exactly the ranges that were reported have been combined, each once.
        assert (into == np.where(applied[::4], 3, 2)).all()
        into.resize(1)  # not borrowed any longer
        for peer in (a, b):
            until(lambda peer=peer: peer.endpoint.stats()["connections"] == 0)
            assert peer.endpoint.stats()["channels"] == 0


def test_an_abort_frees_the_memory_and_tells_the_peer(channels: Channels) -> None:
    data, into = pattern(64 * CHUNK), bytearray(64 * CHUNK)
    channels.far.expect(1, into)
    channels.near.send(1, data)
    channels.near.abort("because of this")
    channels.near.abort()
    data += b"x"
    kind, reason = channels.b.event(bulk.LOST)[3]
    assert kind in ("peer_closed", "reset")
    assert reason in ("because of this", "the peer closed a connection") or kind == "reset"
    channels.b.poll()
    into += b"x"
    with pytest.raises(bulk.ConnectionLost) as caught:
        channels.near.send(2, b"")
    assert (caught.value.kind, caught.value.reason) == ("closed", "because of this")
    assert not [event for event in channels.a.poll() if event[0] == bulk.LOST]


def test_the_reason_of_an_idle_channel_arrives(channels: Channels) -> None:
    channels.far.abort("é" * 200)
    assert channels.a.event(bulk.LOST)[3] == ("peer_closed", "é" * 128)


def test_aborting_inside_transfers_never_writes_afterwards(make_peer, plain: bool) -> None:
    a, b = make_peer("a"), make_peer("b")
    delays = random.Random(1)
    for _ in range(25):
        pair = connect(a, b, connections=2, plain=plain)
        into = bytearray(16 * CHUNK)
        pair.far.expect(1, into)
        pair.near.send(1, pattern(16 * CHUNK))
        for _ in range(delays.randrange(2000)):
            pass
        pair.far.abort()
        into[:] = b"\x55" * len(into)
        a.event(bulk.LOST, channel=pair.near.id)
        assert into.count(0x55) == len(into)
        b.poll()
        b.events.clear()
        a.events.clear()


@pytest.mark.parametrize("moment", ["idle", "sending", "receiving"])
def test_a_killed_process_is_a_loss(make_peer, plain: bool, moment: str) -> None:
    b = make_peer("b")
    child = dialing_child(
        f"""
        channel = dial(plain={plain})
        data = bytearray(256 << 20)
        sys.stdin.readline()
        if {moment!r} == "sending":
            channel.send(1, data)
        elif {moment!r} == "receiving":
            channel.expect(2, data)
        print("ready", flush=True)
        sys.stdin.readline()
        """,
        b,
    )
    channel = b.event(bulk.ACCEPTED)[3]
    assert channel.hello == b"child"
    into, data = bytearray(256 << 20), bytes(256 << 20)
    channel.expect(1, into)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    assert child.stdout.readline() == "ready\n"
    if moment == "receiving":
        channel.send(2, data)
        until(lambda: channel.stats()["bytes_sent"] > 1 << 20)
    if moment == "sending":
        until(lambda: channel.applied(1) != [])
    child.send_signal(signal.SIGKILL)
    kind, _ = b.event(bulk.LOST)[3]
    assert kind in ("peer_closed", "reset")
    finish(child)
    into += b"x"


def test_an_exiting_process_is_a_loss_with_a_reason(make_peer, plain: bool) -> None:
    b = make_peer("b")
    child = dialing_child(f"channel = dial(plain={plain})", b)
    channel = b.event(bulk.ACCEPTED)[3]
    assert b.event(bulk.LOST, channel=channel.id)[3] == ("peer_closed", "the process exits")
    assert finish(child)[0] == 0
