"""The generations of one node and their successors.

Invariant: a communicator that loses a member, or a link between members, ends on all its members by the same change and
gets one successor, that of the last change: earlier builds are abandoned. A successor that cannot be made delays no
other; it is tried again at the next change that concerns it, and given up if none comes in time. No successor is made
with a member that closed the communicator. A quiet departure ends a communicator only when a call needs the departed
member.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any, Final

from nexar.cluster.decisions.completion import CompletedCalls, completed_by_all
from nexar.cluster.decisions.membership_events import NoProgress
from nexar.cluster.membership import Change, Membership
from nexar.communicator.generation import Generation, GenerationOutcome
from nexar.communicator.generation_builder import GenerationBuilder
from nexar.communicator.successors_state import (
    BuildThreads,
    ChangeHistory,
    ClosedCommunicator,
    ClosedCommunicators,
    FailedBuilds,
    NeededMembers,
    build_overtaken,
    members_missed_in,
)
from nexar.errors import LinkClosed, NexarError, PeerLost, RecoveryTimeout, Revoked, UsageError
from nexar.group import Group
from nexar.types import NodeId, Rank


def _member(generation: Generation, error: BaseException) -> NodeId | None:
    """The member that the error names as lost, or None. If this side closed the link, that member left the world:
    nothing else closes links of open communicators.
    """
    if not isinstance(error, (PeerLost, LinkClosed)):
        return None
    node = error.node
    if node is None and error.rank is not None and error.rank < generation.group.size:
        node = generation.membership.members[error.rank].node
    return node if node in generation.nodes else None


_log = logging.getLogger(__name__)

_CLOSED: Final = "this node is closed; make a new one with nexar.init()"


class Successors:
    """Makes this node's successors when NodeRuntime reports changes. Any thread. Close it before the mesh."""

    def __init__(self, builder: GenerationBuilder, membership: Membership) -> None:
        self._builder = builder
        self._config = builder.config
        # Makes the user's communicator of a generation. This and the next ones: written once, before the first
        # generation.
        self.wrap: Callable[[Generation], Any] = _nothing
        # Called when a call needs a member that cannot be reached.
        self.report_unreachable: Callable[[NodeId, str], None] = _nothing
        # Called when communicators need a successor, in the world of this epoch. Must not block.
        self.renew: Callable[[tuple[int, ...], int], None] = _nothing
        # Called with each generation before it is used.
        self.opened: Callable[[Generation], None] = _nothing
        # Called with each generation once `find` returns it, before it is used.
        self.listed: Callable[[Generation], None] = _nothing
        # Called for successors in which this node does not take part. Must not block.
        self.absent: Callable[[ClosedCommunicator], None] = _nothing
        self._changed = threading.Condition()  # guards everything below
        self._history = ChangeHistory(membership)
        self._needed = NeededMembers(self._history)
        self._closed_communicators = ClosedCommunicators()
        self._generations: dict[Generation, None] = {}  # without a successor, oldest first
        self._failed_builds = FailedBuilds()
        self._building: dict[Group, None] = {}
        self._end: Callable[[Group], NexarError] | None = None
        self._closed = False
        self._build_threads = BuildThreads(self._changed)
        self._thread: threading.Thread | None = None  # starts builds; made at the first change

    # -- called by the user's threads ------------------------------------------------------------------------

    def begin(
        self, membership: Membership, communicator: int, deadline: float, *, completed: CompletedCalls | None = None
    ) -> Generation:
        """Return a communicator's first generation here. `completed`: this node's progress if other members had an
        earlier one. Raises PeerLost, OperationTimeout, or LinkClosed if a change came first.
        """
        generation, _ = self._make(membership, communicator, deadline, completed)
        self.opened(generation)
        with self._changed:
            end, closed = self._end, self._closed
            if not closed:
                self._generations[generation] = None
            late = self._history.after(generation) is not None
        if closed:
            generation.end()
            raise UsageError(_CLOSED)
        self.listed(generation)
        if end is not None:
            generation.interrupt()
            generation.outcome.resolve(end(generation.group))
        elif late:  # a change was chosen during the build
            generation.interrupt()
            self._wake()
        return generation

    def forget(self, generation: Generation) -> None:
        """The user closed it. Tells members that make its successor; if this node is building one, only when that
        fails. A listed generation with an outcome was abandoned by its builder.
        """
        with self._changed:
            wanted = generation in self._generations
            self._generations.pop(generation, None)
            self._failed_builds.forget(generation)
            if wanted:  # else a later generation may need a departed member
                self._needed.forget(generation.communicator)
            making = self._build_threads.is_at(generation) and not generation.outcome.done
            late = self._history.after(generation) is not None and not making
            absence = self._closed_communicators.add(generation) if wanted else None
        if absence is not None and late:
            self.absent(absence)
        generation.end()

    def closed_by(self, generation: Generation, node: NodeId) -> None:
        """A member closed it. Never blocks."""
        with self._changed:
            generation.closed_by_nodes.add(node)
            making = [each for each in self._building if each.communicator == generation.communicator]
        for group in making:
            if group.membership.rank_of(node) is not None:
                group.close()
        self._wake()

    def find(self, communicator: int, generation: int) -> Generation | None:
        with self._changed:
            about = communicator, generation
            return next(
                (each for each in self._generations if (each.communicator, each.membership.epoch) == about), None
            )

    def wait_for_successor(self, generation: Generation, deadline: float) -> Any:
        """None: timeout, or a member closed it. Raises the error that ended all communicators."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    generation.is_succeeded
                    or self._is_blocked_by_close(generation)
                    or self._closed
                    or self._end is not None
                ),
                max(0.0, deadline - time.monotonic()),
            )
            if generation.successor is None and self._end is not None:
                raise self._end(generation.group)
            return generation.successor

    def is_concerned(self, generation: Generation) -> bool:
        """A chosen change gives it a successor, not given up."""
        with self._changed:
            target = self._history.after(generation)
            return target is not None and not self._failed_builds.is_given_up(generation, target)

    def is_blocked_by_close(self, generation: Generation) -> bool:
        """A current member of the world closed it."""
        with self._changed:
            return self._is_blocked_by_close(generation)

    def _is_blocked_by_close(self, generation: Generation) -> bool:
        """Under the lock."""
        return generation.is_blocked_by_close and generation.close_error(self._history.world) is not None

    def generations(self) -> list[Generation]:
        with self._changed:
            return list(self._generations)

    def missing(self, generation: Generation) -> tuple[Rank, ...]:
        with self._changed:
            missing = self._failed_builds.missing(generation)
        return tuple(sorted(rank for node in missing if (rank := generation.membership.rank_of(node)) is not None))

    # -- called by NodeRuntime as MembershipListener: must not block --------------------------------------------------

    def membership_decided(self, change: Change, after: Membership) -> None:
        for generation in self.generations():
            if generation.next_membership(after, [change]) is not None:
                generation.interrupt()

    def membership_adopted(self, change: Change, after: Membership) -> None:
        """Also interrupts generations that were opened since `membership_decided`."""
        with self._changed:
            self._history.add(change, after)
            making = {each: end for each in self._building if (end := self._history.end_of(each))}
            concerned = [each for each in self._generations if each.next_membership(after, [change]) is not None]
            absences = self._closed_communicators.touched(change)
        for generation in concerned:
            generation.interrupt()
        for group, end in making.items():
            group.close(end)  # too late: its builder starts again
        for departure in change.left:
            self._builder.lose(departure.node, departure.cause)
        for generation in self.generations():
            generation.publish_departures(change)
        for absence in absences:
            self.absent(absence)
        self._wake()
        self._ask_again()

    def stalled(self, stall: NoProgress) -> None:
        """Only generations that need a lost member end."""
        with self._changed:
            is_member, needy = self._history.world.rank_of, self._needed.unmet()
        for generation in self.generations():
            absent = [node for node in generation.nodes - set(stall.alive) if is_member(node) is not None]
            if absent or generation.communicator in needy:
                generation.interrupt()
                generation.outcome.resolve(generation.stall_error(stall, self._config.recovery_timeout))

    def end_all(self, error_of: Callable[[Group], NexarError]) -> None:
        with self._changed:
            self._end = error_of
            generations, making = list(self._generations), list(self._building)
        for generation in generations:
            generation.interrupt()
            generation.outcome.resolve(error_of(generation.group))
        for group in making:
            group.close()
        self._wake()

    def ended(self, group: Group) -> NexarError | None:
        with self._changed:
            end = self._end
        return None if end is None else end(group)

    def _wake(self) -> None:
        with self._changed:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="nexar-successors", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    # -- the build threads -------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                targets = {each: target for each in self._generations if (target := self._due(each, now)) is not None}
                if targets and self._end is None and not self._build_threads.is_full:
                    first = min(targets, key=lambda each: (each.communicator, each.membership.epoch))
                    hopeless = self._is_hopeless(first, targets[first])
                    self._build_threads.start(first, partial(self._attempt, first, targets[first], hopeless=hopeless))
                else:
                    idle = self._end is not None or self._build_threads.is_full
                    self._changed.wait(None if idle else self._failed_builds.pause(now))

    def _attempt(self, generation: Generation, target: Membership, *, hopeless: bool) -> None:
        timeout = self._config.recovery_timeout
        deadline = time.monotonic() + timeout
        try:
            if hopeless:
                with self._changed:
                    blocked = generation.close_error(target)
                late = RecoveryTimeout(missing_votes=self.missing(generation), timeout=timeout)
                generation.outcome.resolve(blocked or late)
            else:
                self._succeed(generation, target, deadline)
        except Exception as error:  # noqa: BLE001 - also a bug of nexar: it must not be retried for ever
            if not isinstance(error, NexarError):
                _log.exception("no successor of communicator %d", generation.communicator)
            self._failed(generation, target, deadline, error)

    def _due(self, generation: Generation, now: float) -> Membership | None:
        """The successor's membership if it is to be made or given up now. Under the lock."""
        target = None if self._build_threads.is_at(generation) else self._history.after(generation)
        if target is None or self._failed_builds.is_given_up(generation, target):
            return None
        blocked = generation.close_error(target) is not None
        return target if blocked or self._failed_builds.is_due(generation, target, now) else None

    def _is_hopeless(self, generation: Generation, target: Membership) -> bool:
        if generation.close_error(target) is not None:
            self._failed_builds.failed(generation, target, 0.0)
        return self._failed_builds.give_up(generation, target)

    def _succeed(self, generation: Generation, target: Membership, deadline: float) -> None:
        with self._changed:
            changes = self._history.between(generation.membership.epoch, target.epoch)
            self._failed_builds.forget(generation)
        completed = CompletedCalls(generation.membership.epoch, generation.context.call_log.completed)
        made, least = self._make(target, generation.communicator, deadline, completed, generation)
        made.inherit(generation)
        self.opened(made)
        with self._changed:
            closed, blocked = generation not in self._generations, generation.close_error(target) is not None
            if closed:
                self._closed_communicators.add(made)
            elif not blocked:
                del self._generations[generation]
                self._failed_builds.forget(generation)
                self._generations[made] = None
                self._build_threads.take(made)
            late = self._history.after(made) is not None
        if closed or blocked:  # by a user meanwhile
            (made.end if closed else made.close)()  # a blocked generation keeps its feeds
            return
        self.listed(made)
        if late:
            made.interrupt()
        self._hand_over(generation, made, changes, completed_by_all(least))

    def _make(
        self,
        membership: Membership,
        communicator: int,
        deadline: float,
        completed: CompletedCalls | None,
        old: Generation | None = None,
    ) -> tuple[Generation, int]:
        """LinkClosed when a change concerns it or a member closed `old`: members that know do not take part, and none
        may wait for them.
        """
        begun: list[Group] = []

        def began(group: Group) -> None:
            begun.append(group)
            with self._changed:
                self._building[group] = None
                over = self._is_over(group) or (old is not None and old.close_error(membership) is not None)
                loss = self._history.loss_in(membership)
            if over:
                group.close()
            elif loss is not None:
                raise loss

        try:
            return self._builder.make(membership, communicator, deadline, completed, began)
        except NexarError as error:
            with self._changed:
                over, end = [group for group in begun if self._is_over(group)], self._end
            if not over:
                raise
            if end is not None:
                raise end(over[0]) from error
            raise build_overtaken() from error
        finally:
            with self._changed:
                for group in begun:
                    self._building.pop(group, None)

    def _is_over(self, group: Group) -> bool:
        """Under the lock."""
        return self._closed or self._end is not None or self._history.overtakes(group)

    def _hand_over(self, old: Generation, new: Generation, changes: list[Change], completed: int | None) -> None:
        communicator = self.wrap(new)
        agreed = all(departure.willing for change in changes for departure in change.left)
        old.completed = completed
        for generation in (old, *old.ancestors):
            generation.agreed = agreed and (generation is old or generation.agreed)
            change = generation.set_successor(new, communicator, changes)
            generation.outcome.resolve(change if self._config.recovery_policy != "manual" else generation.loss())
        old.memberships.publish(old.membership_event_to(new, old.joined(new), communicator))
        old.is_succeeded = True
        with self._changed:
            self._changed.notify_all()
        old.close_in_background(new)

    def _failed(self, generation: Generation, target: Membership, deadline: float, error: Exception) -> None:
        _log.info("no successor yet of communicator %d: %s", generation.communicator, error)
        if isinstance(error, PeerLost) and error.node is not None:
            self.need(generation.communicator, target, error.node, error.cause)
        with self._changed:
            closed = generation not in self._generations
            if not closed:
                self._failed_builds.failed(generation, target, deadline, members_missed_in(error, target, generation))
        if closed:
            self.absent(ClosedCommunicator(generation.communicator, generation.membership))

    # -- closing ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop making successors; waiters raise. Idempotent."""
        with self._changed:
            self._closed = True
            thread, making = self._thread, list(self._building)
            self._changed.notify_all()
        for group in making:
            group.close()
        if thread is not None:
            thread.join()
        self._build_threads.close()
        with self._changed:  # only now: a last one may have been made
            generations = list(self._generations)
            self._generations.clear()
        for generation in generations:
            generation.outcome.resolve(UsageError(_CLOSED))
            generation.end()

    # -- errors of calls, mapped to outcomes of their generation ------------------------------------------------

    def resolve_error(self, generation: Generation, error: BaseException) -> BaseException:
        """May block until the survivors agree (automatic policy), up to 1.5 × `recovery_timeout`."""
        outcome = self.outcome_after(generation, error)
        if outcome is None:
            return self._advised(generation, error)
        if not outcome.done:
            with suppress(NexarError):  # checked below
                generation.group.wait((outcome,), time.monotonic() + 1.5 * self._config.recovery_timeout)
        return copy(outcome.error) if outcome.error is not None else error

    def _advised(self, generation: Generation, error: BaseException) -> BaseException:
        node = _member(generation, error)
        if node is None or self._config.recovery_policy != "manual":
            return error
        self.report_unreachable(node, getattr(error, "cause", "it left"))  # so that the successor lacks it
        return PeerLost(
            rank=generation.membership.rank_of(node),
            node=node,
            address=getattr(error, "address", None),
            cause=getattr(error, "cause", "it left"),
            operation=getattr(error, "operation", None),
            remedy="comm.shrink() gives the next communicator, without it",
        )

    def outcome_after(self, generation: Generation, error: BaseException) -> GenerationOutcome | None:
        """What to await first; None: raise the error unchanged."""
        consequence = isinstance(error, (PeerLost, Revoked, LinkClosed))
        if not consequence or not (generation.outcome.done or self._concerns(generation, error)):
            return None
        return generation.outcome

    def _concerns(self, generation: Generation, error: BaseException) -> bool:
        if generation.interrupted:
            return True
        node = _member(generation, error) if self._config.recovery_policy == "automatic" else None
        if node is None:
            return False
        self.need(generation.communicator, generation.membership, node, getattr(error, "cause", "it left"))
        return True

    # -- needed members ----------------------------------------------------------------------------------------

    def need(self, communicator: int, membership: Membership, node: NodeId, cause: str) -> None:
        """A call needs this unreachable member. If it is lost, the others agree on that; if it left the world, the
        communicator gets a successor without it. Never blocks.
        """
        with self._changed:
            self._needed.add(communicator, membership, node)
        self.report_unreachable(node, cause)
        self._ask_again()

    def gone_from(self, generation: Generation) -> dict[NodeId, str]:
        with self._changed:
            return self._history.gone_from(generation.membership)

    def wait_for_following(self, communicator: int, membership: Membership, deadline: float) -> Membership | None:
        """None: no change that concerns it was chosen in time."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._history.following(communicator, membership) or self._closed or self._end is not None,
                max(0.0, deadline - time.monotonic()),
            )
            return None if self._end is not None else self._history.following(communicator, membership)

    def _ask_again(self) -> None:
        with self._changed:
            unmet, epoch = self._needed.unmet(), self._history.world.epoch
        if unmet:
            self.renew(unmet, epoch)


def _nothing(*_: Any) -> None: ...


class ErrorResolver:
    """Maps an operation's error to the one its communicator raises. Any thread."""

    def __init__(self, successors: Successors, generation: Generation, communicator: object) -> None:
        """Keeps `communicator` alive: it is not closed as unused while one of its requests is pending."""
        self._successors = successors
        self._generation = generation
        self._communicator = communicator

    def resolve_error(self, error: BaseException) -> BaseException:
        """The error to raise. May block until the survivors agree."""
        return self._successors.resolve_error(self._generation, error)

    def outcome_after(self, error: BaseException) -> GenerationOutcome | None:
        """What to await first; None: raise the error unchanged."""
        return self._successors.outcome_after(self._generation, error)
