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

from nexar.links.operation import Waiter
from nexar.links.process_hooks import SignalDeferral, WrappedHandler, is_inside
from nexar.links.process_hooks import interrupts as of_the_process
from nexar.links.progress import DriverElection
from tests.unit.links.signals import ctrl_c, handlers_put_back, module_with_verbs
from tests.unit.links.waiting import Node, Waiting, in_a_while


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    with handlers_put_back():
        yield


@pytest.fixture
def interrupts() -> SignalDeferral:
    return SignalDeferral()


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
    interrupts: SignalDeferral, links: Any, name: str
) -> None:
    interrupts.enter()
    results: list[str] = []

    def use_the_verb() -> None:
        results.append(getattr(links, name)(ctrl_c))
        results.append("the line after it")

    with pytest.raises(KeyboardInterrupt):
        use_the_verb()
    assert results == ["done"]


def test_a_signal_inside_a_verb_that_raises_comes_after_it_too(interrupts: SignalDeferral, links: Any) -> None:
    interrupts.enter()

    def fail() -> None:
        ctrl_c()
        raise ValueError

    with pytest.raises(KeyboardInterrupt):
        links.verb(fail)


def test_a_program_that_does_nothing_but_send_can_be_interrupted(interrupts: SignalDeferral, links: Any) -> None:
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
    interrupts: SignalDeferral, links: Any
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


def test_several_signals_inside_a_verb_are_one_interrupt(interrupts: SignalDeferral, links: Any) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    interrupts.enter()
    links.verb(lambda: [ctrl_c() for _ in range(5)])
    assert seen == [signal.SIGINT]


def test_nothing_is_traced_once_the_handler_has_run(interrupts: SignalDeferral, links: Any) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    interrupts.enter()
    links.verb(ctrl_c)
    assert seen
    assert sys.gettrace() is None


def test_beside_a_debugger_the_signal_comes_again_until_it_finds_its_moment(
    interrupts: SignalDeferral, links: Any
) -> None:
    interrupts.enter()
    sys.settrace(lambda *_: None)
    try:
        results = [links.verb(ctrl_c)]
        with pytest.raises(KeyboardInterrupt):
            time.sleep(60)  # ended by the signal
    finally:
        sys.settrace(None)
    assert results == ["done"]
    assert not interrupts._deferred.handlers


