"""Elastic membership: members join and leave at a checkpoint, which is a collective."""

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
from nexar.collectives.fingerprint import operation_name
from nexar.collectives.operations import OperationCode
from nexar.collectives.requests import PendingCollective
from nexar.communicator.generation import Generation
from nexar.communicator.object_calls import all_gather_object, broadcast_object
from nexar.communicator.runtime import NodeRuntime
from nexar.communicator.state_transfer import send_state
from nexar.errors import (
    Cancelled,
    CollectiveTimeout,
    Expelled,
    MembershipChanged,
    OperationTimeout,
    PeerMisbehaved,
    RecoveryTimeout,
    UsageError,
    error_text,
    sendable,
)
from nexar.group import deadline_after
from nexar.types import NodeId, Rank, whole
from nexar.wire.text import foreign_line

if TYPE_CHECKING:
    from nexar.communicator.communicator import Communicator

# Seconds more that other ranks wait for rank 0 while it waits for joiners.
_GRACE: Final = 5.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The changes made at a checkpoint."""

    communicator: Communicator | None
    """Continue with it; None: this rank has left."""
    joined: tuple[Rank, ...]
    """New ranks in the new communicator."""
    left: Mapping[Rank, str]
    """Old rank to the reason why it left."""


class ElasticMethods(ABC):
    """Joining and leaving by agreement. Communicators other than that of `nexar.init()` and its successors raise
    UsageError.
    """

    _generation: Generation
    _runtime: NodeRuntime
    # Id of the thread that runs `state()`; 0: none. Written by that thread. It must not make calls that wait for other
    # ranks, because these wait for it.
    _state_thread: int

    @abstractmethod
    def _seconds(self, timeout: Any) -> float: ...

    @abstractmethod
    def _call(self, work: PendingCollective, timeout: float) -> Any: ...

    @property
    def state(self) -> Any:
        """The result of a member's `state()`, received when this node joined; None on the first members."""
        return self._runtime.state

    def checkpoint(self, state: Callable[[], Any] | None = None, *, timeout: float | None = None) -> Checkpoint | None:
        """Admit waiting joiners and release leaving ranks. All ranks must call it. Returns the changes; None: it was
        only a barrier. With fewer ranks than `elastic_min_world_size` it waits for joiners.

        If joiners wait, one rank calls `state()`, which returns any value that `send_object` can send. Each joiner has
        it in `comm.state` before it becomes a member.

        Raises MembershipChanged if a rank dies meanwhile: call it again on the successor. If a rank closed before,
        returns the successor and the ranks that left; the next checkpoint admits joiners. `timeout` defaults to the
        setting `elastic_checkpoint_timeout`.
        """
        config = self._runtime.node.config
        wanted = max(0, config.elastic_min_world_size - self._generation.group.size)
        return self._resize(OperationCode.CHECKPOINT, wanted, state, timeout)

    def grow(
        self, n: int, state: Callable[[], Any] | None = None, *, timeout: float | None = None
    ) -> Checkpoint | None:
        """As `checkpoint`, once n joiners wait. Raises OperationTimeout if fewer come in time."""
        number = whole(n)
        if number is None or number < 1:
            raise UsageError(f"grow({n!r}): give the number of joiners, at least 1")
        return self._resize(OperationCode.GROW, number, state, timeout)

    def leave(self) -> None:
        """Leave at the next checkpoint, which returns `communicator` None here and ends this rank's communicators."""
        self._checked(None)
        self._runtime.checkpoint_requests.leave()

    def remove(self, rank: Rank, reason: str = "") -> None:
        """Ask a rank (this one too) to leave at the next checkpoint."""
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
        """Raises only changes caused by a death. A change that faster ranks agreed on, or one after a close, may arrive
        before or during this call: it is a result.
        """
        seconds = 0.0
        try:
            seconds = self._checked(timeout)
            plan = self._plan(code, wanted, state, seconds)
            if plan.joined or plan.left:
                self._apply_plan(plan, seconds)
        except CollectiveTimeout as late:  # with the caller's timeout instead of the internal one
            raise CollectiveTimeout(
                operation=late.operation, sequence=late.sequence, waiting_for=late.waiting_for, timeout=seconds
            ) from None
        except MembershipChanged:
            if not self._generation.agreed:
                raise
        except Expelled as gone:
            if not (self._runtime.has_left and self._runtime.checkpoint_requests.report_departure()):
                raise
            return Checkpoint(None, (), {self._generation.group.rank: gone.reason})
        else:
            return None
        successor, known = self._generation.successor, self._generation.nodes
        assert successor is not None  # written before the outcome that ended the call
        members = successor.membership.members
        joined = tuple(rank for rank, member in enumerate(members) if member.node not in known)
        return Checkpoint(successor, joined, self._generation.gone)

    def _plan(self, code: OperationCode, wanted: int, state: Callable[[], Any] | None, seconds: float) -> Resize:
        deadline = deadline_after(seconds)
        plan = self._agree_on_plan(code, wanted, seconds)
        self._runtime.expect(plan.joined)
        return self._transfer_state(code, plan, state, max(0.001, deadline - time.monotonic())) if plan.joined else plan

    def _agree_on_plan(self, code: OperationCode, wanted: int, seconds: float) -> Resize:
        runtime, group = self._runtime, self._generation.group
        late = wanted and group.rank == 0 and not self._joiners_come(wanted, seconds)
        config = runtime.node.config
        mine = replace(
            runtime.checkpoint_requests.mine(), least=config.elastic_min_world_size, most=config.elastic_max_world_size
        )
        if late:  # the other ranks wait for this one and must know
            mine = replace(mine, complaint=f"joiners: {wanted} are needed, {len(mine.waiting)} wait")
        self._seconds(seconds)  # raises if the communicator ended during the wait
        work = all_gather_object(self._generation.context, encode_resize_request(mine), pickle=False, code=code)
        answers = self._call(work, seconds + _GRACE if wanted else seconds)
        checkpoint_requests = [_read(rank, each) for rank, each in enumerate(answers)]
        complaint = next((each.complaint for each in checkpoint_requests if each.complaint), "")
        if complaint:
            raise OperationTimeout(operation=operation_name(code), waiting_for=foreign_line(complaint), timeout=seconds)
        return resize(
            self._generation.membership,
            checkpoint_requests,
            least=checkpoint_requests[0].least,
            most=checkpoint_requests[0].most,
        )

    def _joiners_come(self, wanted: int, seconds: float) -> bool:
        """False: timeout, or this communicator ended, which the next call raises."""
        checkpoint_requests, mine, node = (
            self._runtime.checkpoint_requests,
            self._generation.cancel_token,
            self._runtime.node.cancel_token,
        )
        with mine.waking(checkpoint_requests.recheck), node.waking(checkpoint_requests.recheck):
            return checkpoint_requests.wait(wanted, seconds, lambda: mine.is_cancelled or node.is_cancelled)

    def _transfer_state(
        self, code: OperationCode, plan: Resize, state: Callable[[], Any] | None, seconds: float
    ) -> Resize:
        """The lowest remaining rank sends the state. Joiners that miss it are not admitted."""
        leaving = {departure.node for departure in plan.left}
        members = self._generation.membership.members
        sender = next(rank for rank, member in enumerate(members) if member.node not in leaving)
        answer: tuple[Sequence[NodeId], str] = (), ""
        failure: BaseException | None = None
        if self._generation.group.rank == sender:
            try:
                answer = self._send_state(plan, state, seconds), ""
            except BaseException as error:  # noqa: BLE001 - raised below, after the other ranks know
                failure, answer = error, ((), f"{type(error).__name__}: {error_text(error)}".removesuffix(": "))
        self._seconds(seconds)  # raises if the communicator ended meanwhile
        work = broadcast_object(self._generation.context, answer, sender, pickle=False, code=code)
        fit, reason = self._call(work, seconds + _GRACE)
        if failure is not None:
            raise failure
        if reason:
            raise Cancelled(
                operation=operation_name(code), reason=f"state() raised {foreign_line(reason)}", rank=sender
            )
        return Resize(tuple(joiner for joiner in plan.joined if joiner.node in fit), plan.left)

    def _send_state(self, plan: Resize, state: Callable[[], Any] | None, seconds: float) -> Sequence[NodeId]:
        self._state_thread = threading.get_ident()
        try:
            value = None if state is None else state()
        finally:
            self._state_thread = 0
        runtime = self._runtime
        return send_state(
            runtime.node, runtime.mesh, value, plan.joined, seconds, cancel_token=self._generation.cancel_token
        )

    def _check_not_in_state(self) -> None:
        if self._state_thread == threading.get_ident():
            raise UsageError(
                f"state() on rank {self._generation.group.rank} makes a call that waits for the other ranks, "
                "which wait for state(); make that call before the checkpoint"
            )

    def _apply_plan(self, plan: Resize, seconds: float) -> NoReturn:
        runtime, generation = self._runtime, self._generation
        runtime.put(ChangeRequested(joined=plan.joined, left=plan.left, epoch=generation.membership.epoch))
        runtime.successors.wait_for_successor(generation, deadline_after(seconds))
        generation.outcome.check()
        raise RecoveryTimeout(missing_votes=runtime.successor_requests.missing(generation), timeout=seconds)


def _read(rank: Rank, request: Any) -> ResizeRequest:
    try:
        return decode_resize_request(request)
    except (ValueError, TypeError) as error:
        raise PeerMisbehaved(rank=rank, what=f"it sent an invalid request to a checkpoint: {error}") from error
