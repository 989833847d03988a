"""The calls of `agree()` at one simulated node: the shell of AgreementInstances in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final, Protocol, TypeAlias

from nexar.cluster.decisions.agreement_instances import (
    AgreementAction,
    AgreementInstances,
    AgreementLimits,
    ProposalFailed,
    ValueChosen,
)
from nexar.cluster.decisions.membership_events import MembershipMessage, SendMessage
from nexar.cluster.decisions.successor_events import GenerationKey
from nexar.cluster.membership import WORLD, Change, Membership
from nexar.errors import LinkClosed, NexarError, OperationTimeout
from nexar.testing.simulator.world import RECOVERY_TIMEOUT, SimulationContext, describe_instance, describe_message
from nexar.types import NodeId
from nexar.wire.control import Instance, Suspect

_MIN_TICK_SECONDS: Final = 0.001

AgreeResult: TypeAlias = bytes | NexarError
"""The chosen value, or why there is none."""


def is_agree_message(message: MembershipMessage) -> bool:
    """As `NodeRuntime` distinguishes them: instance 0 of the world is the next membership."""
    return not isinstance(message, Suspect) and not (message.instance[0] == WORLD and message.instance[2] == 0)


class AgreeHost(Protocol):
    """The node that calls."""

    node: NodeId

    @property
    def running(self) -> bool: ...

    def now(self) -> float: ...

    def after(self, seconds: float, action: Callable[[], None]) -> None: ...

    def send_message(self, node: NodeId, message: MembershipMessage) -> None: ...


class AgreeCalls:
    """All instances of one node, and its callers."""

    def __init__(
        self, world: SimulationContext, host: AgreeHost, limits: AgreementLimits, membership: Membership
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
        """The user closed or released this generation: nobody waits here any more."""
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
        """The node has no communicators any more."""
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
