"""Successors of one node without links, and the events that a test gives it."""

from collections.abc import Callable
from typing import Any, cast

from nexar.cluster.control_loop import ControlLoop
from nexar.cluster.decisions.successor_events import GenerationKey, RevokeReceived, SendNotice
from nexar.cluster.membership import WORLD, Change, Departure, Membership
from nexar.communicator.generation import Generation
from nexar.communicator.successors import Successors
from nexar.errors import Expelled, NexarError, Revoked
from tests.unit.cluster.memory_mesh import soon
from tests.unit.communicator.generations import FakeBuilder
from tests.unit.communicator.scripted import membership

PART = 7


class Story:
    """Successors of node 1, in a world of three, and what it sends to others."""

    def __init__(self, **settings: Any) -> None:
        self.builder = FakeBuilder(**settings)
        self.loop = ControlLoop()
        self.missed: list[int] = []
        self.renewals: list[tuple[tuple[int, ...], int]] = []
        self.opened: list[Generation] = []
        self.notices: list[SendNotice] = []
        self._live_in(membership([1, 2, 3], 1))

    def _live_in(self, world: Membership) -> None:
        self.world = world
        self.successors = Successors(cast(Any, self.builder), world, self.loop)
        self.successors.wrap = lambda generation: ("communicator of", generation)
        self.successors.report_unreachable = lambda node, _: self.missed.append(node)
        self.successors.renew = lambda which, epoch: self.renewals.append((which, epoch))
        self.successors.opened = self.opened.append
        self.successors.send_notice = self.notices.append

    def widen(self) -> None:
        """A world of four, from the beginning."""
        self._live_in(membership([1, 2, 3, 4], 1))

    def closed_by(self, generation: Generation, node: int) -> None:
        """A member says that it has closed it."""
        key, rank = (
            GenerationKey(generation.communicator, generation.membership.epoch),
            generation.membership.rank_of(node),
        )
        assert rank is not None
        self.successors.put(RevokeReceived(node, key, rank, "it has closed it", closed=True))

    def begin(self, *nodes: int, communicator: int = WORLD) -> Generation:
        members = membership(list(nodes), self.world.epoch) if nodes else self.world
        return self.successors.begin(members, communicator, soon())

    def change(
        self, *gone: int, joined: tuple[int, ...] = (), quiet: bool = False, willing: bool = False, **facts: Any
    ) -> Change:
        """The world has chosen."""
        change = Change(
            self.world.epoch + 1,
            left=tuple(Departure(node, _cause(node, quiet=quiet), willing or quiet, quiet) for node in gone),
            joined=membership(list(joined), 1).members if joined else (),
            **facts,
        )
        self.world = change.apply(self.world)
        self.successors.membership_adopted(change, self.world)
        return change

    def soon(self, task: Callable[[], object]) -> None:
        """Run it in another thread, as what the world decides comes."""
        self.loop.call_soon(lambda: (task(), None)[1])

    def successor(self, of: Generation) -> Generation:
        """Wait for it."""
        given = self.successors.wait_for_successor(of, soon())
        assert given is not None
        return cast(Generation, given[1])

    def raised(self, generation: Generation, error: NexarError | None = None) -> BaseException:
        """What a call on it raises that was interrupted."""
        return self.successors.resolve_error(
            generation, error or Revoked(communicator="0", reason="its members change")
        )


def _cause(node: int, *, quiet: bool) -> str:
    return "it left" if quiet else f"node {node} was killed"


def expel(all_successors: Successors, epoch: int, reason: str) -> None:
    """The others went on without it."""
    all_successors.end_all(lambda group: Expelled(epoch=epoch, reason=reason, rank=group.rank))


def nodes(generation: Generation) -> list[int]:
    return [member.node for member in generation.membership.members]
