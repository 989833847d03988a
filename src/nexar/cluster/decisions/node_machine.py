"""The decisions of one node: membership and successors in one machine. Pure.

Invariant: a decided membership becomes, in this order, messages to the removed nodes, Interrupt, AdoptMembership,
DropPeer, ReportDeparture, AbortBuild, StartBuild, SendNotice. So a removed node that is only slow learns it while links
exist, calls end because of the change and not because of a closed link, a build finds the links of its membership, and
no build waits for the closing notices. On Tick the membership machine comes first. The consequences of an action follow
it at once, except a renewal, which is requested after all other actions of the event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from nexar.cluster.decisions.membership_events import (
    ChangeRequested,
    MembershipAction,
    MembershipDecided,
    MembershipInput,
    MessageReceived,
    NoProgress,
    PeerReachable,
    SelfExpelled,
    SendMessage,
    StartProbe,
    Tick,
)
from nexar.cluster.decisions.membership_machine import MembershipMachine
from nexar.cluster.decisions.successor_events import (
    AdoptMembership,
    GenerationAction,
    Investigate,
    RequestRenewal,
    SendNotice,
    SuccessorAction,
    SuccessorInput,
    Terminate,
    Terminated,
    TerminationKind,
)
from nexar.cluster.decisions.successor_machine import SuccessorMachine
from nexar.cluster.decisions.successor_state import NextGeneration
from nexar.cluster.membership import Change, Membership, next_generation
from nexar.types import NodeId
from nexar.wire.control import Chosen

if TYPE_CHECKING:
    from random import Random

# SelfExpelled: a member or the seed reports it
NodeInput: TypeAlias = MembershipInput | SuccessorInput | SelfExpelled
NodeAction: TypeAlias = (
    SendMessage | StartProbe | SelfExpelled | NoProgress | GenerationAction | AdoptMembership | SendNotice | Investigate
)


class NodeMachine:
    """`step` is the only input; the owner steps Tick when `due`."""

    def __init__(
        self,
        me: NodeId,
        membership: Membership,
        *,
        recovery_timeout: float,
        probe_timeout: float = 1.0,
        longest_probe: float | None = None,
        active: bool = True,
        random: Random,
        apply: Callable[[Change, Membership], Membership] = Change.apply,
        next_generation: NextGeneration = next_generation,
    ) -> None:
        """As MembershipMachine and SuccessorMachine."""
        self.has_left = False  # this node was removed by agreement
        # Both only for queries: all events go through `step`.
        self.membership_machine = MembershipMachine(
            me,
            membership,
            recovery_timeout=recovery_timeout,
            probe_timeout=probe_timeout,
            longest_probe=longest_probe,
            active=active,
            random=random,
            apply=apply,
        )
        self.successor_machine = SuccessorMachine(
            me, membership, recovery_timeout=recovery_timeout, apply=apply, next_generation=next_generation
        )

    def due(self, now: float) -> float | None:
        """The earlier of both machines."""
        change, successor = self.membership_machine.due(now), self.successor_machine.due(now)
        if change is None or successor is None:
            return successor if change is None else change
        return min(change, successor)

    def step(self, event: NodeInput, now: float) -> list[NodeAction]:
        """Returns the actions, in order. No other method changes the state."""
        actions = self._follow(self._handle(event, now), now)
        if isinstance(event, PeerReachable):
            actions += self._follow(self._renew_stalled(now), now)
        return actions

    def _handle(self, event: NodeInput, now: float) -> Sequence[MembershipAction | SuccessorAction]:
        if isinstance(event, MessageReceived):  # most events
            return self.membership_machine.step(event, now)
        if isinstance(event, Tick):
            return [*self.membership_machine.step(event, now), *self.successor_machine.step(event, now)]
        if isinstance(event, MembershipInput):
            return self.membership_machine.step(event, now)
        if isinstance(event, SelfExpelled):
            return [event]
        return self.successor_machine.step(event, now)

    def _follow(self, first: Sequence[MembershipAction | SuccessorAction], now: float) -> list[NodeAction]:
        """Feed each machine what the other decided, until nothing is left but actions for the owner."""
        actions: list[NodeAction] = []
        if not first:
            return actions
        waiting = deque[MembershipAction | SuccessorAction](first)
        while waiting:
            action = waiting.popleft()
            if isinstance(action, SendMessage):  # most actions
                actions.append(action)
                continue
            if isinstance(action, RequestRenewal):  # last: later changes of the same step come first
                waiting.extend(self._request(action.communicators, action.epoch, now))
                continue
            if not isinstance(action, MembershipDecided):
                actions.append(action)
            waiting.extendleft(reversed(self._consequences(action, now)))
        return actions

    def _consequences(
        self, action: MembershipAction | SuccessorAction, now: float
    ) -> Sequence[SendMessage | SuccessorAction]:
        match action:
            case MembershipDecided(change):
                return [*_messages_to_removed(change), *self.successor_machine.step(action, now)]
            case NoProgress():
                return self.successor_machine.step(action, now)
            case SelfExpelled(epoch, reason, willing):
                # A report of its removal does not say why, and a change may call a leaving member lost.
                self.has_left = self.has_left or willing or self.membership_machine.is_leaving
                cause = Terminated(TerminationKind.EXPELLED, epoch=epoch, reason=reason)
                return self.successor_machine.step(Terminate(cause), now)
        return []

    def _renew_stalled(self, now: float) -> list[MembershipAction]:
        """Renew stalled communicators whose members are all back: messages sent meanwhile may be lost."""
        suspects = self.membership_machine.suspects().keys()
        again = tuple(key.communicator for key, nodes in self.successor_machine.stalled() if not suspects & nodes)
        return self._request(again, 0, now) if again else []

    def _request(self, communicators: tuple[int, ...], epoch: int, now: float) -> list[MembershipAction]:
        return self.membership_machine.step(ChangeRequested(renewed=communicators, epoch=epoch), now)


def _messages_to_removed(change: Change) -> list[SendMessage]:
    message = Chosen((0, change.epoch - 1, 0), change.encode())
    return [SendMessage(departure.node, message) for departure in change.left]
