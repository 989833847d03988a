"""A successor machine and a short notation for its events and actions."""

from typing import Any

from nexar.cluster.decisions.membership_events import MembershipDecided, NoProgress, Tick
from nexar.cluster.decisions.successor_events import (
    BeginRequested,
    BuildFailed,
    BuildFailure,
    BuildFailureKind,
    BuildFinished,
    GenerationKey,
    LocalClose,
    MemberNeeded,
    OpenGeneration,
    Released,
    RevokeReceived,
    RevokeRequested,
    StartBuild,
    SuccessorAction,
    Terminate,
    Terminated,
    TerminationKind,
)
from nexar.cluster.decisions.successor_machine import SuccessorMachine
from nexar.cluster.membership import WORLD, Change, Departure, Member, Membership

ME, PART, TIMEOUT = 1, 7, 30.0


def membership(*nodes: int, epoch: int = 1) -> Membership:
    return Membership("test", epoch, tuple(map(member, nodes)))


def member(node: int) -> Member:
    return Member(node, "host", node.to_bytes(32, "big"), {})


def key(communicator: int, epoch: int) -> GenerationKey:
    return GenerationKey(communicator, epoch)


def killed(*nodes: int) -> tuple[Departure, ...]:
    return tuple(Departure(node, f"node {node} was killed") for node in nodes)


def left(*nodes: int) -> tuple[Departure, ...]:
    """Quietly."""
    return tuple(Departure(node, "it left", willing=True, quiet=True) for node in nodes)


def lost(node: int, cause: str = "connection reset") -> BuildFailure:
    return BuildFailure(BuildFailureKind.PEER_LOST, (node,), cause)


OVERTAKEN = BuildFailure(BuildFailureKind.OVERTAKEN)
REJECTED = BuildFailure(BuildFailureKind.REJECTED)
TIMED_OUT = BuildFailure(BuildFailureKind.TIMED_OUT)
EXPELLED = Terminated(TerminationKind.EXPELLED, epoch=9, reason="it was silent")


class Scene:
    """Node 1 in a world of these nodes, at a time that only the test moves."""

    def __init__(self, *nodes: int) -> None:
        self.machine = SuccessorMachine(ME, membership(*nodes or (1, 2, 3)), recovery_timeout=TIMEOUT)
        self.now = 100.0
        self.begun = 0

    def step(self, event: Any) -> list[SuccessorAction]:
        return self.machine.step(event, self.now)

    def request(self, *nodes: int, communicator: int = WORLD) -> list[SuccessorAction]:
        """Ask for a first generation of these nodes; of all by default."""
        self.begun += 1
        world = self.machine.world
        wanted = membership(*nodes, epoch=world.epoch) if nodes else world
        return self.step(BeginRequested(self.begun, communicator, wanted))

    def begin(self, *nodes: int, communicator: int = WORLD) -> GenerationKey:
        """Open a first generation of these nodes; of all by default."""
        (started,) = self.request(*nodes, communicator=communicator)
        assert isinstance(started, StartBuild)
        opened = self.finish(started)[0]
        assert isinstance(opened, OpenGeneration)
        return opened.key

    def change(self, **facts: Any) -> list[SuccessorAction]:
        return self.step(MembershipDecided(Change(self.machine.world.epoch + 1, **facts)))

    def finish(self, build: StartBuild, completed: int | None = None) -> list[SuccessorAction]:
        return self.step(BuildFinished(build.build, completed))

    def fail(self, build: StartBuild, failure: BuildFailure = OVERTAKEN) -> list[SuccessorAction]:
        return self.step(BuildFailed(build.build, failure))

    def need(self, of: GenerationKey, node: int, members: Membership | None = None) -> list[SuccessorAction]:
        return self.step(MemberNeeded(of, node, "connection reset", members))

    def close(self, which: GenerationKey) -> list[SuccessorAction]:
        return self.step(LocalClose(which))

    def revoke(self, which: GenerationKey, reason: str = "enough") -> list[SuccessorAction]:
        return self.step(RevokeRequested(which, reason))

    def hear(self, sender: int, about: GenerationKey, rank: int, *, closed: bool = False) -> list[SuccessorAction]:
        reason = "it has closed it" if closed else "the data is wrong"
        return self.step(RevokeReceived(sender, about, rank, reason, closed))

    def release(self, which: GenerationKey) -> list[SuccessorAction]:
        return self.step(Released(which))

    def stall(self, **facts: Any) -> list[SuccessorAction]:
        return self.step(NoProgress(**facts))

    def terminate(self, cause: Terminated = EXPELLED) -> list[SuccessorAction]:
        return self.step(Terminate(cause))

    def tick(self, seconds: float = 0.0) -> list[SuccessorAction]:
        self.now += seconds
        return self.step(Tick())


def builds(actions: list[SuccessorAction]) -> list[StartBuild]:
    return [action for action in actions if isinstance(action, StartBuild)]


def only(actions: list[SuccessorAction]) -> StartBuild:
    """The one build among them."""
    (found,) = builds(actions)
    return found


def kinds(actions: list[SuccessorAction]) -> list[str]:
    return [type(action).__name__ for action in actions]
