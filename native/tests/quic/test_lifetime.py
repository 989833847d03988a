"""Ends: close, garbage collection, interpreter exit, Ctrl-C, fork, panics."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import weakref
from typing import ClassVar

import certificates
import pytest
from conftest import MakeEndpoint
from harness import (
    EVENT_TIMEOUT,
    PEM_ENVIRONMENT,
    Pair,
    connect,
    finish,
    identity,
    native_threads,
    receive,
    result,
    spawn,
    until,
)
from nexar_native import quic


def test_close_fails_what_is_posted_and_notifies_the_peer(pair: Pair) -> None:
    queue = quic.Completions(pair.a)
    posted = pair.near.post_accept_bi(queue)
    gone = pair.far.post_closed()
    pair.a.close(5, "done")
    assert queue.wait(0) == ([posted], [])
    with pytest.raises(quic.EndpointClosed):
        posted.result()
    with pytest.raises(quic.EndpointClosed):
        queue.wait(0)
    with pytest.raises(quic.EndpointClosed):
        pair.near.open_bi()
    with pytest.raises(quic.ConnectionLost) as caught:
        result(pair.b, gone)
    assert (caught.value.kind, caught.value.code, caught.value.reason) == ("peer_closed", 5, "done")
    pair.a.close()


def test_close_ends_a_wait_in_another_thread(pair: Pair) -> None:
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            quic.Completions(pair.a).wait()
        except quic.EndpointClosed as error:
            raised.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: pair.a.stats()["waiting"] == 3)
    pair.a.close()
    for thread in threads:
        thread.join(EVENT_TIMEOUT)
    assert len(raised) == 3


def test_leaving_the_block_closes_the_endpoint() -> None:
    with quic.Endpoint(("127.0.0.1", 0), None, certificates.trust()) as endpoint:
        until(lambda: native_threads() == 1)
    assert native_threads() == 0
    with pytest.raises(quic.EndpointClosed):
        endpoint.stats()


def test_garbage_collection_stops_the_background_thread() -> None:
    endpoint = quic.Endpoint(("127.0.0.1", 0), certificates.node("a").credentials, certificates.trust())
    queue = quic.Completions(endpoint)
    endpoint.post_accept(queue, token=queue)
    endpoint.post_accept()
    until(lambda: native_threads() == 1)
    del endpoint, queue
    gc.collect()
    assert native_threads() == 0


def test_a_connection_keeps_its_endpoint_alive(make_endpoint: MakeEndpoint) -> None:
    b = make_endpoint("b")
    a = quic.Endpoint(("127.0.0.1", 0), certificates.node("a").credentials, certificates.trust())
    pair = connect(a, b)
    near, far = pair.near, pair.far
    del a, pair
    gc.collect()
    stream = near.open_uni()
    stream.write(b"x")
    there = result(b, far.post_accept_uni())
    assert receive(b, there, 1) == b"x"
    del near, stream
    gc.collect()
    assert native_threads() == 1


def test_a_peer_notices_an_exit_at_once(make_endpoint: MakeEndpoint) -> None:
    b = make_endpoint("b")
    accepting = b.post_accept()
    child = spawn(
        PEM_ENVIRONMENT
        + """
endpoint = quic.Endpoint(("127.0.0.1", 0), credentials, trust)
connection = endpoint.connect((sys.argv[1], int(sys.argv[2])), "b", 10)
""",
        b.address[0],
        str(b.address[1]),
    )
    assert child.stdin is not None
    child.stdin.write(identity("a"))
    child.stdin.flush()
    far = result(b, accepting)
    start = time.monotonic()
    with pytest.raises(quic.ConnectionLost) as caught:
        result(b, far.post_closed())
    assert caught.value.kind == "peer_closed"
    assert time.monotonic() - start < 10
    assert finish(child) == (0, "", "")


def test_daemon_threads_inside_a_wait_do_not_disturb_the_exit() -> None:
    child = spawn(
        PEM_ENVIRONMENT
        + """
