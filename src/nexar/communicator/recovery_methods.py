"""The communicator's methods for health, events and recovery."""

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
    """Health of the members, and recovery after a loss."""

    _generation: Generation
    _runtime: NodeRuntime
    _agreements: itertools.count[int]

    @abstractmethod
    def _seconds(self, timeout: Any) -> float: ...

    @abstractmethod
    def _check_open(self) -> None: ...

    # -- health and events -------------------------------------------------------------------------------

    def health(self) -> dict[int, Health]:
        """Return each rank's health as known here: self, alive, stuck, silent, lost or unwatched; its current call;
        when it was last heard.
        """
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
        """Subscribe to observations about members: lost, stuck, left, back. Returns an async iterator; a thread of
        nexar calls `callback` instead, if given. Successors continue the subscription. Close it, or use `with`.
        """
        return self._generation.failures.subscribe(callback)

    def membership_events(
        self, callback: Callable[[MembershipEvent], object] | None = None
    ) -> Subscription[MembershipEvent]:
        """Subscribe to membership changes: ranks that left and why, ranks that joined, old and new size and rank. Use
        it like `failure_events`.
        """
        return self._generation.memberships.subscribe(callback)

    # -- recovery ------------------------------------------------------------------------------------------

    def resilient(self) -> Team[Communicator]:
        """Return a Team, which repeats collectives on the survivors of a loss. All ranks must call it."""
        self._seconds(None)
        team: Team[Communicator] = Team(self)  # type: ignore[arg-type]
        return team

    def shrink(self, *, timeout: float | None = None) -> Communicator:
        """Return the next communicator, without the lost members, ranks in the same order. All survivors must call it,
        under the manual policy or after `revoke`; this communicator then ends.

        Raises NoQuorum or RecoveryTimeout if the survivors cannot make it, or not in time. `timeout` defaults to the
        setting `recovery_timeout`.
        """
        seconds = self._recovery_seconds(timeout)
        own_delay = self._runtime.node.delay_meter.seconds if timeout is None else 0.0  # the agreement's own extension
        deadline = deadline_after(seconds + own_delay)
        return self._runtime.successor_requests.request_successor(self._generation, deadline, seconds)

    def revoke(self, reason: str = "") -> None:
        """End this communicator on all ranks: pending and later calls raise Revoked. Continue with `shrink()`."""
        self._recovery_seconds(None)
        self._runtime.revocations.revoke(self._generation, reason or "no reason was given")

    def agree(self, value: Any, *, timeout: float | None = None) -> Any:
        """Return one of the ranks' values, the same on all ranks, including late callers. Succeeds even if ranks die,
        as long as a majority of the members lives and has not left.

        `value`: any value that `send_object` can send, up to almost 1 MiB. `timeout` defaults to the setting
        `recovery_timeout`. Raises:

        - MembershipChanged: no majority of this communicator is left, and the others chose to continue without the lost
          members; raised at once. Manual policy: PeerLost, as soon as this rank has lost them; call `shrink()`.
        - NoQuorum: no majority can be reached, and no rank continues.
        - Expelled: this rank is expelled; raised at once.
        - PeerMisbehaved: the agreed value is invalid.
        """
        seconds = self._recovery_seconds(timeout)
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
            if isinstance(error, PeerLost) and self._is_below_half():
                raise self._no_majority(instance, seconds) from None
            raise successors.ended(group) or successors.resolve_error(self._generation, error) from None
        return _read(agreed.value(), agreed.name)

    def _recovery_seconds(self, timeout: Any) -> float:
        """Works on an ended communicator. UsageError: invalid `timeout`, closed communicator or node, forked child."""
        self._check_open()
        if timeout is None:
            return self._runtime.node.config.recovery_timeout
        return checked_timeout(timeout)

    def _is_below_half(self) -> bool:
        """True: `shrink()` would fail. At exactly half, the seed's vote decides."""
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
    """The error names no rank: an agreed value has no known author."""
    try:
        parts = msgspec.msgpack.decode(chosen, type=list[bytes])
        return decode_object([memoryview(part) for part in parts])
    except (msgspec.MsgspecError, ObjectError, UsageError) as error:
        raise PeerMisbehaved(what=f"the value chosen in {operation} is invalid: {error}") from error


def _not_watched(_: NodeId) -> None:
    return None
