"""Generations without links: what Successors asks of a builder, a context and a group."""

import threading
from collections.abc import Callable
from typing import Any, cast

from nexar.cluster.decisions.completion import UNCONSTRAINED, CompletedCalls
from nexar.cluster.membership import Membership
from nexar.communicator.generation import Generation
from nexar.config import Config
from nexar.errors import LinkClosed, NexarError
from tests.unit.communicator.scripted import membership


class Drive:
    """The progress of a node: who waits is awake."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kicks = 0

    def wake(self) -> None:
        self.kicks += 1


class FakeGroup:
    def __init__(self, members: Membership, communicator: int, me: int) -> None:
        self.membership = members
        self.communicator = communicator
        self.progress = Drive()
        self.nodes = frozenset(member.node for member in members.members)
        self.size = members.size
        rank = members.rank_of(me)
        assert rank is not None
        self.rank = rank
        self.closed = threading.Event()

        self.error: NexarError | None = None

        self.left = 0

    def leave(self) -> None:
        self.left += 1

    def close(self, error: NexarError | None = None) -> None:
        self.error = error
        self.closed.set()

    def closed_error(self) -> NexarError:
        return LinkClosed(owner="this communicator")

    def wait(self, operations: Any, deadline: float) -> None:
        """Until they are done, by whoever finishes them."""
        (operation,) = operations
        done = threading.Event()
        with operation.lock:
            operation.when_done(done.set)
        assert done.wait(20)


class FakeContext:
    """`completed`: the number of the last call that came to its end here."""

    def __init__(self, group: FakeGroup, completed: int) -> None:
        self.group = group
        self.call_log = self
        self.completed = completed
        self.interruptions: list[NexarError] = []

    def interrupt(self, error: NexarError) -> None:
        self.interruptions.append(error)

    def leave(self) -> None:
        """Nobody is told."""


def generation(
    nodes: list[int], *, epoch: int = 1, communicator: int = 0, me: int = 1, completed: int = -1
) -> Generation:
    group = FakeGroup(membership(nodes, epoch), communicator, me)
    return Generation(cast(Any, FakeContext(group, completed)), group.close)


def interruptions(of: Generation) -> list[NexarError]:
    return cast(Any, of.context).interruptions  # type: ignore[no-any-return]


class FakeBuilder:
    """Makes at once, unless a test holds it up or has it fail."""

    def __init__(self, me: int = 1, **settings: Any) -> None:
        self.config = Config(**settings)
        self.me = me
        self.completed = 5
        """Of the branches that it makes."""
        self.least: int | None = None
        """What the others say they have completed; None: as much."""
        self.made: list[Generation] = []
        self.begun: list[FakeGroup] = []
        self.failures: list[Exception] = []
        """Raised one after the other, then nothing is."""
        self.held: threading.Event | None = None
        """Nothing is finished before it is set, or the group was closed."""
        self.only: int | None = None
        """The one communicator that is held up, or fails; None: all are."""
        self.lost: list[int] = []
        """Nodes of whom who waits for them is notified."""
        self.timeouts: list[float] = []
        """Of the builds that were started."""

    def lose(self, node: int, cause: str) -> None:
        self.lost.append(node)

    def make(
        self,
        members: Membership,
        communicator: int,
        deadline: float,
        completed: CompletedCalls | None = None,
        begun: Callable[[Any], None] | None = None,
    ) -> tuple[Generation, int]:
        group = FakeGroup(members, communicator, self.me)
        self.begun.append(group)
        if begun is not None:
            begun(group)
        meant = self.only in (None, communicator)
        while meant and self.held is not None and not self.held.wait(0.001) and not group.closed.is_set():
            pass
        if group.closed.is_set():
            raise group.error or LinkClosed(owner="a test")
        if meant and self.failures:
            raise self.failures.pop(0)
        made = Generation(cast(Any, FakeContext(group, self.completed)), group.close)
        self.made.append(made)
        least = UNCONSTRAINED if completed is None else completed.number
        return made, least if self.least is None else min(least, self.least)

    def start(
        self,
        members: Membership,
        communicator: int,
        completed: CompletedCalls,
        *,
        timeout: float,
        begun: Callable[[Any], None],
        finished: Callable[[Generation, int], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """A thread stands for the one that drives."""
        self.timeouts.append(timeout)

        def build() -> None:
            try:
                made = self.make(members, communicator, timeout, completed, begun)
            except Exception as error:  # noqa: BLE001 - as the product reports it
                failed(error)
            else:
                finished(*made)

        threading.Thread(target=build, name="builds").start()