import threading, time
endpoint = quic.Endpoint(("127.0.0.1", 0), credentials, trust)
def wait(spin):
    queue = quic.Completions(endpoint)
    try:
        while True:
            queue.wait(spin=spin)
    except quic.EndpointClosed:
        pass
for spin in (0.0, 0.0, 1e-3, 1.0):
    threading.Thread(target=wait, args=(spin,), daemon=True).start()
while endpoint.stats()["waiting"] < 4:
    time.sleep(0.001)
print("leaving", flush=True)
"""
    )
    assert child.stdin is not None
    child.stdin.write(identity("a"))
    child.stdin.flush()
    assert finish(child) == (0, "leaving\n", "")


def test_ctrl_c_ends_a_wait_at_once_and_the_stream_stays_usable(pair: Pair) -> None:
    here, there = pair.stream()
    buffer = bytearray(5)
    reading = there.post_read(buffer)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.1, signal.pthread_kill, [main, signal.SIGINT])
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pair.b.wait([reading], EVENT_TIMEOUT)
    assert time.monotonic() - start < 2
    timer.join()
    assert not reading.done
    here.write(b"after")
    assert result(pair.b, reading) == 5
    assert buffer == b"after"


def test_a_signal_taken_by_another_thread_is_noticed_soon(pair: Pair) -> None:
    """os.kill from a thread: the kernel may well give the signal to that very thread."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: seen.append(number))
    try:

        def stab() -> None:
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

        timer = threading.Timer(0.05, stab)
        timer.start()
        assert pair.a.wait([], 0.6) == ([], [])
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1]


def test_a_signal_handler_may_use_the_endpoint_it_interrupts(pair: Pair) -> None:
    here, there = pair.stream()

    def handler(_number: int, _frame: object) -> None:
        here.write(b"from the handler")
        assert len(receive(pair.b, there, 16)) == 16
        pair.b.close()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(0.05, signal.pthread_kill, [main, signal.SIGUSR1])
        timer.start()
        with pytest.raises(quic.EndpointClosed):
            pair.b.wait([], EVENT_TIMEOUT)
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("hook", ["before", "after_in_parent", "after_in_child"])
def test_a_collector_that_runs_in_somebodys_fork_hook_frees_our_objects(hook: str) -> None:
    """Of the hooks, one runs before ours would and one after it, if ours were Python's too."""
    child = spawn(
        f"""
import gc, os
gc.disable()
os.register_at_fork({hook}=gc.collect)
"""
        + PEM_ENVIRONMENT
        + f"""
os.register_at_fork({hook}=gc.collect)
def litter():
    endpoint = quic.Endpoint(("127.0.0.1", 0), credentials, trust)
    ring = [endpoint, quic.Completions(endpoint)]
    ring.append(ring)
litter()
forked = os.fork()
if forked == 0:
    os._exit(0)
sys.exit(os.waitpid(forked, 0)[1])
"""
    )
    assert child.stdin is not None
    child.stdin.write(identity("a"))
    child.stdin.flush()
    assert finish(child) == (0, "", "")


def test_a_forked_child_refuses_and_holds_nothing_while_the_parent_goes_on(pair: Pair) -> None:
    here, there = pair.stream()
    queues = [quic.Completions(pair.a)]  # nothing else refers to it
    here.post_read(bytearray(1), queues[0], token=_Token())
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os._exit(_in_the_child(pair, here, queues, writer))
    os.close(writer)
    with open(reader, "rb") as stream:
        said = stream.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    assert said == "ok"
    here.write(b"parent")
    assert receive(pair.b, there, 6) == b"parent"
    there.write(b"y")
    assert queues[0].wait(EVENT_TIMEOUT)[0]


class _Token:
    """Something that can be referred to weakly."""

    alive: ClassVar[list[weakref.ref[_Token]]] = []

    def __init__(self) -> None:
        self.alive.append(weakref.ref(self))


