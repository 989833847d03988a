"""Ends: close, garbage collection, interpreter exit, fork; and the GIL, which workers never need."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import select
import threading

import certificates
import pytest
from bulk_peers import (
    CHUNK,
    EVENT_TIMEOUT,
    Channels,
    Peer,
    connect,
    dial,
    dialing_child,
    finish,
    native_threads,
    pattern,
    until,
)
from nexar_native import bulk


def test_workers_start_with_the_first_connection(make_peer) -> None:
    a, b = make_peer("a", threads=3), make_peer("b", threads=1)
    assert native_threads() == 0
    assert a.endpoint.stats()["threads"] == 0
    dial(a, b)
    until(lambda: native_threads() == 4)
    a.close()
    assert native_threads() == 1


def test_closing_ends_everything(channels: Channels) -> None:
    data = bytearray(64 << 20)
    channels.near.send(1, data)
    channels.a.endpoint.close()
    channels.a.endpoint.close()
    data += b"x"
    with pytest.raises(bulk.EndpointClosed):
        channels.a.endpoint.poll()
    with pytest.raises(bulk.EndpointClosed):
        dial(channels.a, channels.b)
    with pytest.raises(bulk.ConnectionLost):
        channels.near.send(2, b"")
    assert channels.near.stats()["sending"] == 0
    assert channels.b.event(bulk.LOST)[3][0] in ("peer_closed", "reset", "protocol")


def test_leaving_the_block_closes_the_endpoint(make_peer) -> None:
    b = make_peer("b")
    with bulk.Endpoint(certificates.node("a").credentials, certificates.trust(), threads=1) as endpoint:
        channel = endpoint.connect([b.address], "b", None, b"", timeout=EVENT_TIMEOUT)
    with pytest.raises(bulk.ConnectionLost):
        channel.send(1, b"")


def test_a_dropped_channel_ends(channels: Channels) -> None:
    data, into = bytearray(50 << 20), bytearray(50 << 20)
    channels.far.expect(1, into)
    channels.near.send(1, data)
    del channels.near
    gc.collect()
    channels.a.poll()
    data += b"x"
    assert channels.b.event(bulk.LOST)[3][0] in ("peer_closed", "reset")
    until(lambda: channels.a.endpoint.stats()["connections"] == 0)


def test_an_accepted_channel_that_nobody_polls_ends_with_its_endpoint(make_peer) -> None:
    a, b = make_peer("a"), make_peer("b")
    near = dial(a, b)
    b.close()
    a.event(bulk.LOST, channel=near.id)


def test_a_channel_keeps_its_endpoint_alive(make_peer) -> None:
    b = make_peer("b")
    endpoint = bulk.Endpoint(certificates.node("a").credentials, certificates.trust(), threads=1)
    near = endpoint.connect([b.address], "b", None, b"", timeout=EVENT_TIMEOUT)
    del endpoint
    gc.collect()
    far = b.event(bulk.ACCEPTED)[3]
    into = bytearray(3)
    far.expect(1, into)
    near.send(1, b"abc")
    b.event(bulk.LANDED)
    del near
    gc.collect()
    b.event(bulk.LOST)


def test_garbage_collection_stops_the_workers(make_peer) -> None:
    b = make_peer("b", threads=1)

    class Holder:
        pass

    holder = Holder()
    holder.endpoint = bulk.Endpoint(certificates.node("a").credentials, certificates.trust(), threads=2)
    holder.channel = holder.endpoint.connect([b.address], "b", None, b"", timeout=EVENT_TIMEOUT)
    holder.cycle = holder
    until(lambda: native_threads() == 3)
    del holder
    gc.collect()
    assert native_threads() == 1
    b.event(bulk.ACCEPTED)


def test_transfers_go_on_while_python_code_holds_the_gil(channels: Channels) -> None:
    """A C function that is called with the GIL held waits for the transfer; a Python thread could not run meanwhile."""
    data, into = pattern(20 * CHUNK), bytearray(20 * CHUNK)
    fd = channels.b.endpoint.fileno()
    channels.far.expect(1, into)

    class PollFd(ctypes.Structure):
        _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))

    entry = PollFd(fd, 1, 0)
    channels.near.send(1, data)
    ready = ctypes.PyDLL(None).poll(ctypes.byref(entry), 1, int(EVENT_TIMEOUT * 1000))
    assert ready == 1
    assert channels.b.endpoint.poll() == [(bulk.LANDED, channels.far.id, 1, None)]
    assert into == data


def test_many_threads_use_one_channel(channels: Channels) -> None:
    errors: list[BaseException] = []

    def run(base: int) -> None:
        try:
            for transfer in range(base, base + 40):
                into = bytearray(2 * CHUNK)
                channels.far.expect(transfer, into)
                channels.near.send(transfer, pattern(2 * CHUNK))
                if transfer % 4 == 0:
                    channels.near.withdraw(transfer)
                    channels.far.redirect(transfer, None)
                elif transfer % 4 == 1:
                    channels.far.redirect(transfer, bytearray(2 * CHUNK))
                channels.near.stats()
                channels.far.applied(transfer)
        except BaseException as error:  # noqa: BLE001 - reported below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(1000 * each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    landed = 0
    while landed < 4 * 30 and not errors:
        event = channels.b.event(bulk.LANDED, bulk.LOST)
        assert event[0] == bulk.LANDED
        landed += event[2] % 4 != 0
    for thread in threads:
        thread.join()
    assert errors == []
    until(lambda: channels.far.stats()["expected"] == 0)


def test_events_make_the_descriptor_readable_until_they_are_polled(channels: Channels) -> None:
    endpoint = channels.b.endpoint
    channels.b.poll()
    assert select.select([endpoint], [], [], 0)[0] == []
    channels.far.expect(1, bytearray(1))
    channels.near.send(1, b"x")
    assert select.select([endpoint], [], [], EVENT_TIMEOUT)[0] == [endpoint]
    assert select.select([endpoint], [], [], 0)[0] == [endpoint]
    endpoint.poll()
    assert select.select([endpoint], [], [], 0)[0] == []
    assert endpoint.poll() == []


FORKED = """
import gc, os, threading
channel = dial(plain=%r)
data = bytearray(200 << 20)
sys.stdin.readline()
channel.send(1, data)
endpoint_calls = [
    lambda: endpoint.poll(), lambda: endpoint.stats(), lambda: endpoint.fileno(), lambda: endpoint.close(),
    lambda: endpoint.adopt(0), lambda: endpoint.replace_credentials(credentials, trust), lambda: dial(),
    lambda: channel.send(2, b""), lambda: channel.expect(2, bytearray(1)), lambda: channel.redirect(1, None),
    lambda: channel.withdraw(1), lambda: channel.applied(1), lambda: channel.abort(), lambda: channel.finish(),
    lambda: channel.stats(), lambda: channel.peer_certificate, lambda: channel.plain,
]
child = os.fork()
if child == 0:
    status = 1
    try:
        for call in endpoint_calls:
            try:
                call()
            except bulk.ForkedError:
                continue
            raise AssertionError("a call in the child")
        del endpoint_calls, call, dial, channel, endpoint
        gc.collect()
        own = bulk.Endpoint(credentials, trust, threads=1)
        mine = own.connect([(sys.argv[1], int(sys.argv[2]))], "b", None, b"grandchild", timeout=60.0)
        mine.finish()
        status = 0
    finally:
        os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("forked", flush=True)
