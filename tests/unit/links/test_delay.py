import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nexar.links.interrupt import Interrupts
from tests.unit.links.signals import ctrl_c, handlers_put_back, module_with_verbs
from tests.unit.links.waiting import Node, in_a_while


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    with handlers_put_back():
        yield


@pytest.fixture
def interrupts() -> Interrupts:
    return Interrupts()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.progress.close()


@pytest.fixture
def links() -> Any:
    return module_with_verbs("nexar.links.stand_in")


@pytest.mark.parametrize("name", ["verb", "nested"])
def test_a_signal_inside_a_verb_raises_after_it_with_the_verb_done(
    interrupts: Interrupts, links: Any, name: str
) -> None:
    interrupts.enter()
    results: list[str] = []

    def use_the_verb() -> None:
        results.append(getattr(links, name)(ctrl_c))
        results.append("the line after it")

    with pytest.raises(KeyboardInterrupt):
        use_the_verb()
    assert results == ["done"]


def test_a_signal_inside_a_verb_that_raises_comes_after_it_too(interrupts: Interrupts, links: Any) -> None:
    interrupts.enter()

    def fail() -> None:
        ctrl_c()
        raise ValueError

    with pytest.raises(KeyboardInterrupt):
        links.verb(fail)


def test_a_program_that_does_nothing_but_send_can_be_interrupted(interrupts: Interrupts, links: Any) -> None:
    interrupts.enter()
    calls: list[int] = []

    def send() -> None:
        calls.append(1)
        if len(calls) == 3:
            ctrl_c()
        time.sleep(0.0001)  # the only time at which others may run, and always inside

    def send_for_ever() -> None:
        while True:
            links.verb(send)

    with pytest.raises(KeyboardInterrupt):
        send_for_ever()
    assert len(calls) == 3


def test_verbs_called_by_the_interpreter_itself_can_be_interrupted_between_two(
    interrupts: Interrupts, links: Any
) -> None:
    interrupts.enter()
    done: list[str] = []
    verbs = [lambda: (ctrl_c(), done.append("first")), lambda: done.append("second")]
    with pytest.raises(KeyboardInterrupt):
        list(map(links.verb, verbs))
    assert done == ["first"]


def test_a_signal_inside_a_verb_that_waits_ends_the_wait(node: Node, links: Any) -> None:
    operation = node.post()
    with pytest.raises(KeyboardInterrupt):
        links.verb_then_wait(ctrl_c, lambda: node.progress.wait([operation], in_a_while()))
    assert operation.cancelled


def test_several_signals_inside_a_verb_are_one_interrupt(interrupts: Interrupts, links: Any) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    interrupts.enter()
    links.verb(lambda: [ctrl_c() for _ in range(5)])
    assert seen == [signal.SIGINT]


def test_nothing_is_traced_once_the_handler_has_run(interrupts: Interrupts, links: Any) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    interrupts.enter()
    links.verb(ctrl_c)
    assert seen
    assert sys.gettrace() is None


def test_beside_a_debugger_the_signal_comes_again_until_it_finds_its_moment(interrupts: Interrupts, links: Any) -> None:
    interrupts.enter()
    sys.settrace(lambda *_: None)
    try:
        results = [links.verb(ctrl_c)]
        with pytest.raises(KeyboardInterrupt):
            time.sleep(60)  # ended by the signal
    finally:
        sys.settrace(None)
    assert results == ["done"]
    assert not interrupts._delay.late


def test_a_verb_that_is_stuck_can_be_interrupted_after_all(
    interrupts: Interrupts, links: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nexar.links.delay._STUCK", 0.05)
    interrupts.enter()
    never = threading.Lock()
    never.acquire()

    def be_stuck() -> None:
        ctrl_c()
        never.acquire(timeout=30)

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        links.verb(be_stuck)
    assert time.monotonic() - begin < 20
