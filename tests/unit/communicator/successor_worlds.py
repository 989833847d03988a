"""Successors of one node without links, and the events that a test gives it."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, cast

from nexar.cluster.control_loop import ControlLoop
from nexar.cluster.decisions.membership_events import MembershipAction, MembershipDecided, SelfExpelled
from nexar.cluster.decisions.node_machine import NodeAction, NodeMachine
from nexar.cluster.decisions.successor_events import (
    AdoptMembership,
    GenerationKey,
    Investigate,
    RevokeReceived,
    SendNotice,
)
from nexar.cluster.machine_runner import MachineRunner
from nexar.cluster.membership import WORLD, Change, Departure, Membership
from nexar.communicator.generation import Generation
from nexar.communicator.successors import Successors
from nexar.errors import NexarError, Revoked
from tests.unit.cluster.memory_mesh import soon
from tests.unit.communicator.generations import FakeBuilder
from tests.unit.communicator.scripted import membership

PART = 7


class AloneMachine(NodeMachine):
    """A test decides about the world, and gets the requests for renewals."""

    def __init__(self, membership: Membership, recovery_timeout: float) -> None:
        super().__init__(1, membership, recovery_timeout=recovery_timeout, random=Random(1))
        self.renew: Callable[[tuple[int, ...], int], list[MembershipAction] | None] = lambda *_: None

    def _request(self, communicators: tuple[int, ...], epoch: int, now: float) -> list[MembershipAction]:
        return self.renew(communicators, epoch) or []


class Story:
    """Successors of node 1, in a world of three, and what it sends to others."""

    def __init__(self, **settings: Any) -> None:
        self.builder = FakeBuilder(**settings)
        self.loop = ControlLoop()
        self.missed: list[int] = []
        self.renewals: list[tuple[tuple[int, ...], int]] = []
        self.opened: list[Generation] = []
        self.notices: list[SendNotice] = []
        self.adopted: list[AdoptMembership] = []
        self.live_in(membership([1, 2, 3], 1))

    def live_in(self, world: Membership) -> None:
        self.world = world
        self.machine = AloneMachine(world, self.builder.config.recovery_timeout)
        self.machine.renew = lambda which, epoch: self.renewals.append((which, epoch))
        self.runner = MachineRunner(self.machine, self.loop, self.perform)
        self.successors = Successors(
            cast(Any, self.builder),
            self.runner,
            wrap=partial(self._call, "wrap"),
            opened=partial(self._call, "on_opened"),
            report_unreachable=partial(self._call, "report_unreachable"),
        )

    def _call(self, name: str, *facts: Any) -> Any:
        """A test may replace the method at any time."""
        return getattr(self, name)(*facts)

    def wrap(self, generation: Generation) -> tuple[str, Generation]:
        return "communicator of", generation

    def on_opened(self, generation: Generation) -> None:
        self.opened.append(generation)

    def report_unreachable(self, node: int, cause: str) -> None:
        self.missed.append(node)

    def perform(self, action: NodeAction) -> None:
        match action:
            case SendNotice():
                self.notices.append(action)
            case Investigate(node, cause):
                self.report_unreachable(node, cause)
            case AdoptMembership():
                self.adopted.append(action)
            case SelfExpelled():
                pass
            case _:
                self.successors.perform(cast(Any, action))

    def widen(self) -> None:
        """A world of four, from the beginning."""
        self.live_in(membership([1, 2, 3, 4], 1))

    def closed_by(self, generation: Generation, node: int) -> None:
        """A member says that it has closed it."""
        key, rank = (
            GenerationKey(generation.communicator, generation.membership.epoch),
            generation.membership.rank_of(node),
        )
        assert rank is not None
        self.runner.put(RevokeReceived(node, key, rank, "it has closed it", closed=True))

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
        self.runner.put(MembershipDecided(change))
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


def expel(runner: MachineRunner, epoch: int, reason: str) -> None:
    """The others went on without it."""
    runner.put(SelfExpelled(epoch, reason))


def nodes(generation: Generation) -> list[int]:
    return [member.node for member in generation.membership.members]