def test_a_verb_that_is_stuck_can_be_interrupted_after_all(
    interrupts: SignalDeferral, links: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nexar.links.process_hooks._STUCK_AFTER", 0.05)
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


def _frame() -> FrameType:
    return sys._getframe(1)


@pytest.mark.parametrize(
    ("module", "inside"),
    [
        ("nexar.links.stand_in", True),
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
    handler = WrappedHandler(signal.SIGINT, lambda *_: seen.append(is_inside(_frame())), lambda *_: None)
    module_with_verbs("nexar.links.stand_in").verb(lambda: handler.run_wrapped(None))
    assert seen == [False]


def test_a_dial_can_be_interrupted_at_once(interrupts: SignalDeferral) -> None:
    module = module_with_verbs("nexar.transport.stand_in")
    interrupts.enter()
    with pytest.raises(KeyboardInterrupt):
        module.verb(lambda: (ctrl_c(), pytest.fail("went on")))


@pytest.mark.parametrize("waiting", [False, True], ids=["at once", "settled"])
def test_a_handler_that_calls_the_one_before_it_does_not_go_round_in_circles(
    interrupts: SignalDeferral, waiting: bool
) -> None:
    interrupts.enter()
    seen: list[str] = []
    previous: Any = signal.getsignal(signal.SIGINT)

    def chaining(number: int, frame: FrameType | None) -> None:
        seen.append("mine")
        previous(number, frame)

    signal.signal(signal.SIGINT, chaining)
    interrupts.begin(lambda: None, Waiter())  # steps before it again
    assert isinstance(signal.getsignal(signal.SIGINT), WrappedHandler)
    if not waiting:
        interrupts.end()
    with pytest.raises(KeyboardInterrupt):
        _interrupt_and_settle(interrupts)
    interrupts.end()
    assert seen == ["mine"]


def _interrupt_and_settle(interrupts: SignalDeferral) -> None:
    ctrl_c()
    interrupts.settle()


def test_a_user_who_puts_our_handler_back_is_rid_of_its_own(interrupts: SignalDeferral) -> None:
    interrupts.enter()
    previous = signal.signal(signal.SIGINT, lambda *_: pytest.fail("it was taken away"))
    interrupts.begin(lambda: None, Waiter())
    interrupts.end()
    signal.signal(signal.SIGINT, previous)
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()


# -- waits -----------------------------------------------------------------------------------------------------------


def test_a_signal_while_waiting_wakes_the_wait_and_raises_when_it_is_settled(interrupts: SignalDeferral) -> None:
    woken: list[bool] = []
    interrupts.begin(lambda: woken.append(True), Waiter())
    ctrl_c()
    assert woken
    assert interrupts.pending
    with pytest.raises(KeyboardInterrupt):
        interrupts.settle()
    interrupts.end()


def test_a_signal_that_was_not_settled_raises_at_the_end(interrupts: SignalDeferral) -> None:
    interrupts.begin(lambda: None, Waiter())
    ctrl_c()
    with pytest.raises(KeyboardInterrupt):
        interrupts.end()


def test_a_signal_at_any_other_time_raises_at_once(interrupts: SignalDeferral) -> None:
    interrupts.begin(lambda: None, Waiter())
    interrupts.end()
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()


def test_a_signal_in_a_wait_that_leads_cancels_its_operations(node: Node) -> None:
    operation = node.post()
    node.transport.execute(ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        node.wait(operation)
    assert operation.cancelled


def test_a_signal_in_a_wait_that_follows_cancels_its_operations(node: Node) -> None:
    never, mine = node.post(), node.post()
    leader = Waiting(node, [never])
    leader.is_driving()
    node.transport.execute(lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        node.wait(mine)
    assert mine.cancelled
    node.transport.execute(never.end)
    assert leader.ended() is None


@pytest.mark.parametrize("moment", ["begin", "prepare", "append"])
def test_a_signal_on_the_way_into_a_wait_is_not_slept_over(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _interrupt_at(moment, monkeypatch)
    node = Node()
    never, mine = node.post(), node.post()
    leader = Waiting(node, [never])
    leader.is_driving()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        node.wait(mine, deadline=begin + 20)
    assert time.monotonic() - begin < 10
    assert mine.cancelled
    node.transport.execute(never.end)
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

    class Watched(DriverElection):
        def __init__(self, *facts: Any) -> None:
            super().__init__(*facts)
            self.waiting_threads = Followers()

    if moment == "append":
        monkeypatch.setattr("nexar.links.progress.DriverElection", Watched)
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
    node.transport.execute(ctrl_c, operation.end)
    node.wait(operation)
    assert seen == [signal.SIGINT]


def test_a_handler_may_wait_in_its_turn(node: Node) -> None:
    inner, outer = node.post(), node.post()

    def handle(number: int, frame: FrameType | None) -> None:
        node.transport.execute(inner.end)
        node.wait(inner)

    signal.signal(signal.SIGINT, handle)
    node.transport.execute(ctrl_c, ctrl_c, outer.end)
    node.wait(outer)
    assert inner.done


# -- the handlers of others ------------------------------------------------------------------------------------------


def test_the_users_own_handler_is_called_and_not_replaced(interrupts: SignalDeferral) -> None:
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
    node.transport.execute(lambda: signal.raise_signal(number))
    with pytest.raises(SystemExit):
        node.wait(operation)
    assert operation.cancelled


def test_an_ignored_signal_stays_ignored(interrupts: SignalDeferral) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.begin(lambda: None, Waiter())
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    interrupts.end()


def test_handlers_are_given_back_with_the_last_node() -> None:
    before = signal.getsignal(signal.SIGINT)
    first, second = Node(), Node()
    assert isinstance(signal.getsignal(signal.SIGINT), WrappedHandler)
    first.progress.close()
    assert isinstance(signal.getsignal(signal.SIGINT), WrappedHandler)
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


def test_another_thread_leaves_handlers_alone(interrupts: SignalDeferral) -> None:
    began: list[bool] = []
    thread = threading.Thread(target=lambda: began.append(interrupts.begin(lambda: None, Waiter())))
    thread.start()
    thread.join()
    assert began == [False]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
