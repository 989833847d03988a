import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from nexar.links.handler import Handler, is_inside
from nexar.links.interrupt import Interrupts
from nexar.links.waiter import Waiter
from tests.unit.links.signals import ctrl_c, handlers_put_back, module_with_verbs


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    with handlers_put_back():
        yield


@pytest.fixture
def interrupts() -> Interrupts:
    return Interrupts()


def _frame() -> FrameType:
    return sys._getframe(1)


@pytest.mark.parametrize(
    ("module", "inside"),
    [
        ("nexar.links.stand_in", True),
        ("nexar.links.redial", False),
        ("nexar.group", True),
        ("nexar.collectives.stand_in", True),
        ("nexar.communicator.stand_in", True),
        ("nexar.transport.stand_in", False),
        ("nexar.testing.stand_in", False),
        ("somebody.else", False),
    ],
)
def test_only_verbs_are_sheltered_and_only_where_they_do_not_block(module: str, inside: bool) -> None:
    seen: list[bool] = []
    module_with_verbs(module).verb(lambda: seen.append(is_inside(_frame())))
    assert seen == [inside]


def test_a_handler_of_the_user_below_a_frame_of_ours_is_outside() -> None:
    seen: list[bool] = []
    handler = Handler(signal.SIGINT, lambda *_: seen.append(is_inside(_frame())), lambda *_: None)
    module_with_verbs("nexar.links.stand_in").verb(lambda: handler.hand_over(None))
    assert seen == [False]


def test_a_dial_can_be_interrupted_at_once(interrupts: Interrupts) -> None:
    module = module_with_verbs("nexar.transport.stand_in")
    interrupts.enter()
    with pytest.raises(KeyboardInterrupt):
        module.verb(lambda: (ctrl_c(), pytest.fail("went on")))


@pytest.mark.parametrize("waiting", [False, True], ids=["at once", "settled"])
def test_a_handler_that_calls_the_one_before_it_does_not_go_round_in_circles(
    interrupts: Interrupts, waiting: bool
) -> None:
    interrupts.enter()
    seen: list[str] = []
    previous: Any = signal.getsignal(signal.SIGINT)

    def chaining(number: int, frame: FrameType | None) -> None:
        seen.append("mine")
        previous(number, frame)

    signal.signal(signal.SIGINT, chaining)
    interrupts.begin(lambda: None, Waiter())  # steps before it again
    assert isinstance(signal.getsignal(signal.SIGINT), Handler)
    if not waiting:
        interrupts.end()
    with pytest.raises(KeyboardInterrupt):
        _interrupt_and_settle(interrupts)
    interrupts.end()
    assert seen == ["mine"]


def _interrupt_and_settle(interrupts: Interrupts) -> None:
    ctrl_c()
    interrupts.settle()


def test_a_user_who_puts_our_handler_back_is_rid_of_its_own(interrupts: Interrupts) -> None:
    interrupts.enter()
    previous = signal.signal(signal.SIGINT, lambda *_: pytest.fail("it was taken away"))
    interrupts.begin(lambda: None, Waiter())
    interrupts.end()
    signal.signal(signal.SIGINT, previous)
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()
