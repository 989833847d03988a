"""What a communicator offers for when members come and go: who is how, what was noticed, and how to go on."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from nexar.communicator.events import FailureEvent, MembershipEvent, Subscription
from nexar.communicator.generation import Generation
from nexar.communicator.resilient import Team
from nexar.communicator.runtime import NodeRuntime
from nexar.communicator.serialization import ObjectError, decode_object, encode_object
from nexar.communicator.status import Health, health
from nexar.errors import NexarError, NoQuorum, OperationTimeout, PeerLost, PeerMisbehaved, UsageError
from nexar.group import checked_timeout, deadline_after
from nexar.types import AwaitedPeer, NodeId
from nexar.wire.control import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from nexar.communicator.communicator import Communicator

_LARGEST_VALUE: Final = MAX_MESSAGE_BYTES - (64 << 10)


class RecoveryMethods(ABC):
    """What is known of the members of a communicator, and how to go on when some are lost."""

    _generation: Generation
    _runtime: NodeRuntime
    _agreements: itertools.count[int]

    @abstractmethod
    def _seconds(self, timeout: Any) -> float:
        """See Communicator."""

    @abstractmethod
    def _check_open(self) -> None:
        """See Communicator."""

    # -- what is known -----------------------------------------------------------------------------------

    def health(self) -> dict[int, Health]:
        """How each rank is, so far as this one knows: alive, stuck, silent, lost or unwatched, and this one: self; what
        it does, and when it was heard."""
        runtime = self._runtime
        heartbeat = runtime.heartbeat
        return health(
            self._generation.membership,
            runtime.node.id,
            runtime.doing(),
            known=_not_watched if heartbeat is None else heartbeat.known,
            links=runtime.mesh.links(),
            suspects={**runtime.successors.gone_from(self._generation), **runtime.membership_service.suspects()},
        )

    def failure_events(self, callback: Callable[[FailureEvent], object] | None = None) -> Subscription[FailureEvent]:
        """What is noticed of members from now on: lost, stuck, left, back. An async iterator; or `callback` is called,
        by a thread of ours. It goes on with the successors; close it, or leave its `with` block.
        """
        return self._generation.failures.subscribe(callback)

    def membership_events(
        self, callback: Callable[[MembershipEvent], object] | None = None
    ) -> Subscription[MembershipEvent]:
        """Each step to a successor from now on: who left and why, who joined, old and new size and rank. As
        `failure_events`.
        """
        return self._generation.memberships.subscribe(callback)

    # -- going on ------------------------------------------------------------------------------------------

    def resilient(self) -> Team[Communicator]:
        """This communicator, with collectives that are tried again on the survivors: see Team. All ranks make it."""
        self._seconds(None)
        team: Team[Communicator] = Team(self)  # type: ignore[arg-type]
        return team

    def shrink(self, *, timeout: float | None = None) -> Communicator:
        """The next communicator: without the members that are lost, in the order of the ranks; the survivors call it.

        For the manual policy, or after `revoke`. NoQuorum, RecoveryTimeout: there is none (yet). This communicator is
        over then: every later call on it says so.
        """
        seconds = self._allowed(timeout)
        own_delay = self._runtime.node.delay_meter.seconds if timeout is None else 0.0  # as the agreement has
        deadline = deadline_after(seconds + own_delay)
        made: Communicator = self._runtime.successor_requests.succeed(self._generation, deadline, seconds)
        return made

    def revoke(self, reason: str = "") -> None:
        """Declare this communicator over, on all ranks: every pending and later call on it raises Revoked. Go on with
        `shrink()`.
        """
        self._allowed(None)
        self._runtime.revocations.revoke(self._generation, reason or "no reason was given")

    def agree(self, value: Any, *, timeout: float | None = None) -> Any:
        """One of the values that ranks bring, the same on all of them; also if some die meanwhile, as long as a
        majority of this communicator's members lives and has not left. A rank that calls it late gets the same answer.
        One that is, or gets, expelled raises Expelled at once.

        `value` is anything that `send_object` can send, up to almost 1 MiB. MembershipChanged (`manual`: PeerLost): so
        many members died or left that no majority of this communicator is left, and the others went on without them;
        raised as soon as that is chosen (`manual`: as soon as this rank has lost them; `shrink()` goes on). NoQuorum:
        no majority can be reached, and nobody goes on.
        PeerMisbehaved: a member brought what is no value, and that was chosen.
        """
        seconds = self._allowed(timeout)
        mine = msgspec.msgpack.encode([bytes(part) for part in encode_object(value)])
        if len(mine) > _LARGEST_VALUE:
            raise UsageError(f"agree(value): {len(mine)} bytes; a value may have up to {_LARGEST_VALUE}")
        group = self._generation.group
        instance = group.communicator, group.matching.generation, next(self._agreements)
        try:
            agreed = self._runtime.agreements.propose(instance, mine)
            group.progress.wait((agreed,), deadline_after(seconds))
        except OperationTimeout as late:
            raise self._no_majority(instance, seconds) from late
        except NexarError as error:
            successors = self._runtime.successors
            if isinstance(error, PeerLost) and self._nobody_goes_on():
                raise self._no_majority(instance, seconds) from None
            raise successors.ended(group) or successors.judge(self._generation, error) from None
        return _read(agreed.value(), agreed.name)

    def _allowed(self, timeout: Any) -> float:
        """Seconds for what is possible on a communicator that is over, too. UsageError for what is no timeout, on a
        closed communicator or node, and in a forked child.
        """
        self._check_open()
        if timeout is None:
            return self._runtime.node.config.recovery_timeout
        return checked_timeout(timeout)

    def _nobody_goes_on(self) -> bool:
        """Whether `shrink()` would be in vain: fewer than half of the world's members are left. With half of them, the
        seed's vote decides.
        """
        if self._runtime.node.config.recovery_policy != "manual":
            return False
        world, suspects = self._runtime.membership_service.membership, self._runtime.membership_service.suspects()
        return 2 * sum(member.node not in suspects for member in world.members) < world.size

    def _no_majority(self, instance: tuple[int, int, int], seconds: float) -> NoQuorum | OperationTimeout:
        members = self._generation.membership
        suspects = self._runtime.membership_service.suspects()
        gone = [node for node in self._generation.nodes if node in suspects or self._runtime.is_gone(node)]
        needed = members.size // 2 + 1
        if members.size - len(gone) < needed:
            alive = [rank for rank, member in enumerate(members.members) if member.node not in gone]
            return NoQuorum(alive=alive, needed=needed)
        missing = [
            AwaitedPeer(rank=members.rank_of(node), node=node, missing="its vote")
            for node in self._runtime.agreements.missing(instance)
        ]
        return OperationTimeout(operation=f"agree #{instance[2]}", waiting_for=missing, timeout=seconds)


def _read(chosen: bytes, operation: str) -> Any:
    """Who brought it is not known: a value that was chosen has no name on it."""
    try:
        parts = msgspec.msgpack.decode(chosen, type=list[bytes])
        return decode_object([memoryview(part) for part in parts])
    except (msgspec.MsgspecError, ObjectError, UsageError) as error:
        raise PeerMisbehaved(what=f"what was chosen in {operation} is no value: {error}") from error


def _not_watched(_: NodeId) -> None:
    return None
