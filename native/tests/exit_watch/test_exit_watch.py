"""Ends of processes, as their peers see them."""

from __future__ import annotations

import mmap
import os
import select
import signal
import struct
import time
from collections.abc import Callable, Iterator

import pytest
from nexar_native.exit_watch import ExitWatch

FIRST, SECOND = 1024, 1152  # the words of two processes
OWNER_DIED = 0x40000000
TIMEOUT = 10.0


@pytest.fixture
def page() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, mmap.PAGESIZE) as shared:
        yield shared


@pytest.fixture
def watch() -> Iterator[ExitWatch]:
    made = ExitWatch()
    yield made
    made.close()


class Child:
    """A process that shares the page. It runs `act` after it has added its word, and then sleeps."""

    def __init__(self, page: mmap.mmap, act: Callable[[ExitWatch, int], object] = lambda *_: None) -> None:
        ready, told = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            watch = ExitWatch()
            key = watch.add(page, SECOND, FIRST)
            assert key is not None
            os.write(told, b"x")
            act(watch, key)
            time.sleep(TIMEOUT)
            os._exit(0)
        os.close(told)
        os.read(ready, 1)
        os.close(ready)

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def has_news(watch: ExitWatch, seconds: float = TIMEOUT) -> bool:
    return bool(select.select([watch.fileno()], [], [], seconds)[0])


def store(page: mmap.mmap, at: int, value: int) -> None:
    page[at : at + 4] = struct.pack("I", value)


def load(page: mmap.mmap, at: int) -> int:
    return int(struct.unpack("I", page[at : at + 4])[0])


def test_a_killed_process_has_ended(page: mmap.mmap, watch: ExitWatch) -> None:
    key = watch.add(page, FIRST, SECOND)
    child = Child(page)
    assert not has_news(watch, 0.2)
    os.kill(child.pid, signal.SIGKILL)
    assert has_news(watch)
    assert watch.ended() == [key]
    assert watch.ended() == []
    assert not has_news(watch, 0.0)
    os.waitpid(child.pid, 0)


def test_a_process_that_ended_before_it_was_watched_has_ended(page: mmap.mmap, watch: ExitWatch) -> None:
    Child(page).end()
    key = watch.add(page, FIRST, SECOND)
    assert has_news(watch)
    assert watch.ended() == [key]


@pytest.mark.parametrize(
    "act",
    [
        lambda *_: os._exit(0),
        lambda *_: os.execv("/bin/sleep", ["sleep", "10"]),
        lambda *_: os.kill(os.getpid(), signal.SIGTERM),
    ],
    ids=["_exit", "exec", "signal"],
)
def test_any_end_counts(page: mmap.mmap, watch: ExitWatch, act: Callable[[ExitWatch, int], object]) -> None:
    key = watch.add(page, FIRST, SECOND)
    child = Child(page, act)
    assert has_news(watch)
    assert watch.ended() == [key]
    child.end()


@pytest.mark.parametrize("act", [ExitWatch.remove, lambda watch, _: watch.close()], ids=["remove", "close"])
def test_a_process_that_gave_up_its_word_is_not_reported(
    page: mmap.mmap, watch: ExitWatch, act: Callable[[ExitWatch, int], object]
) -> None:
    watch.add(page, FIRST, SECOND)
    child = Child(page, act)
    deadline = time.monotonic() + TIMEOUT
    while load(page, SECOND) and time.monotonic() < deadline:
        time.sleep(0.01)
    child.end()
    assert load(page, SECOND) == 0
    assert not has_news(watch, 0.2)


def test_a_removed_word_is_not_reported(page: mmap.mmap, watch: ExitWatch) -> None:
    key = watch.add(page, FIRST, SECOND)
    child = Child(page)
    assert key is not None
    watch.remove(key)
    watch.remove(key)
    assert load(page, FIRST) == 0
    child.end()
    assert not has_news(watch, 0.2)


