"""What the users of a simulated node do: make communicators, call, close, revoke and continue after losses.

All members follow the same program, as collectives require: which calls split a communicator, and after which calls it
is closed, is a function of the run and of the generation. After Superseded a node continues on the successor. Like
`resilient`, it gives up the communicators that it made with calls that not all members completed. `AgreeCalls` carries
out `agree()`: it is to AgreementInstances in the simulator what `cluster.agreements` is in a node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from nexar.cluster.decisions.agreement_instances import (
    AgreementAction,
    AgreementInstances,
    AgreementLimits,
    ProposalFailed,
    ValueChosen,
)
from nexar.cluster.decisions.membership_events import ChangeRequested, MembershipMessage, RecoverNow, SendMessage
from nexar.cluster.decisions.successor_events import (
    BuildFailure,
    BuildFailureKind,
    GenerationKey,
    MemberNeeded,
    QuorumLost,
    RecoveryTimedOut,
    Released,
    RevokedBy,
    RevokeRequested,
    Superseded,
)
from nexar.cluster.membership import WORLD, Change, Membership
from nexar.errors import LinkClosed, NexarError, OperationTimeout
from nexar.testing.simulator.generations import CallResult, Generations, PeerLossError, SimulatedGeneration
from nexar.testing.simulator.world import RECOVERY_TIMEOUT, SimulationContext, describe_instance, describe_message
from nexar.types import NodeId, Rank
from nexar.wire.control import Instance, Suspect

if TYPE_CHECKING:
    from nexar.testing.simulator.nodes import SimulatedMember  # which imports this module

_MIN_TICK_SECONDS: Final = 0.001

AgreeResult: TypeAlias = bytes | NexarError
"""The chosen value, or why there is none."""


def is_agree_message(message: MembershipMessage) -> bool:
    """As `NodeRuntime` distinguishes them: instance 0 of the world is the next membership."""
    return not isinstance(message, Suspect) and not (message.instance[0] == WORLD and message.instance[2] == 0)


class AgreeCalls:
    """All instances of one node, and its callers."""

    def __init__(
        self, world: SimulationContext, host: SimulatedMember, limits: AgreementLimits, membership: Membership
    ) -> None:
        self._world = world
        self._host = host
        self._laws = world.agreement_laws
        self._membership = membership
        self._instances = AgreementInstances(host.node, lambda each: Random(hash((host.node, each))), limits)
        self._callers: dict[Instance, Callable[[AgreeResult], None]] = {}
        self._wakes_at: float | None = None  # by the node's clock

    def opened(self, key: GenerationKey, voters: frozenset[NodeId]) -> None:
        self._instances.add_generation(*key, voters)
        self._laws.opened(key, voters)

    def closed(self, key: GenerationKey) -> None:
        """The user closed or released this generation, so all waits here have ended."""
        for instance in [each for each in self._callers if each[:2] == key]:
            del self._callers[instance]
            self._laws.ended(self._host.node, instance, None)
        self._perform(self._instances.end_generation(*key))

    def votes_in(self, instance: Instance) -> bool:
        return self._instances.votes_in(instance)

    # -- calls

    def call(self, instance: Instance, value: bytes, done: Callable[[AgreeResult], None]) -> None:
        """`done` gets the result, at once or later."""
        node = self._host.node
        self._world.timeline.record(f"{node} proposes in {describe_instance(instance)}")
        self._laws.proposed(node, instance, value)
        try:
            actions = self._instances.propose(instance, value, self._host.now())
        except NexarError as error:
            self._laws.ended(node, instance, error)
            done(error)
            return
        self._callers[instance] = done
        self._host.after(RECOVERY_TIMEOUT, lambda: self._time_out(instance, done))
        self._perform(actions)
        self._laws.check_hope(node, self._membership)

    def _time_out(self, instance: Instance, done: Callable[[AgreeResult], None]) -> None:
        if self._callers.get(instance) is done:
            self._laws.timed_out(self._host.node, instance)
            late = OperationTimeout(operation=f"agree #{instance[2]}", waiting_for=(), timeout=RECOVERY_TIMEOUT)
            self._end(instance, late)

    def _end(self, instance: Instance, result: AgreeResult) -> None:
        done = self._callers.pop(instance, None)
        if done is not None:
            what = "gets a value" if isinstance(result, bytes) else f"gets {type(result).__name__}"
            self._world.timeline.record(f"{self._host.node} {what} in {describe_instance(instance)}")
            self._laws.ended(self._host.node, instance, result)
            done(result)

    # -- events

    def receive(self, sender: NodeId, message: MembershipMessage) -> None:
        self._world.timeline.record(f"{self._host.node} ← {sender}: {describe_message(message)}")
        self._perform(self._instances.receive(sender, message, self._host.now()))

    def adopted(self, change: Change, after: Membership) -> None:
        self._membership = after
        self._perform(self._instances.voters_removed(change.left))
        self._laws.check_hope(self._host.node, after)

    def voter_lost(self, node: NodeId, cause: str) -> None:
        self._perform(self._instances.voter_lost(node, cause))

    def voter_reachable(self, node: NodeId) -> None:
        self._instances.voter_reachable(node)

    def end_all(self) -> None:
        """All communicators of the node have ended."""
        self._laws.terminated(self._host.node)
        self._perform(self._instances.end_all(LinkClosed(owner="this node's place in the cluster")))

    # -- actions

    def _perform(self, actions: list[AgreementAction]) -> None:
        for action in actions:
            if not self._host.running:
                return  # a message ended it
            match action:
                case SendMessage(node, message):
                    self._laws.sends(self._host.node, message)
                    self._host.send_message(node, message)
                case ValueChosen(instance, value):
                    self._end(instance, value)
                case ProposalFailed(instance, error):
                    self._end(instance, error)
        self._arm()

    def _arm(self) -> None:
        """At most one wake-up is valid: the earliest."""
        now = self._host.now()
        due = self._instances.due(now)
        if due is None or (self._wakes_at is not None and now < self._wakes_at <= due):
            return
        when = self._wakes_at = max(due, now + _MIN_TICK_SECONDS)
        self._host.after(when - now + self._world.network.lag(self._host.node), lambda: self._wake(when))

    def _wake(self, when: float) -> None:
        if self._wakes_at == when:
            self._wakes_at = None
            self._perform(self._instances.tick(self._host.now()))


# -- calls of agree()

_SHRINK_INTERVAL: Final = 1.0
_SHRINK_SECONDS: Final = 2 * RECOVERY_TIMEOUT  # after which the user gives up a communicator
_SPLIT, _GROUP = range(2)
_USUAL_AGREEING: Final = 6  # members
_AFTER_ERROR: Final = -1  # instead of the number of a call


class Part(NamedTuple):
    """A communicator that the members make."""

    communicator: int
    ranks: tuple[Rank, ...]
    membership: Membership


@dataclass(frozen=True, slots=True)
class ApplicationPlan:
    """What all members do in one run. All members ask the same, so answers are kept."""

    seed: int
    groups: int = 0
    """Small communicators that the members make in the first call, perhaps more than a node builds at a time."""
    splits: float = 0.3
    """Probability that a call on the world also splits it."""
    closes: float = 0.02
    """Probability that a communicator is closed after a call."""
    interval: float = 2.5
    """Seconds between two calls."""
    agrees: float = 0.0
    """Probability that the members agree on a value after a call, and after an error."""
    _draws: dict[tuple[str, GenerationKey, int], float] = field(default_factory=dict, init=False, compare=False)
    _parts: dict[tuple[int, int], tuple[Membership, list[Part]]] = field(
        default_factory=dict, init=False, compare=False
    )

    def parts(self, generation: SimulatedGeneration, number: int) -> list[Part]:
        """Each communicator that this call makes."""
        if generation.key.communicator != WORLD or generation.is_broadcast(number):
            return []
        world = generation.membership
        kept = self._parts.get((id(world), number))  # the membership is kept too, so the identity is not reused
        if kept is None:
            made = [
                Part(communicator, ranks, _members_of(world, ranks))
                for communicator, ranks in self._draw_parts(generation, number)
            ]
            kept = self._parts[id(world), number] = (world, made)
        return kept[1]

    def _draw_parts(self, generation: SimulatedGeneration, number: int) -> Iterator[tuple[int, tuple[Rank, ...]]]:
        """Id and ranks of each part."""
        key, size = generation.key, generation.size
        random = Random(f"{self.seed}/split/{key}/{number}")
        if number == 0 and generation.membership.epoch == 1:
            for occasion in range(self.groups):
                ranks = tuple(sorted(random.sample(range(size), min(size, random.randint(2, 6)))))
                yield part_id(key, _GROUP, occasion, ranks), ranks
        if number <= 3 and random.random() < self.splits:
            colors = random.choice([1, 2, 2, max(1, size // 3)])
            for color in range(min(colors, size)):
                ranks = tuple(rank for rank in range(size) if rank % colors == color)
                if ranks:  # a small world lacks some colors
                    yield part_id(key, _SPLIT, number, ranks), ranks

    def pause(self, key: GenerationKey, number: int) -> float:
        """Seconds after this call."""
        return self.interval * (0.5 + self._draw("pause", key, number))

    def agrees_after(self, generation: SimulatedGeneration, number: int) -> bool:
        """Less often in large communicators: every member proposes, so a call takes the square of their number."""
        chance = self.agrees * min(1.0, _USUAL_AGREEING / generation.size)
        return chance > 0.0 and self._draw("agree", generation.key, number) < chance

    def closes_after(self, key: GenerationKey, number: int) -> bool:
        return key.communicator != WORLD and self.closes > 0.0 and self._draw("close", key, number) < self.closes

    def _draw(self, what: str, key: GenerationKey, number: int) -> float:
        """A number in [0, 1)."""
        draw = self._draws.get((what, key, number))
        if draw is None:
            draw = self._draws[what, key, number] = Random(f"{self.seed}/{what}/{key}/{number}").random()
        return draw


def part_id(key: GenerationKey, kind: int, occasion: int, ranks: tuple[Rank, ...]) -> int:
    """As `nexar.communicator.communicator.subgroup_id`: all its members know these facts."""
    facts = (key.communicator, key.epoch, kind, occasion, *ranks)
    digest = hashlib.sha256(b"".join(fact.to_bytes(8, "little") for fact in facts)).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class _Task:
    """One communicator of this node."""

    def __init__(self, generation: SimulatedGeneration, made_by: tuple[GenerationKey, int] | None) -> None:
        self.generation = generation
        self.made_by = made_by  # the call on the world that made it
        self.shrinks_until: float | None = None
        self.turn = 0  # an older scheduled turn is void
        self.agreed_after_error: GenerationKey | None = None


class Application:
    """The users of one node."""

    def __init__(
        self, world: SimulationContext, member: SimulatedMember, program: ApplicationPlan, random: Random
    ) -> None:
        self._world = world
        self._member = member
        self._program = program
        self._random = random
        self.generations = Generations(world, member, self)
        self._tasks: dict[int, _Task] = {}
        self._made_by: dict[int, tuple[GenerationKey, int]] = {}

    def start(self, membership: Membership) -> None:
        """Makes the world's communicator."""
        self.generations.begin(WORLD, membership)

    def generation_keys(self) -> list[GenerationKey]:
        """The generations in use."""
        return [task.generation.key for task in self._tasks.values()]

    def usable(self, communicator: int) -> GenerationKey | None:
        """The generation in use; None if calls on it raise."""
        task = self._tasks.get(communicator)
        return None if task is None or task.generation.outcome is not None else task.generation.key

    # -- called by Generations

    def opened(self, generation: SimulatedGeneration) -> None:
        communicator = generation.key.communicator
        if self._member.agree_calls is not None:
            voters = frozenset(generation.membership.nodes)
            self._member.agree_calls.opened(generation.key, voters)
        if communicator not in self._tasks:
            task = self._tasks[communicator] = _Task(generation, self._made_by.pop(communicator, None))
            self._schedule(task, self._pause(task.generation))

    def begin_failed(self, communicator: int, membership: Membership, failure: BuildFailure) -> None:
        """A joiner tries again with the next membership, as `begin_world` does."""
        self._made_by.pop(communicator, None)
        is_lost = failure.kind is BuildFailureKind.PEER_LOST
        if is_lost and self._world.policy == "abort":
            self._member.fail()
        elif communicator == WORLD and failure.kind is not BuildFailureKind.REJECTED:
            if is_lost and self._world.policy == "automatic":
                key = GenerationKey(WORLD, membership.epoch)
                self._member.handle(MemberNeeded(key, failure.nodes[0], failure.cause, membership))
            self._member.after(0.2, lambda: self._begin_again(membership))

    def _begin_again(self, membership: Membership) -> None:
        newer = self._world.laws.generation_after(WORLD, membership, self._member.epoch)
        if newer is None:
            self._member.after(0.5, lambda: self._begin_again(membership))
        else:
            self.generations.begin(WORLD, newer, after=membership.epoch)

    def call_ended(self, generation: SimulatedGeneration, number: int, result: CallResult) -> None:
        task = self._tasks.get(generation.key.communicator)
        if task is None or task.generation is not generation:
            return
        if result is None:
            self._completed(task, number)
        elif isinstance(result, RevokedBy) and result.closed:
            self._close(task)
        elif isinstance(result, PeerLossError) and self._world.policy == "abort":
            self._member.fail()
        else:
            if isinstance(result, PeerLossError) and self._world.is_manual:
                task.shrinks_until = self._world.timeline.now + _SHRINK_SECONDS
            self._failed(task)

    def _failed(self, task: _Task) -> None:
        """Once for each generation, the members agree on what to do about an error."""
        key = task.generation.key
        if task.agreed_after_error != key and self._program.agrees_after(task.generation, _AFTER_ERROR):
            task.agreed_after_error = key
            self._agree(task)
        else:
            self._schedule(task, 0.05 * self._random.random())

    def _agree(self, task: _Task) -> None:
        """The next turn comes after the result, whatever it is."""
        calls, generation = self._member.agree_calls, task.generation
        if calls is None:
            return
        task.turn += 1
        turn = task.turn

        def done(_: AgreeResult) -> None:
            if task.turn == turn:
                self._schedule(task, self._pause(task.generation))

        generation.agreements += 1
        instance = (*generation.key, generation.agreements)
        calls.call(instance, f"{self._member.node} in {instance}".encode(), done)

    def _completed(self, task: _Task, number: int) -> None:
        generation = task.generation
        for part in self._program.parts(generation, number):
            if generation.rank in part.ranks:
                self._made_by[part.communicator] = (generation.key, number)
                self.generations.begin(part.communicator, part.membership)
        if self._program.closes_after(generation.key, number):
            self._close(task)
        elif self._program.agrees_after(generation, number):
            self._agree(task)
        else:
            self._schedule(task, self._pause(task.generation))

    # -- turns

    def _pause(self, generation: SimulatedGeneration) -> float:
        """Members compute about equally long between two calls."""
        return self._program.pause(generation.key, generation.completed) + 0.3 * self._random.random() ** 2

    def _schedule(self, task: _Task, seconds: float) -> None:
        task.turn += 1
        turn = task.turn
        self._member.after(seconds, lambda: self._take_turn(task, turn))

    def _take_turn(self, task: _Task, turn: int) -> None:
        if task.turn != turn or self._tasks.get(task.generation.key.communicator) is not task:
            return
        generation = task.generation
        match generation.outcome:
            case None if task.shrinks_until is not None:
                self._shrink(task)
            case None:
                self.generations.call(generation)
            case Superseded() as superseded:
                self._continue(task, superseded)
            case RevokedBy(closed=True):
                self._close(task)
            case RevokedBy() | QuorumLost() | RecoveryTimedOut():
                self._shrink(task)
            case _:
                self._terminated(task)

    def _terminated(self, task: _Task) -> None:
        """The user still tries to make a communicator."""
        key, ranks = task.generation.key, (task.generation.rank,)
        del self._tasks[key.communicator]
        self.generations.begin(part_id(key, _GROUP, 0, ranks), _members_of(task.generation.membership, ranks))

    def _continue(self, task: _Task, superseded: Superseded) -> None:
        old, new = task.generation, self.generations.find(superseded.successor)
        if old.key.communicator == WORLD:
            self._roll_back(old.key, superseded.completed)
        if new is None:
            self._tasks.pop(old.key.communicator, None)  # the laws report it
            return
        task.generation, task.shrinks_until = new, None
        self._member.after(self._random.choice([0.0, 1.0, 20.0]), lambda: self._release(old))
        self._schedule(task, 0.05 * self._random.random())  # it repeats the call

    def _release(self, generation: SimulatedGeneration) -> None:
        self.generations.release(generation)
        self._end_agreements(generation)
        self._member.handle(Released(generation.key))

    def _end_agreements(self, generation: SimulatedGeneration) -> None:
        if self._member.agree_calls is not None:
            self._member.agree_calls.closed(generation.key)

    def _roll_back(self, key: GenerationKey, completed: int | None) -> None:
        """Gives up communicators that not all members made."""
        last = -1 if completed is None else completed
        for task in list(self._tasks.values()):
            if task.made_by is not None and task.made_by[0] == key and task.made_by[1] > last:
                self._close(task)

    # -- requests

    def _shrink(self, task: _Task) -> None:
        """Asks for a successor until it comes, as `shrink()` does."""
        generation, now = task.generation, self._world.timeline.now
        if task.shrinks_until is None:
            task.shrinks_until = now + _SHRINK_SECONDS
        if now >= task.shrinks_until and generation.key.communicator != WORLD:
            self._close(task)
            return
        if self._member.suspects() & generation.membership.nodes:
            self._member.handle(RecoverNow())
        elif not self._member.is_concerned(generation.key):
            renewed = (generation.key.communicator,)
            self._member.handle(ChangeRequested(renewed=renewed, epoch=self._member.epoch))
        self._schedule(task, _SHRINK_INTERVAL)

    def _close(self, task: _Task) -> None:
        if task.generation.key.communicator == WORLD:
            return
        self._tasks.pop(task.generation.key.communicator, None)
        generation = task.generation
        if isinstance(generation.outcome, Superseded):  # nothing refers to the successor, so it is closed too
            newest = self.generations.find(generation.outcome.successor)
            self._release(generation)
            generation = newest or generation
        self._end_agreements(generation)
        self.generations.close(generation)

    def close_one(self, random: Random) -> bool:
        """The user closes a communicator although the others go on."""
        parts = [task for each, task in self._tasks.items() if each != WORLD]
        if parts:
            self._close(random.choice(parts))
        return bool(parts)

    def close_communicator(self, communicator: int) -> bool:
        task = self._tasks.get(communicator)
        if task is not None:
            self._close(task)
        return task is not None and communicator != WORLD

    def revoke_one(self, random: Random) -> None:
        if self._tasks:
            self.revoke(random.choice(list(self._tasks.values())).generation.key)

    def revoke(self, key: GenerationKey) -> None:
        self._member.handle(RevokeRequested(key, "the user revokes it"))

    def shrink_one(self, random: Random) -> None:
        """The user asks for a successor of a communicator in use."""
        if self._tasks:
            self._shrink(random.choice(list(self._tasks.values())))


def _members_of(membership: Membership, ranks: tuple[Rank, ...]) -> Membership:
    return Membership(membership.cluster, membership.epoch, tuple(membership.members[rank] for rank in ranks))
