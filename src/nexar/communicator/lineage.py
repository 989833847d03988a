"""The communicators of one node, and their successors.

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
from functools import partial
from typing import Any, Final

from nexar.cluster.change import Change
from nexar.cluster.decisions.succession_events import Stall
from nexar.cluster.membership import Membership
from nexar.communicator.absences import Absence, Absences
from nexar.communicator.attempts import Attempts, missed_in
from nexar.communicator.branch import Branch
from nexar.communicator.course import Course, overtaken
from nexar.communicator.judging import Judging
from nexar.communicator.maker import Maker
from nexar.communicator.needs import Needs
from nexar.communicator.settling import ANYTHING, NOTHING, Completed
from nexar.communicator.workshop import Workshop
from nexar.errors import (
    NexarError,
    PeerLost,
    RecoveryTimeout,
    UsageError,
)
from nexar.group import Group
from nexar.types import NodeId, Rank

_log = logging.getLogger(__name__)

_CLOSED: Final = "this node is closed; make a new one with nexar.init()"


class Lineage(Judging):
    """Of one node. Any thread. See cluster.recovery.Heir. Close it before the mesh."""

    def __init__(self, maker: Maker, membership: Membership) -> None:
        self._maker = maker
        self._config = maker.config
        self.wrap: Callable[[Branch], Any] = _nothing
        """Makes what the user holds of a branch. Written once, before the first branch."""
        self.missed = self.renew = _nothing  # see Judging; written once, before the first branch
        self.opened: Callable[[Branch], None] = _nothing
        """Told of each branch before anybody uses it. Likewise."""
        self.listed: Callable[[Branch], None] = _nothing
        """Told of each once `find` finds it, and still before anybody uses it. Likewise."""
        self.absent: Callable[[Absence], None] = _nothing
        """Told of what others may make a successor of, and this node takes no part in. Must not block. Likewise."""
        self._changed = threading.Condition()  # over everything below
        self._course = Course(membership)
        self._needs = Needs(self._course)
        self._absences = Absences()
        self._branches: dict[Branch, None] = {}  # without a successor, in the order of their making
        self._attempts = Attempts()  # at their successors
        self._making: dict[Group, None] = {}  # of those that are being made
        self._end: Callable[[Group], NexarError] | None = None  # of all of them, for good
        self._closed = False
        self._workshop = Workshop(self._changed)
        self._thread: threading.Thread | None = None  # hands out what is to be made; made with the first change

    # -- making, by the user's threads -----------------------------------------------------------------------

    def begin(
        self, membership: Membership, communicator: int, deadline: float, *, completed: Completed | None = None
    ) -> Branch:
        """The first generation of a communicator that this node has, together with its members. `completed`: others of
        them may have had an earlier one, and this is how far this node came in that. PeerLost, OperationTimeout;
        LinkClosed: a change came first, and some of them may have heard of it while they made this. Raises what ended
        all of them.
        """
        branch, _ = self._make(membership, communicator, deadline, completed)
        self.opened(branch)
        with self._changed:
            end, closed = self._end, self._closed
            if not closed:
                self._branches[branch] = None
            late = self._course.after(branch) is not None
        if closed:
            branch.end()
            raise UsageError(_CLOSED)
        self.listed(branch)
        if end is not None:
            branch.interrupt()
            branch.fate.seal(end(branch.group))
        elif late:  # what concerns it was chosen while it was made
            branch.interrupt()
            self._wake()
        return branch

    def forget(self, branch: Branch) -> None:
        """The user has closed it. Whoever makes a successor now is told; if that is under way here, when it has failed:
        else all of them have it. What is sealed and still here was given up, whoever is at it.
        """
        with self._changed:
            wanted = branch in self._branches
            self._branches.pop(branch, None)
            self._attempts.forget(branch)
            if wanted:  # else somebody may need who is gone on a later generation
                self._needs.forget(branch.communicator)
            making = self._workshop.is_at(branch) and not branch.fate.done
            late = self._course.after(branch) is not None and not making
            absence = self._absences.add(branch) if wanted else None
        if absence is not None and late:
            self.absent(absence)
        branch.end()

    def closed_by(self, branch: Branch, node: NodeId) -> None:
        """This member has closed it. Never blocks."""
        with self._changed:
            branch.closers.add(node)
            making = [each for each in self._making if each.communicator == branch.communicator]
        for group in making:
            if group.membership.rank_of(node) is not None:
                group.close()
        self._wake()

    def find(self, communicator: int, generation: int) -> Branch | None:
        """One that is open."""
        with self._changed:
            about = communicator, generation
            return next((each for each in self._branches if (each.communicator, each.membership.epoch) == about), None)

    def wait_for_successor(self, branch: Branch, deadline: float) -> Any:
        """What the user gets next; None: nothing in time, or a member has closed it. Raises what ended all of them."""
        with self._changed:
            self._changed.wait_for(
                lambda: branch.is_succeeded or self._is_barred(branch) or self._closed or self._end is not None,
                max(0.0, deadline - time.monotonic()),
            )
            if branch.successor is None and self._end is not None:
                raise self._end(branch.group)
            return branch.successor

    def is_concerned(self, branch: Branch) -> bool:
        """Whether a change that was chosen gives it a successor. Not if that was given up: it takes another one."""
        with self._changed:
            target = self._course.after(branch)
            return target is not None and not self._attempts.is_given_up(branch, target)

    def is_barred(self, branch: Branch) -> bool:
        """Whether it was given up because a member has closed it, and that member is still here."""
        with self._changed:
            return self._is_barred(branch)

    def _is_barred(self, branch: Branch) -> bool:
        """Under the lock."""
        return branch.is_barred and branch.bar(self._course.world) is not None

    def branches(self) -> list[Branch]:
        """Those that are open."""
        with self._changed:
            return list(self._branches)

    def missing(self, branch: Branch) -> tuple[Rank, ...]:
        """Who was waited for in vain when its successor was made last, by their ranks in it."""
        with self._changed:
            missing = self._attempts.missing(branch)
        return tuple(sorted(rank for node in missing if (rank := branch.membership.rank_of(node)) is not None))

    # -- Heir: whoever performs, without waiting -------------------------------------------------------------

    def changes(self, change: Change, after: Membership) -> None:
        """See Heir. Whoever is interrupted waits for its fate."""
        for branch in self.branches():
            if branch.next_membership(after, [change]) is not None:
                branch.interrupt()

    def changed(self, change: Change, after: Membership) -> None:
        """See Heir. What was opened since is interrupted here."""
        with self._changed:
            self._course.add(change, after)
            making = {each: end for each in self._making if (end := self._course.end_of(each))}
            concerned = [each for each in self._branches if each.next_membership(after, [change]) is not None]
            absences = self._absences.touched(change)
        for branch in concerned:
            branch.interrupt()
        for group, end in making.items():
            group.close(end)  # it comes too late: whoever makes it begins anew
        for departure in change.left:
            self._maker.lose(departure.node, departure.cause)
        for branch in self.branches():
            branch.tell_who_left(change)
        for absence in absences:
            self.absent(absence)
        self._wake()
        self._ask_again()

    def stalled(self, stall: Stall) -> None:
        """See Heir. What was reached before still is: only who needs a lost member is told."""
        with self._changed:
            is_member, needy = self._course.world.rank_of, self._needs.unmet()
        for branch in self.branches():
            absent = [node for node in branch.nodes - set(stall.alive) if is_member(node) is not None]
            if absent or branch.communicator in needy:
                branch.interrupt()
                branch.fate.seal(branch.stall_error(stall, self._config.recovery_timeout))

    def end_all(self, error_of: Callable[[Group], NexarError]) -> None:
        """Every communicator is over, for good."""
        with self._changed:
            self._end = error_of
            branches, making = list(self._branches), list(self._making)
        for branch in branches:
            branch.interrupt()
            branch.fate.seal(error_of(branch.group))
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
                targets = {each: target for each in self._branches if (target := self._due(each, now)) is not None}
                if targets and self._end is None and not self._workshop.is_full:
                    first = min(targets, key=lambda each: (each.communicator, each.membership.epoch))
                    hopeless = self._is_hopeless(first, targets[first])
                    self._workshop.start(first, partial(self._attempt, first, targets[first], hopeless=hopeless))
                else:
                    idle = self._end is not None or self._workshop.is_full
                    self._changed.wait(None if idle else self._attempts.pause(now))

    def _attempt(self, branch: Branch, target: Membership, *, hopeless: bool) -> None:
        """In a thread of its own."""
        timeout = self._config.recovery_timeout
        deadline = time.monotonic() + timeout
        try:
            if hopeless:
                with self._changed:
                    barred = branch.bar(target)
                late = RecoveryTimeout(missing_votes=self.missing(branch), timeout=timeout)
                branch.fate.seal(barred or late)
            else:
                self._succeed(branch, target, deadline)
        except Exception as error:  # noqa: BLE001 - also of a mistake of ours: it must not be tried for ever
            if not isinstance(error, NexarError):
                _log.exception("no successor of communicator %d", branch.communicator)
            self._failed(branch, target, deadline, error)

    def _due(self, branch: Branch, now: float) -> Membership | None:
        """Who is in its successor, if it is to be made or given up now. Under the lock."""
        target = None if self._workshop.is_at(branch) else self._course.after(branch)
        if target is None or self._attempts.is_given_up(branch, target):
            return None
        barred = branch.bar(target) is not None
        return target if barred or self._attempts.is_due(branch, target, now) else None

    def _is_hopeless(self, branch: Branch, target: Membership) -> bool:
        """Whether it is to be given up, and was now. Under the lock."""
        if branch.bar(target) is not None:
            self._attempts.failed(branch, target, 0.0)
        return self._attempts.give_up(branch, target)

    def _succeed(self, branch: Branch, target: Membership, deadline: float) -> None:
        with self._changed:
            changes = self._course.between(branch.membership.epoch, target.epoch)
            self._attempts.forget(branch)
        completed = Completed(branch.membership.epoch, branch.assembly.journal.completed)
        made, least = self._make(target, branch.communicator, deadline, completed, branch)
        made.inherit(branch)
        self.opened(made)
        with self._changed:
            closed, barred = branch not in self._branches, branch.bar(target) is not None
            if closed:
                self._absences.add(made)
            elif not barred:
                del self._branches[branch]
                self._attempts.forget(branch)
                self._branches[made] = None
                self._workshop.take(made)
            late = self._course.after(made) is not None
        if closed or barred:  # by its user, or another one's, meanwhile
            (made.end if closed else made.close)()  # the feeds of who was barred are still its own
            return
        self.listed(made)
        if late:
            made.interrupt()
        self._hand_over(branch, made, changes, None if least in (NOTHING, ANYTHING) else least)

    def _make(
        self,
        membership: Membership,
        communicator: int,
        deadline: float,
        completed: Completed | None,
        old: Branch | None = None,
    ) -> tuple[Branch, int]:
        """See Maker. Ends with LinkClosed when a change comes that concerns it, or a member has closed the `old` one:
        those who know that do not take part any more, and nobody is to wait for them. Raises what ended all of them.
        """
        begun: list[Group] = []

        def began(group: Group) -> None:
            begun.append(group)
            with self._changed:
                self._making[group] = None
                over = self._is_over(group) or (old is not None and old.bar(membership) is not None)
                loss = self._course.loss_in(membership)
            if over:
                group.close()
            elif loss is not None:
                raise loss

        try:
            return self._maker.make(membership, communicator, deadline, completed, began)
        except NexarError as error:
            with self._changed:
                over, end = [group for group in begun if self._is_over(group)], self._end
            if not over:
                raise
            if end is not None:
                raise end(over[0]) from error
            raise overtaken() from error
        finally:
            with self._changed:
                for group in begun:
                    self._making.pop(group, None)

    def _is_over(self, group: Group) -> bool:
        """Whether nobody is to make this one any more. Under the lock."""
        return self._closed or self._end is not None or self._course.overtakes(group)

    def _hand_over(self, old: Branch, new: Branch, changes: list[Change], completed: int | None) -> None:
        communicator = self.wrap(new)
        agreed = all(departure.willing for change in changes for departure in change.left)
        old.completed = completed
        for branch in (old, *old.ancestors):
            branch.agreed = agreed and (branch is old or branch.agreed)
            change = branch.lead_to(new, communicator, changes)
            branch.fate.seal(change if self._config.recovery_policy != "manual" else branch.loss())
        old.memberships.publish(old.step_to(new, old.joined(new), communicator))
        old.is_succeeded = True
        with self._changed:
            self._changed.notify_all()
        old.clear_away(new)

    def _failed(self, branch: Branch, target: Membership, deadline: float, error: Exception) -> None:
        """It was not made. Another change that concerns it gives another chance, if one comes in time."""
        _log.info("no successor yet of communicator %d: %s", branch.communicator, error)
        if isinstance(error, PeerLost) and error.node is not None:
            self.need(branch.communicator, target, error.node, error.cause)
        with self._changed:
            closed = branch not in self._branches
            if not closed:
                self._attempts.failed(branch, target, deadline, missed_in(error, target, branch))
        if closed:
            self.absent(Absence(branch.communicator, branch.membership))

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """No successor is made any more; whoever waits for one raises. Idempotent."""
        with self._changed:
            self._closed = True
            thread, making = self._thread, list(self._making)
            self._changed.notify_all()
        for group in making:
            group.close()
        if thread is not None:
            thread.join()
        self._workshop.close()
        with self._changed:  # only now: one more may have been made
            branches = list(self._branches)
            self._branches.clear()
        for branch in branches:
            branch.fate.seal(UsageError(_CLOSED))
            branch.end()


def _nothing(*_: Any) -> None:
    """Nobody listens."""
