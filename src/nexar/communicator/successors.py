"""What a call raises that ended because its communicator is over: with what to go on, or why there is nothing.

The communicators of one node, and their successors.

    change of the membership ─→ interrupt those it concerns ─→ make each successor, together ─→ seal the fates

Law: a communicator that loses a member, or whose members lost a link between them, is over on all its members, by the
same change, and gets one successor: the one of the last change. Who is still making an earlier one gives it up when the
next change comes. One that cannot be made holds up no other: it is tried again when another change concerns it, and
given up if none does in time. None is made with a member that has closed the communicator: the others are told so. Who
leaves quietly ends none: each goes on until one of its members needs who left.
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

from nexar.cluster.decisions.membership_events import NoProgress
from nexar.cluster.membership import Change, Membership
from nexar.communicator.generation import (
    ANYTHING,
    NOTHING,
    CompletedCalls,
    Generation,
    GenerationBuilder,
    GenerationOutcome,
)
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
from nexar.config import Config
from nexar.errors import LinkClosed, NexarError, PeerLost, RecoveryTimeout, Revoked, UsageError
from nexar.group import Group
from nexar.types import NodeId, Rank


class ErrorResolution:
    """What a lineage says to calls. Any thread."""

    _config: Config
    _changed: threading.Condition
    _history: ChangeHistory
    _needed: NeededMembers
    _closed: bool
    _end: Callable[[Group], NexarError] | None
    missed: Callable[[NodeId, str], None]
    """Told that somebody here needs a member that cannot be reached."""
    renew: Callable[[tuple[int, ...], int], None]
    """Told that these communicators want a successor, in the world of this epoch. Must not block."""

    def judge(self, generation: Generation, error: BaseException) -> BaseException:
        """What a call on this branch has to raise that ended with this error. Under the automatic policy it waits
        until the survivors have agreed, if that is what it takes; never longer than `recovery_timeout` and a little.
        """
        outcome = self.outcome_after(generation, error)
        if outcome is None:
            return self._advised(generation, error)
        if not outcome.done:
            with suppress(NexarError):  # it is looked at below
                generation.group.wait((outcome,), time.monotonic() + 1.5 * self._config.recovery_timeout)
        return copy(outcome.error) if outcome.error is not None else error

    def _advised(self, generation: Generation, error: BaseException) -> BaseException:
        """Under the manual policy the user has to ask for the successor."""
        node = _member(generation, error)
        if node is None or self._config.recovery_policy != "manual":
            return error
        self.missed(node, getattr(error, "cause", "it left"))  # what the user asks for is to be without it
        return PeerLost(
            rank=generation.membership.rank_of(node),
            node=node,
            address=getattr(error, "address", None),
            cause=getattr(error, "cause", "it left"),
            operation=getattr(error, "operation", None),
            remedy="comm.shrink() gives the next communicator, without it",
        )

    def outcome_after(self, generation: Generation, error: BaseException) -> GenerationOutcome | None:
        """What a call has to wait for that ended with this error; None if that is all there is to say."""
        consequence = isinstance(error, (PeerLost, Revoked, LinkClosed))
        if not consequence or not (generation.outcome.done or self._concerns(generation, error)):
            return None
        return generation.outcome

    def _concerns(self, generation: Generation, error: BaseException) -> bool:
        """Whether there will be a fate to wait for; if nobody has seen to it yet, this does."""
        if generation.interrupted:
            return True
        node = _member(generation, error) if self._config.recovery_policy == "automatic" else None
        if node is None:
            return False
        self.need(generation.communicator, generation.membership, node, getattr(error, "cause", "it left"))
        return True

    # -- who is needed -----------------------------------------------------------------------------------------

    def need(self, communicator: int, membership: Membership, node: NodeId, cause: str) -> None:
        """Somebody here needs this member of this generation, and cannot reach it. If it is lost, the others agree on
        that; if it has left the world already, this communicator gets a successor without it. Never blocks.
        """
        with self._changed:
            self._needed.add(communicator, membership, node)
        self.missed(node, cause)
        self._ask_again()

    def gone_from(self, generation: Generation) -> dict[NodeId, str]:
        """Members of it that are none of the world any more, and why."""
        with self._changed:
            return self._history.gone_from(generation.membership)

    def wait_for_following(self, communicator: int, membership: Membership, deadline: float) -> Membership | None:
        """Who goes on after this generation of it, if something that concerns it is chosen in time."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._history.following(communicator, membership) or self._closed or self._end is not None,
                max(0.0, deadline - time.monotonic()),
            )
            return None if self._end is not None else self._history.following(communicator, membership)

    def _ask_again(self) -> None:
        """For what is needed and not chosen yet."""
        with self._changed:
            unmet, epoch = self._needed.unmet(), self._history.world.epoch
        if unmet:
            self.renew(unmet, epoch)


