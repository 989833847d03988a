"""The decisions of one node: membership and successors in one machine. Pure.

Invariant: a decided membership becomes, in this order, Interrupt, AdoptMembership, DropPeer, ReportDeparture,
AbortBuild, SendNotice, StartBuild. So calls end because of the change and not because of a closed link, and a build
finds the links of its membership.
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
    NoProgress,
    PeerReachable,
    SelfExpelled,
    SendMessage,
    StartProbe,
    Tick,
)
from nexar.cluster.decisions.membership_machine import MembershipMachine
from nexar.cluster.decisions.successor_events import (
    RequestRenewal,
    SuccessorAction,
    SuccessorInput,
    Terminate,
    Terminated,
    TerminationKind,
)
from nexar.cluster.decisions.successor_machine import SuccessorMachine
from nexar.cluster.membership import Change, Membership
from nexar.types import NodeId

if TYPE_CHECKING:
    from random import Random

NodeInput: TypeAlias = MembershipInput | SuccessorInput
NodeAction: TypeAlias = SendMessage | StartProbe | SelfExpelled | NoProgress | SuccessorAction


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
    ) -> None:
        """As MembershipMachine."""
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
        self.successor_machine = SuccessorMachine(me, membership, recovery_timeout=recovery_timeout, apply=apply)

    def due(self, now: float) -> float | None:
        """The earlier of both machines."""
        moments = (self.membership_machine.due(now), self.successor_machine.due(now))
        return min((moment for moment in moments if moment is not None), default=None)

    def step(self, event: NodeInput, now: float) -> list[NodeAction]:
        """Returns the actions, in order. No other method changes the state."""
        actions = self._follow(self._handle(event, now), now)
        if isinstance(event, PeerReachable):
            actions += self._follow(self._renew_stalled(now), now)
        return actions

    def _handle(self, event: NodeInput, now: float) -> Sequence[MembershipAction | SuccessorAction]:
        if isinstance(event, Tick):
            return [*self.membership_machine.step(event, now), *self.successor_machine.step(event, now)]
        if isinstance(event, MembershipInput):
            return self.membership_machine.step(event, now)
        return self.successor_machine.step(event, now)

    def _follow(self, first: Sequence[MembershipAction | SuccessorAction], now: float) -> list[NodeAction]:
        """Feed each machine what the other decided, until nothing is left but actions for the owner."""
        actions: list[NodeAction] = []
        waiting = deque(first)
        while waiting:
            action = waiting.popleft()
            if isinstance(action, RequestRenewal):  # last: later changes of the same step come first
                waiting.extend(self._request(action.communicators, action.epoch, now))
                continue
            if not isinstance(action, MembershipDecided):
                actions.append(action)
            waiting.extendleft(reversed(self._consequences(action, now)))
        return actions

    def _consequences(self, action: MembershipAction | SuccessorAction, now: float) -> list[SuccessorAction]:
        match action:
            case MembershipDecided() | NoProgress():
                return self.successor_machine.step(action, now)
            case SelfExpelled(epoch, reason):
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
