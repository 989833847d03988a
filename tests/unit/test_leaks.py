"""The leak check is itself proved: it names what is left, and keeps quiet about what only takes a moment to go."""

import asyncio
import os
import socket
import subprocess
import threading
from multiprocessing import shared_memory

import pytest

from tests import leaks
from tests.leaks import Stock, leaked_since


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    monkeypatch.setattr(leaks, "SETTLE_SECONDS", 0.1)


def test_a_tidy_test_has_nothing_left():
    before = Stock.take()
    with open(os.devnull):
        pass
    assert leaked_since(before) == []


def test_a_thread_is_named():
    before, stop = Stock.take(), threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    try:
        assert leaked_since(before) == ["thread 'forgotten'"]
    finally:
        stop.set()
        thread.join()


def test_a_descriptor_is_named_with_its_target():
    before = Stock.take()
    with open(os.devnull) as file:
        assert leaked_since(before) == [f"descriptor {file.fileno()} -> {os.devnull}"]


def test_a_shared_memory_entry_is_named():
    before = Stock.take()
    segment = shared_memory.SharedMemory(create=True, size=16)
    try:
        assert f"shared memory /dev/shm/{segment.name}" in leaked_since(before)
    finally:
        segment.close()
        segment.unlink()


def test_a_child_process_is_named():
    before = Stock.take()
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert leaked_since(before) == [f"child process {child.pid}: sleep 60"]
        finally:
            child.kill()


def test_a_pending_task_is_named():
    async def scenario() -> list[str]:
        before = Stock.take()
        task = asyncio.create_task(asyncio.Event().wait(), name="forgotten")
        await asyncio.sleep(0)
        found = leaked_since(before)
        task.cancel()
        return found

    (found,) = asyncio.run(scenario())
    assert found.startswith("pending task")
    assert "forgotten" in found


def test_garbage_is_no_leak_on_a_machine_so_slow_that_a_look_takes_all_the_time(monkeypatch):
    """As memory of a shared region was, whose arrays were in a ring of references."""
    monkeypatch.setattr(leaks, "SETTLE_SECONDS", 0.0)
    before = Stock.take()
    ring: list[object] = [socket.socket()]
    ring.append(ring)
    del ring
    with pytest.warns(ResourceWarning, match="unclosed"):
        assert leaked_since(before) == []


def test_what_goes_within_the_grace_period_is_no_leak(monkeypatch):
    monkeypatch.setattr(leaks, "SETTLE_SECONDS", 5.0)
    before = Stock.take()
    threading.Thread(target=threading.Event().wait, args=(0.05,)).start()
    assert leaked_since(before) == []
