"""What a node drives besides its transports: tasks, pollers, attempts."""

import threading
import time
from collections.abc import Iterator

import pytest

from nexar.errors import InternalError, UsageError
from nexar.transport.foreign import Foreign, TransportBroke
from tests.unit.links.waiting import Node, Posted, Waiting


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.progress.close()


def test_a_task_runs_whether_somebody_waits_or_not(node: Node) -> None:
    ran = threading.Event()
    node.progress.run_soon(ran.set)
    assert ran.wait(10)
    operation = node.post()
    waiting = Waiting(node, [operation])
    with node.progress.lock:  # allowed there
        node.progress.run_soon(operation.end)
    assert waiting.ended() is None


def test_a_task_that_raises_ends_every_wait(node: Node) -> None:
    first = Waiting(node, [node.post()])
    assert node.sleep.begun.wait(10)
    second = Waiting(node, [node.post()])
    node.progress.run_soon(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    assert all(isinstance(waiting.ended(), InternalError) for waiting in (first, second))
    with pytest.raises(InternalError):
        node.progress.check()


def foreign_node(told: list[str]) -> Node:
    return Node(
        lambda inside: Foreign(inside, lambda error: f"the transport of somebody raised {error!r}"),
        on_end=lambda: told.append("ended"),
    )


def test_a_transport_of_others_that_raises_ends_all_waiting_with_its_name() -> None:
    told: list[str] = []
    node = foreign_node(told)
    first = Waiting(node, [node.post()])
    assert node.sleep.begun.wait(10)
    second = Waiting(node, [node.post()])
    node.transport.tell(lambda: 1 // 0)
    for waiting in (first, second):
        error = waiting.ended()
        assert isinstance(error, TransportBroke)
        assert "of somebody raised ZeroDivisionError" in str(error)
    with pytest.raises(TransportBroke):
        node.progress.check()
    assert told
    node.progress.close()


def test_it_does_so_also_where_nobody_waits() -> None:
    told: list[str] = []
    node = foreign_node(told)
    assert node.sleep.begun.wait(10)
    node.transport.tell(lambda: 1 // 0)
    node.progress._background._thread.join(10)
    assert told == ["ended"]
    with pytest.raises(TransportBroke, match="of somebody raised ZeroDivisionError"):
        node.wait(node.post())
    node.progress.close()


def test_pollers_are_driven(node: Node) -> None:
    class Poller:
        spins = False

        def __init__(self) -> None:
            self.operation: Posted | None = None

        def poll(self) -> bool:
            operation, self.operation = self.operation, None
            if operation is not None:
                operation.end()
            return operation is not None

        def arm(self) -> bool:
            return self.operation is None

    poller, operation = Poller(), node.post()
    node.progress.add_poller(poller)
    poller.operation = operation
    node.wait(operation)
    node.progress.remove_poller(poller)
    poller.operation = second = node.post()
    node.transport.tell(lambda: None, second.end)
    node.wait(second)
    assert poller.operation is second


def test_an_attempt_runs_at_once_and_sends_the_progress_thread_away(node: Node) -> None:
    assert node.sleep.begun.wait(10)
    assert node.progress._background.leads

    def gone() -> bool:
        while node.progress._background.leads:
            time.sleep(0)
        return True

    assert node.progress.attempt(gone)
    assert not node.progress._followers
    assert not node.progress.attempt(lambda: False)
    node.progress.close()
    with pytest.raises(UsageError, match="closed"):
        node.progress.attempt(gone)


def test_what_was_handed_over_is_run_when_the_node_closes() -> None:
    node = Node()
    node.progress._drive.stop()  # nobody gets to run it before
    ran: list[int] = []
    node.progress.run_soon(lambda: ran.append(1))
    node.progress.close()
    assert ran == [1]
