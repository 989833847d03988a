"""What was decided is done in order, one thing at a time, by whoever finds nobody doing it."""

import threading

import pytest

from nexar.cluster.errands import Errands
from tests.ranks import PATIENCE


def test_they_are_done_in_order_and_what_one_adds_comes_after_what_is_there() -> None:
    done: list[str] = []

    def do(errand: str) -> None:
        done.append(errand)
        if errand == "first":
            errands.add(["added"])
            errands.run()  # somebody is at it: this one, which comes to it later

    errands = Errands(do)
    errands.add(["first", "second"])
    errands.run()
    assert done == ["first", "second", "added"]


def test_who_finds_another_thread_at_it_leaves_its_own_to_that_one() -> None:
    begun, go_on = threading.Event(), threading.Event()
    done: list[tuple[str, str]] = []

    def do(errand: str) -> None:
        done.append((errand, threading.current_thread().name))
        begun.set()
        assert go_on.wait(PATIENCE)

    errands = Errands(do)
    errands.add(["slow"])
    thread = threading.Thread(target=errands.run, name="the other")
    thread.start()
    assert begun.wait(PATIENCE)
    errands.add(["mine"])
    errands.run()
    assert done == [("slow", "the other")]
    go_on.set()
    thread.join()
    assert done == [("slow", "the other"), ("mine", "the other")]


def test_one_that_raises_ends_the_run_and_the_rest_waits_for_the_next() -> None:
    done: list[int] = []

    def do(errand: int) -> None:
        if errand == 1:
            raise ValueError("not this one")
        done.append(errand)

    errands = Errands(do)
    errands.add([0, 1, 2])
    with pytest.raises(ValueError, match="not this one"):
        errands.run()
    assert done == [0]
    errands.run()
    assert done == [0, 2]