def _member(generation: Generation, error: BaseException) -> NodeId | None:
    """The member that it names as lost; None: it names none. Where this side has closed a link, the member at its other
    end had left the world: while a communicator is open nothing else closes one.
    """
    if not isinstance(error, (PeerLost, LinkClosed)):
        return None
    node = error.node
    if node is None and error.rank is not None and error.rank < generation.group.size:
        node = generation.membership.members[error.rank].node
    return node if node in generation.nodes else None


_log = logging.getLogger(__name__)

_CLOSED: Final = "this node is closed; make a new one with nexar.init()"


class Successors(ErrorResolution):
    """Of one node. Any thread. See cluster.recovery.Heir. Close it before the mesh."""

    def __init__(self, builder: GenerationBuilder, membership: Membership) -> None:
        self._builder = builder
        self._config = builder.config
        self.wrap: Callable[[Generation], Any] = _nothing
        """Makes what the user holds of a branch. Written once, before the first branch."""
        self.missed = self.renew = _nothing  # see Judging; written once, before the first branch
        self.opened: Callable[[Generation], None] = _nothing
        """Told of each branch before anybody uses it. Likewise."""
        self.listed: Callable[[Generation], None] = _nothing
        """Told of each once `find` finds it, and still before anybody uses it. Likewise."""
        self.absent: Callable[[ClosedCommunicator], None] = _nothing
        """Told of what others may make a successor of, and this node takes no part in. Must not block. Likewise."""
        self._changed = threading.Condition()  # over everything below
        self._history = ChangeHistory(membership)
        self._needed = NeededMembers(self._history)
        self._closed_communicators = ClosedCommunicators()
        self._generations: dict[Generation, None] = {}  # without a successor, in the order of their making
        self._failed_builds = FailedBuilds()  # at their successors
        self._building: dict[Group, None] = {}  # of those that are being made
        self._end: Callable[[Group], NexarError] | None = None  # of all of them, for good
        self._closed = False
        self._build_threads = BuildThreads(self._changed)
        self._thread: threading.Thread | None = None  # hands out what is to be made; made with the first change

    # -- making, by the user's threads -----------------------------------------------------------------------

    def begin(
        self, membership: Membership, communicator: int, deadline: float, *, completed: CompletedCalls | None = None
    ) -> Generation:
        """The first generation of a communicator that this node has, together with its members. `completed`: others of
        them may have had an earlier one, and this is how far this node came in that. PeerLost, OperationTimeout;
        LinkClosed: a change came first, and some of them may have heard of it while they made this. Raises what ended
        all of them.
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
        elif late:  # what concerns it was chosen while it was made
            generation.interrupt()
            self._wake()
        return generation

    def forget(self, generation: Generation) -> None:
        """The user has closed it. Whoever makes a successor now is told; if that is under way here, when it has failed:
        else all of them have it. What is sealed and still here was given up, whoever is at it.
        """
        with self._changed:
            wanted = generation in self._generations
            self._generations.pop(generation, None)
            self._failed_builds.forget(generation)
            if wanted:  # else somebody may need who is gone on a later generation
                self._needed.forget(generation.communicator)
            making = self._build_threads.is_at(generation) and not generation.outcome.done
            late = self._history.after(generation) is not None and not making
            absence = self._closed_communicators.add(generation) if wanted else None
        if absence is not None and late:
            self.absent(absence)
        generation.end()

    def closed_by(self, generation: Generation, node: NodeId) -> None:
        """This member has closed it. Never blocks."""
        with self._changed:
            generation.closed_by_nodes.add(node)
            making = [each for each in self._building if each.communicator == generation.communicator]
        for group in making:
            if group.membership.rank_of(node) is not None:
                group.close()
        self._wake()

    def find(self, communicator: int, generation: int) -> Generation | None:
        """One that is open."""
        with self._changed:
            about = communicator, generation
            return next(
                (each for each in self._generations if (each.communicator, each.membership.epoch) == about), None
            )

    def wait_for_successor(self, generation: Generation, deadline: float) -> Any:
        """What the user gets next; None: nothing in time, or a member has closed it. Raises what ended all of them."""
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
        """Whether a change that was chosen gives it a successor. Not if that was given up: it takes another one."""
        with self._changed:
            target = self._history.after(generation)
            return target is not None and not self._failed_builds.is_given_up(generation, target)

    def is_blocked_by_close(self, generation: Generation) -> bool:
        """Whether it was given up because a member has closed it, and that member is still here."""
        with self._changed:
            return self._is_blocked_by_close(generation)

    def _is_blocked_by_close(self, generation: Generation) -> bool:
        """Under the lock."""
        return generation.is_blocked_by_close and generation.bar(self._history.world) is not None

    def generations(self) -> list[Generation]:
        """Those that are open."""
        with self._changed:
            return list(self._generations)

    def missing(self, generation: Generation) -> tuple[Rank, ...]:
        """Who was waited for in vain when its successor was made last, by their ranks in it."""
        with self._changed:
            missing = self._failed_builds.missing(generation)
        return tuple(sorted(rank for node in missing if (rank := generation.membership.rank_of(node)) is not None))

    # -- Heir: whoever performs, without waiting -------------------------------------------------------------

    def changes(self, change: Change, after: Membership) -> None:
        """See Heir. Whoever is interrupted waits for its fate."""
        for generation in self.generations():
            if generation.next_membership(after, [change]) is not None:
                generation.interrupt()

    def changed(self, change: Change, after: Membership) -> None:
        """See Heir. What was opened since is interrupted here."""
        with self._changed:
            self._history.add(change, after)
            making = {each: end for each in self._building if (end := self._history.end_of(each))}
            concerned = [each for each in self._generations if each.next_membership(after, [change]) is not None]
            absences = self._closed_communicators.touched(change)
        for generation in concerned:
            generation.interrupt()
        for group, end in making.items():
            group.close(end)  # it comes too late: whoever makes it begins anew
        for departure in change.left:
            self._builder.lose(departure.node, departure.cause)
        for generation in self.generations():
            generation.publish_departures(change)
        for absence in absences:
            self.absent(absence)
        self._wake()
        self._ask_again()

    def stalled(self, stall: NoProgress) -> None:
        """See Heir. What was reached before still is: only who needs a lost member is told."""
        with self._changed:
            is_member, needy = self._history.world.rank_of, self._needed.unmet()
        for generation in self.generations():
            absent = [node for node in generation.nodes - set(stall.alive) if is_member(node) is not None]
            if absent or generation.communicator in needy:
                generation.interrupt()
                generation.outcome.resolve(generation.stall_error(stall, self._config.recovery_timeout))

    def end_all(self, error_of: Callable[[Group], NexarError]) -> None:
        """Every communicator is over, for good."""
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
        """What ended all of them, as this one's calls have to say it; None: nothing has."""
        with self._changed:
            end = self._end
        return None if end is None else end(group)

    def _wake(self) -> None:
        with self._changed:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="nexar-lineage", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    # -- the thread --------------------------------------------------------------------------------------------

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
        """In a thread of its own."""
        timeout = self._config.recovery_timeout
        deadline = time.monotonic() + timeout
        try:
            if hopeless:
                with self._changed:
                    barred = generation.bar(target)
                late = RecoveryTimeout(missing_votes=self.missing(generation), timeout=timeout)
                generation.outcome.resolve(barred or late)
            else:
                self._succeed(generation, target, deadline)
        except Exception as error:  # noqa: BLE001 - also of a mistake of ours: it must not be tried for ever
            if not isinstance(error, NexarError):
                _log.exception("no successor of communicator %d", generation.communicator)
            self._failed(generation, target, deadline, error)

    def _due(self, generation: Generation, now: float) -> Membership | None:
        """Who is in its successor, if it is to be made or given up now. Under the lock."""
        target = None if self._build_threads.is_at(generation) else self._history.after(generation)
        if target is None or self._failed_builds.is_given_up(generation, target):
            return None
        barred = generation.bar(target) is not None
        return target if barred or self._failed_builds.is_due(generation, target, now) else None

    def _is_hopeless(self, generation: Generation, target: Membership) -> bool:
        """Whether it is to be given up, and was now. Under the lock."""
        if generation.bar(target) is not None:
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
            closed, barred = generation not in self._generations, generation.bar(target) is not None
            if closed:
                self._closed_communicators.add(made)
            elif not barred:
                del self._generations[generation]
                self._failed_builds.forget(generation)
                self._generations[made] = None
                self._build_threads.take(made)
            late = self._history.after(made) is not None
        if closed or barred:  # by its user, or another one's, meanwhile
            (made.end if closed else made.close)()  # the feeds of who was barred are still its own
            return
        self.listed(made)
        if late:
            made.interrupt()
        self._hand_over(generation, made, changes, None if least in (NOTHING, ANYTHING) else least)

    def _make(
        self,
        membership: Membership,
        communicator: int,
        deadline: float,
        completed: CompletedCalls | None,
        old: Generation | None = None,
    ) -> tuple[Generation, int]:
        """See Maker. Ends with LinkClosed when a change comes that concerns it, or a member has closed the `old` one:
        those who know that do not take part any more, and nobody is to wait for them. Raises what ended all of them.
        """
        begun: list[Group] = []

        def began(group: Group) -> None:
            begun.append(group)
            with self._changed:
                self._building[group] = None
                over = self._is_over(group) or (old is not None and old.bar(membership) is not None)
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
        """Whether nobody is to make this one any more. Under the lock."""
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
        """It was not made. Another change that concerns it gives another chance, if one comes in time."""
        _log.info("no successor yet of communicator %d: %s", generation.communicator, error)
        if isinstance(error, PeerLost) and error.node is not None:
            self.need(generation.communicator, target, error.node, error.cause)
        with self._changed:
            closed = generation not in self._generations
            if not closed:
                self._failed_builds.failed(generation, target, deadline, members_missed_in(error, target, generation))
        if closed:
            self.absent(ClosedCommunicator(generation.communicator, generation.membership))

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """No successor is made any more; whoever waits for one raises. Idempotent."""
        with self._changed:
            self._closed = True
            thread, making = self._thread, list(self._building)
            self._changed.notify_all()
        for group in making:
            group.close()
        if thread is not None:
            thread.join()
        self._build_threads.close()
        with self._changed:  # only now: one more may have been made
            generations = list(self._generations)
            self._generations.clear()
        for generation in generations:
            generation.outcome.resolve(UsageError(_CLOSED))
            generation.end()


def _nothing(*_: Any) -> None:
    """Nobody listens."""
