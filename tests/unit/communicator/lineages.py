"""A lineage of one node without links, and what a test tells it."""

from typing import Any, cast

from nexar.cluster.change import WORLD, Change, Departure
from nexar.communicator.branch import Branch
from nexar.communicator.lineage import Lineage
from nexar.errors import Expelled, NexarError, Revoked
from tests.unit.cluster.memory_mesh import soon
from tests.unit.communicator.branches import FakeMaker
from tests.unit.communicator.scripted import membership

PART = 7


class Story:
    """A lineage of node 1, in a world of three, and what it tells others."""

    def __init__(self, **settings: Any) -> None:
        self.maker = FakeMaker(**settings)
        self.world = membership([1, 2, 3], 1)
        self.lineage = Lineage(cast(Any, self.maker), self.world)
        self.lineage.wrap = lambda branch: ("communicator of", branch)
        self.missed: list[int] = []
        self.lineage.missed = lambda node, _: self.missed.append(node)
        self.renewals: list[tuple[tuple[int, ...], int]] = []
        self.lineage.renew = lambda which, epoch: self.renewals.append((which, epoch))
        self.opened: list[Branch] = []
        self.lineage.opened = self.opened.append

    def widen(self) -> None:
        """A world of four, from the beginning."""
        self.world = self.lineage._course.world = membership([1, 2, 3, 4], 1)

    def begin(self, *nodes: int, communicator: int = WORLD) -> Branch:
        members = membership(list(nodes), self.world.epoch) if nodes else self.world
        return self.lineage.begin(members, communicator, soon())

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
        self.lineage.changed(change, self.world)
        return change

    def successor(self, of: Branch) -> Branch:
        """Wait for it."""
        given = self.lineage.wait_for_successor(of, soon())
        assert given is not None
        return cast(Branch, given[1])

    def raised(self, branch: Branch, error: NexarError | None = None) -> BaseException:
        """What a call on it raises that was interrupted."""
        return self.lineage.judge(branch, error or Revoked(communicator="0", reason="its members change"))


def _cause(node: int, *, quiet: bool) -> str:
    return "it left" if quiet else f"node {node} was killed"


def expel(lineage: Lineage, epoch: int, reason: str) -> None:
    """The others went on without it."""
    lineage.end_all(lambda group: Expelled(epoch=epoch, reason=reason, rank=group.rank))


def nodes(branch: Branch) -> list[int]:
    return [member.node for member in branch.membership.members]
