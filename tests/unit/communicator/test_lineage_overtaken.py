import threading
from collections.abc import Callable, Iterator

import pytest

from nexar.cluster.change import WORLD
from nexar.communicator.communicator import Communicator
from nexar.communicator.events import FailureEvent
from nexar.communicator.lineage import Lineage
from nexar.communicator.local import local_communicators
from nexar.communicator.settling import NEWCOMER
from nexar.config import Config
from nexar.errors import Expelled, LinkClosed, MembershipChanged, NexarError, PeerLost
from nexar.group import deadline_after
from tests.ranks import PATIENCE, on_every
from tests.unit.cluster.memory_mesh import eventually, soon
from tests.unit.communicator.lineages import PART, Story, expel, nodes

OTHER = 77


@pytest.fixture
def four() -> Iterator[list[Communicator]]:
    with local_communicators(4, Config()) as made:
        yield made


def lineage_of(comm: Communicator) -> Lineage:
    return comm._presence.lineage


class Making:
    """One rank makes a communicator with others, who never take part; begun when this has returned."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.raised: NexarError | None = None
        self._thread = threading.Thread(target=self._make)
        self._thread.start()
        while not lineage_of(comm)._making:
            self._thread.join(0.001)

    def _make(self) -> None:
        comm = self._comm
        try:
            lineage_of(comm).begin(comm.membership, OTHER, deadline_after(10 * PATIENCE), completed=NEWCOMER)
        except NexarError as error:
            self.raised = error

    def end(self) -> NexarError | None:
        self._thread.join(PATIENCE)
        return self.raised


def meanwhile(comm: Communicator, happening: Callable[[], None]) -> NexarError | None:
    making = Making(comm)
    happening()
    return making.end()


def test_who_makes_a_communicator_does_not_wait_for_those_that_a_change_has_called_away(
    four: list[Communicator],
) -> None:
    """The first rank waits for the last, which has heard of the change and will never take part."""
    raising = ValueError("no")
    assert isinstance(meanwhile(four[0], lambda: four[2].__exit__(ValueError, raising, None)), LinkClosed)
    survivors = [four[0], four[1], four[3]]
    successors = on_every(survivors, lambda comm: comm.shrink())
    assert on_every(successors, lambda comm: comm.all_reduce(1)) == [3, 3, 3]
    assert lineage_of(four[0])._making == {}


def test_who_makes_a_communicator_with_one_that_closes_is_told_and_then_there_is_a_successor(
    four: list[Communicator],
) -> None:
    raised = meanwhile(four[0], four[2].close)
    assert isinstance(raised, PeerLost)
    survivors = [four[0], four[1], four[3]]
    successors = on_every(survivors, lambda comm: comm.shrink())
    assert on_every(successors, lambda comm: comm.all_reduce(1)) == [3, 3, 3]


def test_who_is_expelled_before_its_first_communicator_hears_why(four: list[Communicator]) -> None:
    lineage = lineage_of(four[0])
    lineage.forget(four[0]._branch)
    raised = meanwhile(four[0], lambda: expel(lineage, 2, "nobody could reach it"))
    assert isinstance(raised, Expelled)
    assert raised.reason == "nobody could reach it"


# ---------------------------------------------------------------- who goes quietly


def test_one_that_is_made_with_who_went_quietly_is_made_again_without_it(story: Story) -> None:
    story.widen()
    world = story.begin()
    story.maker.held = threading.Event()
    story.change(2)
    eventually(lambda: len(story.maker.begun) == 2, "a successor in the making")
    story.change(4, quiet=True)
    eventually(lambda: story.renewals == [((WORLD,), 3)], "a wish for the next")
    story.maker.held.set()
    story.change(renewed=(WORLD,))
    successor = story.successor(world)
    assert (nodes(successor), successor.membership.epoch) == ([1, 3], 4)
    change = story.raised(world)
    assert isinstance(change, MembershipChanged)
    assert change.lost == {1: "node 2 was killed", 3: "it left"}


def test_none_is_begun_with_who_went_quietly(story: Story) -> None:
    first = story.world
    story.change(3, quiet=True)
    with pytest.raises(PeerLost, match="it left"):
        story.lineage.begin(first, PART, soon())
    assert story.begin(1, 2, communicator=PART + 1).membership.size == 2


def test_listeners_hear_who_went_quietly(story: Story) -> None:
    part = story.begin(3, 1, communicator=PART)
    heard: list[FailureEvent] = []
    with part.failures.subscribe(heard.append):
        story.change(3, quiet=True)
        story.change(2)
        eventually(lambda: bool(heard), "an event")
    assert [(each.rank, each.node, each.cause, each.state) for each in heard] == [(0, 3, "it left", "left")]