def test_each_of_many_is_reported_once_and_others_stay(watch: ExitWatch) -> None:
    pages = [mmap.mmap(-1, mmap.PAGESIZE) for _ in range(6)]
    keys = [watch.add(each, FIRST, SECOND) for each in pages]
    children = [Child(each) for each in pages]
    watch.remove(keys[2] or 0)  # from the middle of the list
    found: set[int] = set()
    for index in (0, 2, 5):
        children[index].end()
    while len(found) < 2 and has_news(watch):
        found.update(watch.ended())
    assert found == {keys[0], keys[5]}
    assert not has_news(watch, 0.2)
    for index in (1, 3, 4):
        children[index].end()
    while len(found) < 5 and has_news(watch):
        found.update(watch.ended())
    assert found == {key for key in keys if key != keys[2]}


def test_all_words_of_an_ended_process_are_marked() -> None:
    pages = [mmap.mmap(-1, mmap.PAGESIZE) for _ in range(5)]

    def add_more(watch: ExitWatch, key: int) -> None:
        more = [watch.add(each, SECOND, FIRST) for each in pages[1:]]
        watch.remove(more[1] or 0)
        watch.remove(key)  # the oldest
        os._exit(0)

    os.waitpid(Child(pages[0], add_more).pid, 0)
    assert [bool(load(each, SECOND) & OWNER_DIED) for each in pages] == [False, True, False, True, True]


def test_a_forked_child_owns_nothing(page: mmap.mmap, watch: ExitWatch) -> None:
    watch.add(page, FIRST, SECOND)
    before = load(page, FIRST)
    pid = os.fork()
    if pid == 0:
        try:
            watch.ended()
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert load(page, FIRST) == before != 0


def test_a_peer_that_keeps_changing_its_word_costs_little_and_cannot_stop_the_watch(watch: ExitWatch) -> None:
    hostile, honest = mmap.mmap(-1, mmap.PAGESIZE), mmap.mmap(-1, mmap.PAGESIZE)
    watch.add(hostile, FIRST, SECOND)
    key = watch.add(honest, FIRST, SECOND)
    child = Child(honest)
    begin, used = time.monotonic(), time.process_time()
    for number in range(200_000):
        store(hostile, SECOND, number & 0xFFFF)
    assert time.process_time() - used < 2 * (time.monotonic() - begin)
    child.end()
    assert has_news(watch)
    assert watch.ended() == [key]


def test_a_hostile_owner_number_is_no_end(page: mmap.mmap, watch: ExitWatch) -> None:
    watch.add(page, FIRST, SECOND)
    store(page, SECOND, 0x80000000 | 1)
    assert not has_news(watch, 0.2)


def test_only_shared_pages_and_aligned_words_are_accepted(page: mmap.mmap, watch: ExitWatch) -> None:
    with pytest.raises(ValueError, match="multiples of 8"):
        watch.add(page, 12, SECOND)
    with pytest.raises(ValueError, match="multiples of 8"):
        watch.add(page, FIRST, 4096)
    with pytest.raises(ValueError, match="not a mapping of pages"):
        watch.add(bytearray(100), FIRST, SECOND)
    private = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with pytest.raises(OSError, match="Invalid argument"):
        watch.add(private, FIRST, SECOND)


def test_at_most_127_words_are_watched(watch: ExitWatch) -> None:
    pages = [mmap.mmap(-1, mmap.PAGESIZE) for _ in range(128)]
    keys = [watch.add(each, FIRST, SECOND) for each in pages]
    assert None not in keys[:127]
    assert keys[127] is None
    Child(pages[126]).end()
    assert has_news(watch)
    assert watch.ended() == [keys[126]]


def test_a_closed_watch_accepts_nothing_and_ends_its_thread(page: mmap.mmap) -> None:
    before = len(os.listdir("/proc/self/task"))
    made = ExitWatch()
    made.add(page, FIRST, SECOND)
    assert len(os.listdir("/proc/self/task")) == before + 1
    made.close()
    made.close()
    assert len(os.listdir("/proc/self/task")) == before
    assert load(page, FIRST) == 0
    assert made.add(page, FIRST, SECOND) is None


def test_a_dropped_watch_gives_up_its_words(page: mmap.mmap) -> None:
    made = ExitWatch()
    made.add(page, FIRST, SECOND)
    del made
    assert load(page, FIRST) == 0
