"""Members that come and go by agreement: at a checkpoint, which all ranks make."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from msgspec.structs import replace

from nexar.cluster.decisions.membership_events import ChangeRequested
from nexar.cluster.decisions.resize import Resize, ResizeRequest, decode_resize_request, encode_resize_request, resize
from nexar.cluster.membership import WORLD
from nexar.collectives.fingerprint import OperationCode, operation_name
from nexar.collectives.requests import PendingCollective
from nexar.communicator.generation import Generation
from nexar.communicator.object_calls import all_gather_object, broadcast_object
from nexar.communicator.runtime import NodeRuntime
from nexar.communicator.state_transfer import give
from nexar.errors import (
    Cancelled,
    CollectiveTimeout,
    Expelled,
    MembershipChanged,
    OperationTimeout,
    PeerMisbehaved,
    RecoveryTimeout,
    UsageError,
    sendable,
    told,
)
from nexar.group import deadline_after
from nexar.types import NodeId, Rank, whole
from nexar.wire.text import foreign_line

if TYPE_CHECKING:
    from nexar.communicator.communicator import Communicator

_GRACE: Final = 5.0
"""Seconds that a rank which waits for joiners is given by those that wait for it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What changed at a checkpoint."""

    communicator: Communicator | None
    """Go on with this one; None: this rank has left."""
    joined: tuple[Rank, ...]
    """New ranks."""
    left: Mapping[Rank, str]
    """Old rank to why it is gone."""


class ElasticMethods(ABC):
    """Members that come and go by agreement: of the communicator that `nexar.init()` gave, and its successors."""

    _generation: Generation
    _runtime: NodeRuntime
    _giver: int
    """The thread that is in `state()`, by its number; 0: none. Written by that thread: it must not make calls that wait
    for the other ranks, which wait for it."""

    @abstractmethod
    def _seconds(self, timeout: Any) -> float:
        """See Communicator."""

    @abstractmethod
    def _call(self, work: PendingCollective, timeout: float) -> Any:
        """See Calling."""

    @property
    def state(self) -> Any:
        """What the members handed over when this node joined them; None for who was there from the beginning."""
        return self._runtime.state

    def checkpoint(self, state: Callable[[], Any] | None = None, *, timeout: float | None = None) -> Checkpoint | None:
        """All ranks call it: who waits comes in, and who leaves goes. None if nothing changes; then it is a barrier.

        `state()` is called, on one rank, only if somebody waits; each joiner has what it returns in `comm.state` before
        it is a member. It is anything that `send_object` can send. If a rank dies meanwhile, this raises
        MembershipChanged; make another checkpoint on the successor. If one has closed before, this returns with the
        successor and who left, on all that are left, and lets nobody in yet. With fewer ranks than
        `elastic_min_world_size` it waits until enough have come.
        """
        config = self._runtime.node.config
        wanted = max(0, config.elastic_min_world_size - self._generation.group.size)
        return self._resize(OperationCode.CHECKPOINT, wanted, state, timeout)

    def grow(
        self, n: int, state: Callable[[], Any] | None = None, *, timeout: float | None = None
    ) -> Checkpoint | None:
        """As `checkpoint`, when n joiners wait; OperationTimeout if they do not come in time."""
        number = whole(n)
        if number is None or number < 1:
            raise UsageError(f"grow({n!r}): say how many are to join, 1 or more")
        return self._resize(OperationCode.GROW, number, state, timeout)

    def leave(self) -> None:
        """At the next checkpoint this rank goes; that returns with `communicator` None, and everything here is over."""
        self._checked(None)
        self._runtime.checkpoint_requests.leave()

    def remove(self, rank: Rank, reason: str = "") -> None:
        """Ask another rank, or this one, to go at the next checkpoint."""
        self._checked(None)
        member = self._generation.membership.member(self._generation.group.check(rank))
        self._runtime.checkpoint_requests.remove(member.node, sendable(reason))

    def _checked(self, timeout: float | None) -> float:
        if self._generation.communicator != WORLD:
            raise UsageError("members join and leave a cluster: call this on the communicator that nexar.init() gave")
        given = self._runtime.node.config.elastic_checkpoint_timeout if timeout is None else timeout
        return self._seconds(given)

    def _resize(
        self, code: OperationCode, wanted: int, state: Callable[[], Any] | None, timeout: float | None
    ) -> Checkpoint | None:
        """The others may be quicker: then the change that all of them wanted comes while this rank still learns of it,
        or the one that they needed because a rank had closed, before this one has begun. Only what somebody's death has
        changed is not what was asked for here.
        """
        seconds = 0.0
        try:
            seconds = self._checked(timeout)
            plan = self._plan(code, wanted, state, seconds)
            if plan.joined or plan.left:
                self._carry_out_plan(plan, seconds)
        except CollectiveTimeout as late:  # by the time that was allowed, not by what it comes to inside
            raise CollectiveTimeout(
                operation=late.operation, sequence=late.sequence, waiting_for=late.waiting_for, timeout=seconds
            ) from None
        except MembershipChanged:
            if not self._generation.agreed:
                raise
        except Expelled as gone:
            if not (seconds and self._runtime.has_left):
                raise
            return Checkpoint(None, (), {self._generation.group.rank: gone.reason})
        else:
            return None
        successor, known = self._generation.successor, self._generation.nodes
        members = successor.membership.members
        joined = tuple(rank for rank, member in enumerate(members) if member.node not in known)
        return Checkpoint(successor, joined, self._generation.gone)

    def _plan(self, code: OperationCode, wanted: int, state: Callable[[], Any] | None, seconds: float) -> Resize:
        """What is to happen, the same on all ranks; who is to join has the state."""
        deadline = deadline_after(seconds)
        plan = self._agree_on_plan(code, wanted, seconds)
        self._runtime.expect(plan.joined)
        return self._hand_over(code, plan, state, max(0.001, deadline - time.monotonic())) if plan.joined else plan

    def _agree_on_plan(self, code: OperationCode, wanted: int, seconds: float) -> Resize:
        """Everybody brings what it knows; rank 0 waits for joiners, if that is wanted."""
        runtime, group = self._runtime, self._generation.group
        late = wanted and group.rank == 0 and not self._joiners_come(wanted, seconds)
        config = runtime.node.config
        mine = replace(
            runtime.checkpoint_requests.mine(), least=config.elastic_min_world_size, most=config.elastic_max_world_size
        )
        if late:  # the others wait for this rank, and are told
            mine = replace(mine, complaint=f"joiners: {wanted} are needed, {len(mine.waiting)} wait")
        self._seconds(seconds)  # joiners were waited for: it may be over since
        work = all_gather_object(self._generation.context, encode_resize_request(mine), pickle=False, code=code)
        told = self._call(work, seconds + _GRACE if wanted else seconds)
        checkpoint_requests = [_read(rank, each) for rank, each in enumerate(told)]
        complaint = next((wish.complaint for wish in checkpoint_requests if wish.complaint), "")
        if complaint:
            raise OperationTimeout(operation=operation_name(code), waiting_for=foreign_line(complaint), timeout=seconds)
        return resize(
            self._generation.membership,
            checkpoint_requests,
            least=checkpoint_requests[0].least,
            most=checkpoint_requests[0].most,
        )

    def _joiners_come(self, wanted: int, seconds: float) -> bool:
        """Wait for so many. False: not in time, or this communicator is over; what is called next says why."""
        checkpoint_requests, mine, node = (
            self._runtime.checkpoint_requests,
            self._generation.cancel_token,
            self._runtime.node.cancel_token,
        )
        with mine.waking(checkpoint_requests.look), node.waking(checkpoint_requests.look):
            return checkpoint_requests.wait(wanted, seconds, lambda: mine.made or node.made)

    def _hand_over(self, code: OperationCode, plan: Resize, state: Callable[[], Any] | None, seconds: float) -> Resize:
        """The lowest rank that stays gives the state to the joiners; who has not got it does not come in."""
        leaving = {departure.node for departure in plan.left}
        members = self._generation.membership.members
        giver = next(rank for rank, member in enumerate(members) if member.node not in leaving)
        answer: tuple[Sequence[NodeId], str] = (), ""
        fault: BaseException | None = None
        if self._generation.group.rank == giver:
            try:
                answer = self._give(plan, state, seconds), ""
            except BaseException as error:  # noqa: BLE001 - whatever ends it: raised below, when the others know
                fault, answer = error, ((), f"{type(error).__name__}: {told(error)}".removesuffix(": "))
        self._seconds(seconds)  # giving takes a while: it may be over since
        work = broadcast_object(self._generation.context, answer, giver, pickle=False, code=code)
        fit, reason = self._call(work, seconds + _GRACE)
        if fault is not None:
            raise fault
        if reason:
            raise Cancelled(operation=operation_name(code), reason=f"state() raised {foreign_line(reason)}", rank=giver)
        return Resize(tuple(joiner for joiner in plan.joined if joiner.node in fit), plan.left)

    def _give(self, plan: Resize, state: Callable[[], Any] | None, seconds: float) -> Sequence[NodeId]:
        """To whom the state could be given. Raises what `state` raises."""
        self._giver = threading.get_ident()
        try:
            value = None if state is None else state()
        finally:
            self._giver = 0
        runtime = self._runtime
        return give(runtime.node, runtime.mesh, value, plan.joined, seconds, cancel_token=self._generation.cancel_token)

    def _check_giver(self) -> None:
        """Before a call that waits for other ranks."""
        if self._giver == threading.get_ident():
            raise UsageError(
                f"state() on rank {self._generation.group.rank} makes a call that waits for the other ranks, and they "
                "wait for state(); make that call before the checkpoint"
            )

    def _carry_out_plan(self, plan: Resize, seconds: float) -> NoReturn:
        """Raises what becomes of this communicator: it is over."""
        runtime, generation = self._runtime, self._generation
        runtime.membership_service.put(
            ChangeRequested(joined=plan.joined, left=plan.left, epoch=generation.membership.epoch)
        )
        runtime.successors.wait_for_successor(generation, deadline_after(seconds))
        generation.outcome.check()
        raise RecoveryTimeout(missing_votes=runtime.successor_requests.missing(generation), timeout=seconds)


def _read(rank: Rank, told: Any) -> ResizeRequest:
    try:
        return decode_resize_request(told)
    except (ValueError, TypeError) as error:
        raise PeerMisbehaved(rank=rank, what=f"it brought to a checkpoint what is {error}") from error