def _in_the_child(pair: Pair, here: quic.Stream, queues: list[quic.Completions], writer: int) -> int:
    said = "ok"
    try:
        for call in (
            lambda: here.write(b"child"),
            pair.near.open_bi,
            lambda: pair.a.wait([], 0),
            lambda: queues[0].wait(0),
            pair.a.close,
            lambda: pair.a.connect(("127.0.0.1", 1), "b", 0.1),
        ):
            try:
                call()
                said = "a call was allowed"
            except quic.ForkedError:
                pass
        links = []
        for entry in os.listdir("/proc/self/fd"):
            if int(entry) > 2:
                with contextlib.suppress(OSError):
                    links.append(os.readlink(f"/proc/self/fd/{entry}"))
        if any("eventfd" in link or "socket" in link for link in links):
            said = f"descriptors are open: {links}"
        with quic.Endpoint(("127.0.0.1", 0), certificates.node("c").credentials, certificates.trust()) as own:
            own.stats()
        pair.near = pair.far = None  # type: ignore[assignment]
        queues.clear()
        gc.collect()
        if _Token.alive[-1]() is None:  # a thread of the parent may have been changing it
            said = "the parent's queue was taken apart"
    except BaseException as error:  # noqa: BLE001
        said = repr(error)
    os.write(writer, said.encode())
    return 0


def test_a_panic_poisons_the_endpoint_and_nothing_else(pair: Pair) -> None:
    queue = quic.Completions(pair.a)
    posted = pair.near.post_accept_bi(queue)
    pair.a._panic_in_next_round()  # type: ignore[attr-defined]
    until(lambda: posted.done)
    with pytest.raises(quic.EndpointClosed) as caught:
        posted.result()
    assert "asked for by a test" in caught.value.reason
    with pytest.raises(quic.EndpointClosed, match="internal failure"):
        pair.near.open_bi()
    pair.b.stats()


def test_a_panic_reaches_the_thread_that_waits(pair: Pair) -> None:
    raised: list[str] = []

    def wait() -> None:
        try:
            quic.Completions(pair.a).wait(EVENT_TIMEOUT)
        except quic.EndpointClosed as error:
            raised.append(error.reason)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: pair.a.stats()["waiting"] == 1)
    pair.a._panic_in_next_round()  # type: ignore[attr-defined]
    thread.join(EVENT_TIMEOUT)
    assert raised
    assert "internal failure" in raised[0]


def test_a_held_gil_does_not_lose_the_connection(make_endpoint: MakeEndpoint) -> None:
    """The native thread keeps the connection alive while Python code holds the GIL."""
    b = make_endpoint("b", idle_timeout=1.0, keep_alive_interval=0.2)
    accepting = b.post_accept()
    child = spawn(
        PEM_ENVIRONMENT
        + """
import ctypes
settings = quic.Settings(idle_timeout=1.0, keep_alive_interval=0.2)
endpoint = quic.Endpoint(("127.0.0.1", 0), credentials, trust, settings)
connection = endpoint.connect((sys.argv[1], int(sys.argv[2])), "b", 10)
stream = connection.open_uni()
stream.write(b"before")
ctypes.PyDLL(None).usleep(999_999)
ctypes.PyDLL(None).usleep(999_999)
ctypes.PyDLL(None).usleep(999_999)
stream.write(b" after")
stream.finish()
endpoint.wait([stream.post_finished()], 10)
""",
        b.address[0],
        str(b.address[1]),
    )
    assert child.stdin is not None
    child.stdin.write(identity("a"))
    child.stdin.flush()
    far = result(b, accepting)
    there = result(b, far.post_accept_uni())
    assert receive(b, there, 12) == b"before after"
    assert finish(child) == (0, "", "")


def test_the_background_thread_drives_while_nobody_waits(pair: Pair) -> None:
    here, there = pair.stream()
    reading = there.post_read(bytearray(4))
    rounds = pair.b.stats()["background_rounds"]
    here.write(b"ping")
    until(lambda: reading.done)
    assert reading.result() == 4
    assert pair.b.stats()["background_rounds"] > rounds
