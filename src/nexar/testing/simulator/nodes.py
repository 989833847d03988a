"""What all inhabitants of a simulated world have: a life, a clock of their own, and a mind that takes steps.

A machine is asked and obeyed here as the product's shells do it: state changes first, words leave after. What
happens to a stopped process waits until it is continued, as in the buffers of its kernel.

A member of the simulated cluster: its machines are those of the product, its shell is written again in small.

What the shell does, and the product's has to do as well: beats to the watchers; telling who is behind what was chosen;
turning findings into Lost and Found; trying suspects again; asking to be let in, as long as it is none.

The seed of the simulated cluster: a witness, whose vote outlives it, on a disk.

What its shell does, and the product's has to do as well: keep the vote and the membership before anything is said, and
bring members that are behind up to date when they beat.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final, Protocol, TypeAlias

from nexar.cluster.decisions.failure_detector import FailureDetector, watched, watchers
from nexar.cluster.decisions.membership_events import (
    MembershipAction,
    MembershipDecided,
    MembershipInput,
    MembershipMessage,
    MessageReceived,
    NoProgress,
    OwnDelayChanged,
    PeerLossFound,
    PeerReachable,
    ProbeFinished,
    RecoverNow,
    SelfExpelled,
    SendMessage,
    StartProbe,
    Tick,
)
from nexar.cluster.decisions.membership_machine import MembershipMachine
from nexar.cluster.decisions.paxos import Vote
from nexar.cluster.decisions.seed_voter import SeedVoter
from nexar.cluster.membership import Change, Membership
from nexar.errors import NexarError
from nexar.testing.simulator.laws import Violation
from nexar.testing.simulator.world import (
    INTERVAL,
    PROBE_TIMEOUT,
    STUCK_TIMEOUT,
    TIMEOUT,
    SimulationContext,
    describe_event,
)
from nexar.types import NodeId
from nexar.wire.control import Beat, Chosen

_SHORTEST: Final = 0.001
"""Seconds between two ticks of one machine: a thread does not wake more often."""


class DecisionMachine(Protocol):
    """A decision machine of `cluster/decisions`."""

    def step(self, event: MembershipInput, now: float) -> list[MembershipAction]:
        """What to do about it."""

    def due(self, now: float) -> float | None:
        """When it wants a Tick."""


class SimulatedNode:
    """A process of the simulated world."""

    def __init__(self, world: SimulationContext, node: NodeId, *, rate: float = 1.0, ahead: float = 0.0) -> None:
        """Its clock runs `rate` times as fast as the world's, and is `ahead` of it."""
        self.node = node
        self.alive = True
        self.paused = False
        self.last_messages: int | None = None
        """So many more words, then it dies: in the middle of what it has to say."""
        self._world = world
        self._rate = rate
        self._ahead = ahead
        self._held: list[Callable[[], None]] = []  # what waits for a stopped process
        self._wakes_at: float | None = None  # in the world's time

    @property
    def running(self) -> bool:
        """It exists, and is not stopped."""
        return self.alive and not self.paused

    @property
    def machine(self) -> DecisionMachine | None:
        """Its machine; None: it has none yet, or no longer."""
        raise NotImplementedError

    def now(self) -> float:
        """By its own clock."""
        return self._world.timeline.now * self._rate + self._ahead

    # -- life

    def die(self, why: str) -> None:
        """Its process ends. Idempotent."""
        if self.alive:
            self.alive = False
            self._held.clear()
            self._world.timeline.record(f"{self.node} dies: {why}")

    def pause(self) -> None:
        """Its process is stopped."""
        if self.running:
            self.paused = True
            self._world.timeline.record(f"{self.node} is stopped")

    def resume(self) -> None:
        """It goes on, and finds everything that has come meanwhile."""
        if not self.alive or not self.paused:
            return
        self.paused = False
        self._world.timeline.record(f"{self.node} is continued")
        held, self._held = self._held, []
        for action in held:
            action()

    def when_running(self, action: Callable[[], None]) -> None:
        """Now; if it is stopped, when it is continued; if it is dead, never."""
        if self.paused:
            self._held.append(action)
        elif self.alive:
            action()

    # -- thinking

    def hear(self, sender: NodeId, message: MembershipMessage) -> None:
        """A word arrives."""
        self.happens(MessageReceived(sender, message))

    def felt(self, sender: NodeId, epoch: int) -> None:
        """A beat arrives."""

    def news_since(self, epoch: int) -> list[Chosen]:
        """What it tells who dials it, and is in an earlier epoch."""
        del epoch
        return []

    def happens(self, event: MembershipInput) -> None:
        """Tell its machine, and do what that wants."""
        if self.paused:
            self._held.append(lambda: self.happens(event))
            return
        machine = self.machine
        if not self.alive or machine is None:
            return
        world = self._world
        world.timeline.record(describe_event(self.node, event))
        if world.timeline.events > world.most_events:
            raise Violation("a cluster comes to rest", f"more than {world.most_events} events")
        world.laws.told(self.node, event)
        actions = self._think(machine, event)
        world.laws.seen(self.node, event, actions)
        self._stepped()
        for action in actions:
            self._do(action)
            if not self.running:
                return  # it died of it
        self._arm()

    def _think(self, machine: DecisionMachine, event: MembershipInput) -> list[MembershipAction]:
        try:
            return machine.step(event, self.now())
        except (NexarError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise Violation("a machine does not fail", f"that of node {self.node}: {error!r}") from error

    def _stepped(self) -> None:
        """Before the words leave."""

    def _do(self, action: MembershipAction) -> None:
        match action:
            case SendMessage(node=node, message=message):
                self._say(node, message)
            case StartProbe(node=node):
                self._probe(node)
            case MembershipDecided(change=change):
                self._world.timeline.record(f"{self.node} adopts epoch {change.epoch}")
                self._adopted(change)
            case SelfExpelled(epoch=epoch, reason=reason):
                self._world.timeline.record(f"{self.node} is expelled by epoch {epoch}: {reason}")
                self._expelled()
            case NoProgress():
                self._world.timeline.record(f"{self.node} stalls: {len(action.alive)} of {action.needed}")
                self._stalled()

    def _say(self, node: NodeId, message: MembershipMessage) -> None:
        if self.last_messages is not None:
            self.last_messages -= 1
            if self.last_messages < 0:
                self.die("in mid-sentence")
                return
        self._world.say(self.node, node, message)

    def _probe(self, node: NodeId) -> None:
        seconds, cause = self._world.probe_takes(self.node, node)
        self._world.timeline.after(seconds, lambda: self.happens(ProbeFinished(node, cause)))

    def _adopted(self, change: Change) -> None:
        """It is in the next membership."""

    def _expelled(self) -> None:
        """It is not."""

    def _stalled(self) -> None:
        """There is no next membership."""

    def _arm(self) -> None:
        """See to it that its machine gets its ticks. One wake is scheduled at a time, the earliest that was asked for;
        what it finds is asked for again.
        """
        due = self.machine.due(self.now()) if self.machine is not None else None
        if due is None:
            return
        timeline = self._world.timeline
        when = max((due - self._ahead) / self._rate, timeline.now + _SHORTEST) + self._world.network.lag(self.node)
        if self._wakes_at is None or when < self._wakes_at or self._wakes_at < timeline.now:
            self._wakes_at = when
            timeline.at(when, lambda: self._wake(when))

    def _wake(self, when: float) -> None:
        if self._wakes_at != when:
            return  # an earlier one has come in between
        self._wakes_at = None
        self.when_running(self._tick)

    def _tick(self) -> None:
        due = self.machine.due(self.now()) if self.machine is not None else None
        if due is not None and due <= self.now() + 1e-9:
            self.happens(Tick())
        else:
            self._arm()


MachineFactory: TypeAlias = Callable[[NodeId, Membership, Random], MembershipMachine]
"""How a node's machine is made."""

_IN_TOUCH: Final = 3
"""Ranks below this beat to the seed, too."""


class SimulatedMember(SimulatedNode):
    """A node that is a member, wants to be one, or was one."""

    def __init__(
        self,
        world: SimulationContext,
        node: NodeId,
        machine_factory: MachineFactory,
        *,
        rate: float = 1.0,
        ahead: float = 0.0,
        asked: bool = False,
    ) -> None:
        """`asked`: its user asks for recovery, soon after something was lost."""
        super().__init__(world, node, rate=rate, ahead=ahead)
        self.membership_machine: MembershipMachine | None = None
        self.is_expelled = False
        self.is_stalled = False
        """Since it entered its epoch."""
        self.broken: set[NodeId] = set()
        """Peers whose connection broke: when they are found again, it is on a new one."""
        self._machine_factory = machine_factory
        self._is_asked = asked
        self._detector = FailureDetector(INTERVAL, TIMEOUT, STUCK_TIMEOUT)
        self._count = 0
        self._watchers: tuple[NodeId, ...] = ()
        self._beats: dict[int, Beat] = {}
        self._delayed = 0.0

    @property
    def machine(self) -> MembershipMachine | None:
        """See Inhabitant."""
        return self.membership_machine

    @property
    def epoch(self) -> int:
        """0: it is no member yet."""
        return self.membership_machine.membership.epoch if self.membership_machine is not None else 0

    # -- membership

    def begin(self, membership: Membership) -> None:
        """It is a member from now on, and its heart beats."""
        random = Random(self._world.random.getrandbits(64))
        self.membership_machine = self._machine_factory(self.node, membership, random)
        self._world.laws.enters(self.node, membership.epoch)
        self._face(membership)
        self._world.timeline.after(self._world.random.random() * INTERVAL, self._pulse)

    def _face(self, membership: Membership) -> None:
        """Know whom to watch, and who watches."""
        rank = membership.rank_of(self.node)
        if rank is None:
            raise ValueError(f"node {self.node} is no member of epoch {membership.epoch}")
        self._watchers = tuple(membership.members[each].node for each in watchers(membership.size, rank))
        whom = [membership.members[each].node for each in watched(membership.size, rank)]
        self._detector.watch(whom, self.now())

    def _adopted(self, change: Change) -> None:
        self.is_stalled = False
        if self.membership_machine is not None and change.epoch == self.epoch:  # of several at once the last
            self._face(self.membership_machine.membership)

    def _expelled(self) -> None:
        self.is_expelled = True

    def _stalled(self) -> None:
        self.is_stalled = True

    # -- beats

    def _pulse(self) -> None:
        """Once in an interval, by its own clock; not while it is stopped."""
        if not self.alive or self.is_expelled:
            return
        if self.paused:
            self._held.append(self._pulse)
            return
        for watcher in (*self._watchers, *self._seed()):
            self._world.beat(self.node, watcher, self.epoch)
        self._measure()
        self._look()
        if (
            self._is_asked
            and self.running
            and self.membership_machine is not None
            and self.membership_machine.suspects()
        ):
            self.happens(RecoverNow())
        if self.alive:
            self._world.timeline.after(INTERVAL / self._rate + self._world.network.lag(self.node), self._pulse)

    def _measure(self) -> None:
        """Its machines are told how late it runs."""
        delay = self._world.own_delay(self.node)
        if delay != self._delayed:
            self._delayed = self._detector.own_delay = delay
            self.happens(OwnDelayChanged(delay))

    def _seed(self) -> list[NodeId]:
        """A few members keep in touch with the seed."""
        membership = self.membership_machine.membership if self.membership_machine is not None else None
        if membership is None or membership.seed is None or (membership.rank_of(self.node) or 0) >= _IN_TOUCH:
            return []
        return [membership.seed.node]

    def felt(self, sender: NodeId, epoch: int) -> None:
        """A beat of somebody for whom this node is a watcher."""
        if self.membership_machine is None:
            return
        self._count += 1
        beat = self._beats.setdefault(epoch, Beat(epoch))
        now = self.now()
        self._detector.packets(sender, self._count, now)
        self._detector.beat(sender, beat, now)
        if epoch < self.epoch:
            self.bring_up(sender, epoch)

    def bring_up(self, node: NodeId, epoch: int) -> None:
        """Tell a node that is behind what was chosen since."""
        for message in self.news_since(epoch):
            self._world.say(self.node, node, message)

    def news_since(self, epoch: int) -> list[Chosen]:
        """What was chosen since, for a node that is behind."""
        changes = self.membership_machine.changes_since(epoch) if self.membership_machine is not None else []
        return [Chosen((0, number, 0), value) for number, value in enumerate(changes, start=epoch)]

    def _look(self) -> None:
        for finding in self._detector.tick(self.now()):
            if finding.is_loss:
                self.happens(PeerLossFound(finding.node, finding.state))
            elif finding.state == "alive":
                self.find(finding.node)
        for suspect in list(self.membership_machine.suspects()) if self.membership_machine is not None else ():
            if self.running and self.reaches(suspect):
                self._dial(suspect)

    def _dial(self, suspect: NodeId) -> None:
        """A suspect answers: with what was chosen, if it is ahead. Nothing of an answer gets lost: the connection is
        there, or it is not.
        """
        epoch, other = self.epoch, self._world.nodes[suspect]
        for message in other.news_since(epoch):
            self.hear(suspect, message)
        if self.epoch == epoch and not self.is_expelled:
            self.find(suspect)

    def lines(self) -> tuple[NodeId, ...]:
        """Whom the kernel tells when this process ends."""
        return self._watchers

    def reaches(self, node: NodeId) -> bool:
        """Whether a dial would be answered."""
        return self._world.reaches(self.node, node)

    def find(self, node: NodeId) -> None:
        """A peer can be reached again."""
        severed = node in self.broken
        self.broken.discard(node)
        self.happens(PeerReachable(node, severed))


SeedVoterFactory: TypeAlias = Callable[[Membership, Vote | None, bool], SeedVoter]
"""How the seed's machine is made: with its vote, if it has kept one, and with the right to vote, if it may."""


def seed_voter(membership: Membership, vote: Vote | None, may_vote: bool) -> SeedVoter:
    """The machine of the product."""
    return SeedVoter(membership, vote=vote, may_vote=may_vote, probe_timeout=PROBE_TIMEOUT)


class SimulatedSeed(SimulatedNode):
    """The witness, and its disk."""

    def __init__(
        self, world: SimulationContext, node: NodeId, membership: Membership, voter_factory: SeedVoterFactory
    ) -> None:
        super().__init__(world, node)
        self.may_vote = True
        self._first = membership
        self._voter_factory = voter_factory
        self._seed_voter = voter_factory(membership, None, True)
        self._admitted: frozenset[NodeId] = frozenset()
        self._disk: tuple[Membership, Vote | None] = (membership, None)
        world.laws.enters(node, membership.epoch)

    @property
    def machine(self) -> SeedVoter:
        """See Inhabitant."""
        return self._seed_voter

    def admit(self, node: NodeId) -> None:
        """Somebody waits to come in."""
        self._admitted |= {node}
        self._seed_voter.admitted = self._admitted

    def restart(self, *, with_state: bool) -> None:
        """It comes back; without its state it knows the cluster as it was formed, and may not vote."""
        if self.alive:
            return
        self.alive = True
        self.may_vote = self.may_vote and with_state
        membership, vote = self._disk if with_state else (self._first, None)
        self._world.timeline.record(f"the seed is started again{'' if with_state else ' without its state'}")
        self._world.laws.enters(self.node, membership.epoch)
        self._seed_voter = self._voter_factory(membership, vote, self.may_vote)
        self._seed_voter.admitted = self._admitted

    def felt(self, sender: NodeId, epoch: int) -> None:
        """A beat of a member."""
        for number, value in enumerate(self._seed_voter.changes_since(epoch), start=epoch):
            self._world.say(self.node, sender, Chosen((0, number, 0), value))

    def _stepped(self) -> None:
        """On the disk, before it is said."""
        self._disk = (self._seed_voter.membership, self._seed_voter.vote)