import select
while (bulk.SENT, channel.id, 1, None) not in endpoint.poll():
    select.select([endpoint], [], [], 60)
print("sent", flush=True)
sys.stdin.readline()
"""


def test_a_forked_child_cannot_use_it_and_harms_nothing(make_peer, plain: bool) -> None:
    b = make_peer("b")
    child = dialing_child(FORKED % plain, b)
    channel = b.event(bulk.ACCEPTED)[3]
    assert child.stdout is not None
    into = bytearray(200 << 20)
    channel.expect(1, into)
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    if (child.stdout.readline(), child.stdout.readline()) != ("forked\n", "sent\n"):
        pytest.fail(repr(finish(child)))
    grandchild = b.event(bulk.ACCEPTED)[3]
    assert grandchild.hello == b"grandchild"
    assert b.event(bulk.LANDED) == (bulk.LANDED, channel.id, 1, None)
    assert finish(child, "\n")[0] == 0


EXITS = {
    "idle": "",
    "sending": "channel.send(1, bytearray(100 << 20))",
    "expecting": "channel.expect(1, bytearray(100 << 20))",
    "a thread dials": """
import contextlib, os, socket, threading
silent = socket.create_server(("127.0.0.1", 0))
def run():
    with contextlib.suppress(OSError):
        endpoint.connect([silent.getsockname()], "b", None, b"", timeout=60.0)
threading.Thread(target=run, daemon=True).start()
accepted, _ = silent.accept()
accepted.detach()
silent.close()
""",
    "an exception": "raise SystemExit(0)",
    "a cycle": "class C: pass\nc = C(); c.c = c; c.channel = channel; c.endpoint = endpoint; del channel, endpoint",
}


@pytest.mark.parametrize("moment", EXITS)
def test_an_interpreter_exits_cleanly(make_peer, moment: str) -> None:
    b = make_peer("b")
    child = dialing_child("channel = dial()\n" + EXITS[moment], b)
    channel = b.event(bulk.ACCEPTED)[3]
    code, out, err = finish(child)
    assert (code, out, err) == (0, "", "")
    b.event(bulk.LOST, channel=channel.id)


def test_closing_while_other_threads_call(make_peer, plain: bool) -> None:
    for _ in range(10):
        a, b = Peer("a"), Peer("b")
        pair = connect(a, b, connections=2, plain=plain)
        stop = threading.Event()

        def run(pair: Channels = pair, stop: threading.Event = stop) -> None:
            transfer = 0
            with contextlib.suppress(bulk.QuicError):
                while not stop.is_set():
                    pair.far.expect(transfer, bytearray(CHUNK))
                    pair.near.send(transfer, bytes(CHUNK))
                    pair.near.withdraw(transfer)
                    transfer += 1

        threads = [threading.Thread(target=run) for _ in range(1)]
        for thread in threads:
            thread.start()
        until(lambda pair=pair: pair.near.stats()["bytes_sent"] > 0)
        a.close()
        b.close()
        stop.set()
        for thread in threads:
            thread.join()
    assert native_threads() == 0
