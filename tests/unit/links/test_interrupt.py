import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from nexar.links.handler import Handler
from nexar.links.interrupt import Interrupts
from nexar.links.interrupt import interrupts as of_the_process
from nexar.links.leadership import Leadership
from nexar.links.waiter import Waiter
from tests.unit.links.signals import ctrl_c, handlers_put_back
from tests.unit.links.waiting import Node, Waiting


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


# -- waits -----------------------------------------------------------------------------------------------------------


def test_a_signal_while_waiting_wakes_the_wait_and_raises_when_it_is_settled(interrupts: Interrupts) -> None:
    woken: list[bool] = []
    interrupts.begin(lambda: woken.append(True), Waiter())
    ctrl_c()
    assert woken
    assert interrupts.pending
    with pytest.raises(KeyboardInterrupt):
        interrupts.settle()
    interrupts.end()


def test_a_signal_that_was_not_settled_raises_at_the_end(interrupts: Interrupts) -> None:
    interrupts.begin(lambda: None, Waiter())
    ctrl_c()
    with pytest.raises(KeyboardInterrupt):
        interrupts.end()


def test_a_signal_at_any_other_time_raises_at_once(interrupts: Interrupts) -> None:
    interrupts.begin(lambda: None, Waiter())
    interrupts.end()
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()


def test_a_signal_in_a_wait_that_leads_cancels_its_operations(node: Node) -> None:
    operation = node.post()
    node.transport.tell(ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        node.wait(operation)
    assert operation.cancelled


def test_a_signal_in_a_wait_that_follows_cancels_its_operations(node: Node) -> None:
    never, mine = node.post(), node.post()
    leader = Waiting(node, [never])
    leader.leads()
    node.transport.tell(lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        node.wait(mine)
    assert mine.cancelled
    node.transport.tell(never.end)
    assert leader.ended() is None


@pytest.mark.parametrize("moment", ["begin", "prepare", "append"])
def test_a_signal_on_the_way_into_a_wait_is_not_slept_over(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _interrupt_at(moment, monkeypatch)
    node = Node()
    never, mine = node.post(), node.post()
    leader = Waiting(node, [never])
    leader.leads()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        node.wait(mine, deadline=begin + 20)
    assert time.monotonic() - begin < 10
    assert mine.cancelled
    node.transport.tell(never.end)
    assert leader.ended() is None
    node.progress.close()


def _interrupt_at(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C once, as the main thread comes to that place. Called before the node is made, whose threads would keep
    what is replaced.
    """
    main, fired = threading.get_ident(), []

    def once() -> None:
        if threading.get_ident() == main and not fired:
            fired.append(True)
            ctrl_c()

    class Followers(list[Waiter]):
        def append(self, waiter: Waiter) -> None:
            once()
            super().append(waiter)

    class Watched(Leadership):
        def __init__(self, *facts: Any) -> None:
            super().__init__(*facts)
            self.followers = Followers()

    if moment == "append":
        monkeypatch.setattr("nexar.links.progress.Leadership", Watched)
    elif moment == "begin":
        monkeypatch.setattr(of_the_process, "begin", _after(once, of_the_process.begin))
    else:
        monkeypatch.setattr(Waiter, "prepare", _after(once, Waiter.prepare))


def _after(first: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    def both(*arguments: Any) -> Any:
        first()
        return function(*arguments)

    return both


def test_a_handler_that_returns_lets_the_wait_go_on(node: Node) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    operation = node.post()
    node.transport.tell(ctrl_c, operation.end)
    node.wait(operation)
    assert seen == [signal.SIGINT]


def test_a_handler_may_wait_in_its_turn(node: Node) -> None:
    inner, outer = node.post(), node.post()

    def handle(number: int, frame: FrameType | None) -> None:
        node.transport.tell(inner.end)
        node.wait(inner)

    signal.signal(signal.SIGINT, handle)
    node.transport.tell(ctrl_c, ctrl_c, outer.end)
    node.wait(outer)
    assert inner.done


# -- the handlers of others ------------------------------------------------------------------------------------------


def test_the_users_own_handler_is_called_and_not_replaced(interrupts: Interrupts) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    interrupts.begin(lambda: None, Waiter())
    ctrl_c()
    assert not seen
    interrupts.settle()
    assert seen == [signal.SIGINT]
    interrupts.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1])
def test_other_signals_whose_handler_raises_find_their_moment_too(node: Node, number: int) -> None:
    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(3)

    signal.signal(number, leave)
    of_the_process.enter()
    operation = node.post()
    node.transport.tell(lambda: signal.raise_signal(number))
    with pytest.raises(SystemExit):
        node.wait(operation)
    assert operation.cancelled


def test_an_ignored_signal_stays_ignored(interrupts: Interrupts) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.begin(lambda: None, Waiter())
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    interrupts.end()


def test_handlers_are_given_back_with_the_last_node() -> None:
    before = signal.getsignal(signal.SIGINT)
    first, second = Node(), Node()
    assert isinstance(signal.getsignal(signal.SIGINT), Handler)
    first.progress.close()
    assert isinstance(signal.getsignal(signal.SIGINT), Handler)
    second.progress.close()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_that_took_our_place_keeps_it_when_the_last_node_goes() -> None:
    node, handler = Node(), lambda *_: None
    signal.signal(signal.SIGINT, handler)
    node.progress.close()
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_node_inside_asyncio_run_leaves_ctrl_c_to_asyncio() -> None:
    cancelled: list[bool] = []

    async def main() -> None:
        node = Node()
        try:
            ctrl_c()
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        finally:
            node.progress.close()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert cancelled
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_asyncio_run_beside_an_open_node_raises_and_cancels_its_tasks(node: Node) -> None:
    cancelled: list[bool] = []

    async def other() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def main() -> None:
        task = asyncio.ensure_future(other())
        await asyncio.sleep(0)
        ctrl_c()
        await task

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert cancelled


def test_a_forked_child_has_its_own_handler_again(node: Node) -> None:
    child = os.fork()
    if not child:
        os._exit(0 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_another_thread_leaves_handlers_alone(interrupts: Interrupts) -> None:
    began: list[bool] = []
    thread = threading.Thread(target=lambda: began.append(interrupts.begin(lambda: None, Waiter())))
    thread.start()
    thread.join()
    assert began == [False]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
