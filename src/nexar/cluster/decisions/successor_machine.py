"""The successor machine of one node: which generation of each communicator comes next, and what its calls raise. Pure.

    BeginRequested ─→ build ─ BuildFinished ─→ open ─ MembershipDecided (concerns it) ─→ interrupted
                                                                                            │ slot free
              superseded ←─ BuildFinished ── build of the successor ←───────────────────────┤
                                                  │ BuildFailed                             │ newer change
                                                  └─→ failed: RequestRenewal, given up at its timeout

Invariants:
- A change ends a generation on all its members, and its successor follows from the decided changes alone: the last one
  that concerns it counts. Builds of earlier targets are aborted.
- A failed target is not repeated: what other members sent to its build is lost. They may still wait in theirs, for a
  member that only this node could not reach. So if no change follows the failure soon, this node requests one, a
  renewal, and all build again. The target is given up `recovery_timeout` after the first build began; a newer target
  with other members gives it another chance. A failed build delays no other.
- A first build whose parent has ended is aborted soon: a member that was interrupted before it asked for the build
  never takes part. The delay is for the others: if all had asked for it, it is finished by then.
- At most MAX_BUILDS successors are built at a time, lowest keys first on every member, so no two members wait for each
  other in different builds.
- No successor is built with a member that closed the communicator, or that has left the world.
- A quiet departure ends a communicator only when a call needs the departed member.
- A notice counts only from a member, and never as an action of this node. A forwarded notice names the forwarding
  rank, so a member that lies accuses only itself.
- Outcomes: any outcome replaces QuorumLost and RecoveryTimedOut. Only a successor, a termination or (for another
  closer) RevokedBy(closed) replaces RevokedBy. Only a newer successor replaces Superseded. Nothing replaces Terminated.
- Every ancestor of a generation leads to the newest successor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from nexar.cluster.decisions.membership_events import MembershipDecided, NoProgress, Tick
from nexar.cluster.decisions.successor_events import (
    AdoptMembership,
    BeginRequested,
    BuildFailed,
    BuildFailure,
    BuildFailureKind,
    BuildFinished,
    BuildId,
    CloseGeneration,
    DiscardBuild,
    DropPeer,
    GenerationKey,
    Investigate,
    LocalClose,
    MemberNeeded,
    OpenGeneration,
    Outcome,
    QuorumLost,
    RecoveryTimedOut,
    RejectBegin,
    Released,
    ReportDeparture,
    RequestRenewal,
    RevokedBy,
    RevokeReceived,
    RevokeRequested,
    SendNotice,
    SetOutcome,
    StartBuild,
    SuccessorAction,
    SuccessorInput,
    Terminate,
    Terminated,
    TerminationKind,
)
from nexar.cluster.decisions.successor_state import (
    Build,
    ChangeHistory,
    ClosedCommunicator,
    ClosedCommunicators,
    EarlyNotices,
    FailedBuild,
    NeededMembers,
    NextGeneration,
    OpenedGeneration,
    Renewal,
    SupersededGeneration,
    abort,
    closer_in,
    interrupt,
    nodes_of,
    ranks_of,
    set_outcome,
    stall_outcome,
    supersede,
)
from nexar.cluster.membership import WORLD, Change, Membership, next_generation
from nexar.errors import sendable
from nexar.types import NodeId, Rank
from nexar.wire.control import MAX_CAUSE_CHARACTERS
from nexar.wire.text import foreign_line, foreign_lines

MAX_BUILDS: Final = 16
# Numbers of the machine's own builds start here; those of BeginRequested are lower.
FIRST_BUILD: Final = 1 << 32
# Share of `recovery_timeout` after which a failed build requests a renewal, and a build without a parent is aborted: a
# loss is decided sooner, and a build with all its members is finished sooner.
_PATIENCE: Final = 1 / 15


class SuccessorMachine:
    """`step` is the only input; the owner steps Tick when `due`. All other methods are queries."""

    def __init__(
        self,
        me: NodeId,
        membership: Membership,
        *,
        recovery_timeout: float,
        apply: Callable[[Change, Membership], Membership] = Change.apply,
        next_generation: NextGeneration = next_generation,
    ) -> None:
        """`apply` and `next_generation` let machines share memberships."""
        self.me = me
        # What ended all communicators of this node; None until then.
        self.terminated: Terminated | None = None
        self._recovery_timeout = recovery_timeout
        self._patience = _PATIENCE * recovery_timeout
        self._apply = apply
        self._history = ChangeHistory(membership, next_generation)
        self._needed = NeededMembers(self._history)
        self._closed = ClosedCommunicators()
        self._early = EarlyNotices()
        self._open: dict[GenerationKey, OpenedGeneration] = {}  # oldest first
        self._superseded: dict[GenerationKey, SupersededGeneration] = {}  # until Released
        self._builds: dict[BuildId, Build] = {}
        self._next_build = FIRST_BUILD
        self._must_ask = False  # this event may require a renewal
        self._due: float | None = None
        self._due_is_old = True  # owners ask more often than the state changes

    # ------------------------------------------------------------ queries

    @property
    def world(self) -> Membership:
        return self._history.world

    def generations(self) -> list[GenerationKey]:
        """Open generations, oldest first."""
        return list(self._open)

    def membership(self, key: GenerationKey) -> Membership | None:
        """Of an open generation."""
        return self._open[key].membership if key in self._open else None

    def outcome(self, key: GenerationKey) -> Outcome | None:
        """Of an open generation."""
        return self._open[key].outcome if key in self._open else None

    def stalled(self) -> list[tuple[GenerationKey, frozenset[NodeId]]]:
        """Open generations without a quorum or a successor in time, and their members."""
        return [
            (key, each.nodes)
            for key, each in self._open.items()
            if isinstance(each.outcome, QuorumLost | RecoveryTimedOut)
        ]

    def is_concerned(self, key: GenerationKey) -> bool:
        """It has a successor, or a decided change gives it one that is not given up."""
        each = self._open.get(key)
        if each is None:
            return key in self._superseded
        return each.target is not None and not each.is_given_up

    def is_closed(self, key: GenerationKey) -> bool:
        """This node's user closed it before it had a successor."""
        return key not in self._open and key not in self._superseded

    def is_closed_by_member(self, key: GenerationKey) -> bool:
        """A current member of the world closed it, so that its successor cannot contain that member."""
        each = self._open.get(key)
        return each is not None and closer_in(self.world, each) is not None

    def builds(self) -> list[BuildId]:
        """Unfinished builds, first generations included."""
        return list(self._builds)

    def missing(self, key: GenerationKey) -> tuple[Rank, ...]:
        """Ranks of the members that its last failed build missed."""
        each = self._open.get(key)
        if each is None or each.failed is None:
            return ()
        return ranks_of(each.membership, each.failed.missing)

    def following(self, communicator: int, membership: Membership) -> Membership | None:
        """The next generation; None if no change concerns this one."""
        return self._history.following(communicator, membership)

    def gone_from(self, membership: Membership) -> dict[NodeId, str]:
        """Its members that left the world, and why."""
        return self._history.gone_from(membership)

    def remembered(self) -> tuple[int, int, int]:
        """Changes, closed communicators and early notices. Each has a bound."""
        return len(self._history), len(self._closed), len(self._early)

    def due(self, now: float) -> float | None:
        """When a failed build requests a renewal or is given up, or a build without a parent is aborted."""
        if self._due_is_old:
            self._due, self._due_is_old = self._find_due(), False
        return None if self._due is None else max(now, self._due)

    def _find_due(self) -> float | None:
        if self.terminated is not None:
            return None
        ends = [end for each in self._open.values() if each.failed is not None and (end := each.due) is not None]
        ends += [build.abort_at for build in self._builds.values() if build.abort_at is not None and not build.aborted]
        return min(ends) if ends else None

    # ------------------------------------------------------------ events

    def step(self, event: SuccessorInput, now: float) -> list[SuccessorAction]:
        """Returns the actions, in order. No other method changes the state."""
        self._due_is_old = True
        actions = self._handle(event, now)
        actions += self._abort_orphans(now)
        actions += self._schedule(now)
        if isinstance(event, MembershipDecided):  # after the builds, which must not wait for them
            actions += self._closing_notices(event.change)
        if self._must_ask:
            self._must_ask = False
            actions += self._ask_renewal()
        return actions

    def _handle(self, event: SuccessorInput, now: float) -> list[SuccessorAction]:  # noqa: C901, PLR0911 - one line for each event
        match event:
            case MembershipDecided(change):
                return self._decided(change)
            case NoProgress():
                return self._stalled(event)
            case BeginRequested():
                return self._begin(event, now)
            case BuildFinished(build, completed):
                return self._finished(build, completed)
            case BuildFailed(build, failure):
                return self._build_failed(build, failure, now)
            case MemberNeeded():
                return self._member_needed(event)
            case LocalClose(key):
                return self._close(key)
            case RevokeRequested(key, reason):
                return self._revoke_requested(key, reason)
            case RevokeReceived():
                return self._notice_received(event)
            case Released(key):
                self._superseded.pop(key, None)
                return []
            case Terminate(cause):
                return self._terminate(cause)
            case Tick():
                return []

    # ------------------------------------------------------------ changes of the world

    def _decided(self, change: Change) -> list[SuccessorAction]:
        after = self._apply(change, self.world)
        self._history.add(change, after)
        self._must_ask = True
        actions: list[SuccessorAction] = [*self._interrupt_concerned(change), AdoptMembership(change, after)]
        actions += [DropPeer(departure.node, departure.cause) for departure in change.left]
        actions += self._report_departures(change)
        return actions + self._abort_builds(change)

    def _interrupt_concerned(self, change: Change) -> list[SuccessorAction]:
        actions: list[SuccessorAction] = []
        for each in self._open.values():
            if change.concerns(each.key.communicator, each.nodes):
                each.target = self._history.following(each.key.communicator, each.membership) or each.target
                if each.target is not None:
                    actions += interrupt(each)
        return actions

    def _report_departures(self, change: Change) -> list[SuccessorAction]:
        quiet = [departure for departure in change.left if departure.quiet]
        return [
            ReportDeparture(key, departure.node, foreign_lines(departure.cause))
            for key, each in self._open.items()
            for departure in quiet
            if departure.node in each.nodes
        ]

    def _abort_builds(self, change: Change) -> list[SuccessorAction]:
        """End builds that this change concerns or that it takes a member from: no other member continues them."""
        actions: list[SuccessorAction] = []
        for number, build in self._builds.items():
            if change.concerns(build.communicator, build.nodes) or not change.gone.isdisjoint(build.nodes):
                actions += abort(number, build, self._reason_against(build.communicator, build.membership))
        return actions

    def _reason_against(self, communicator: int, membership: Membership) -> BuildFailure | None:
        """Why this generation cannot be built now; None if it can."""
        if self._history.following(communicator, membership) is not None:
            return BuildFailure(BuildFailureKind.OVERTAKEN)
        loss = self._history.loss_in(membership)
        return None if loss is None else BuildFailure(BuildFailureKind.PEER_LOST, (loss[0],), loss[1])

    # ------------------------------------------------------------ no decision

    def _stalled(self, stall: NoProgress) -> list[SuccessorAction]:
        """End the generations that need an unreachable member of the world, or one that has left it."""
        if self.terminated is not None:
            return []
        needy, alive, is_member = self._needed.unmet(), frozenset(stall.alive), self.world.rank_of
        actions: list[SuccessorAction] = []
        for each in self._open.values():
            absent = any(is_member(node) is not None for node in each.nodes - alive)
            if absent or each.key.communicator in needy:
                actions += [*interrupt(each), *set_outcome(each, stall_outcome(each.membership, stall))]
        return actions

    # ------------------------------------------------------------ needed members

    def _member_needed(self, event: MemberNeeded) -> list[SuccessorAction]:
        if self.terminated is not None:
            return []
        membership = event.membership or self.membership(event.key)
        return self._need(event.key.communicator, membership, event.node, event.cause)

    def _need(
        self, communicator: int, membership: Membership | None, node: NodeId, cause: str
    ) -> list[SuccessorAction]:
        if membership is not None:
            self._needed.add(communicator, membership, node)
        self._must_ask = True
        return [Investigate(node, cause)]

    def _ask_renewal(self) -> list[SuccessorAction]:
        unmet = () if self.terminated is not None else self._needed.unmet()
        return [RequestRenewal(unmet, self.world.epoch)] if unmet else []

    # ------------------------------------------------------------ builds

    def _begin(self, event: BeginRequested, now: float) -> list[SuccessorAction]:
        against = self._reason_against(event.communicator, event.membership)
        if event.parent is not None and self._has_ended(event.parent):
            against = against or BuildFailure(BuildFailureKind.OVERTAKEN)
        if self.terminated is not None:
            against = BuildFailure(BuildFailureKind.REJECTED)
        if against is not None:
            return [RejectBegin(event.build, against)]
        until = now + self._recovery_timeout
        self._builds[event.build] = Build(
            event.communicator, event.membership, nodes_of(event.membership), None, until, parent=event.parent
        )
        return [StartBuild(event.build, event.communicator, event.membership, None)]

    def _has_ended(self, key: GenerationKey) -> bool:
        each = self._open.get(key)
        return each is None or each.interrupted

    def _abort_orphans(self, now: float) -> list[SuccessorAction]:
        actions: list[SuccessorAction] = []
        for number, build in self._builds.items():
            if build.parent is not None and build.abort_at is None and self._has_ended(build.parent):
                build.abort_at = now + self._patience
            if build.abort_at is not None and now >= build.abort_at:
                actions += abort(number, build, BuildFailure(BuildFailureKind.OVERTAKEN))
        return actions

    def _schedule(self, now: float) -> list[SuccessorAction]:
        """Start or give up successors, lowest keys first."""
        if self.terminated is not None:
            return []
        waiting = [each for each in self._open.values() if each.target is not None and each.build is None]
        if not waiting:
            return []
        actions: list[SuccessorAction] = []
        for each in sorted(waiting, key=lambda each: each.key):
            assert each.target is not None
            actions += self._attempt(each, each.target, now)
        return actions

    def _attempt(self, each: OpenedGeneration, target: Membership, now: float) -> list[SuccessorAction]:
        if each.is_given_up:
            return []
        closer = closer_in(target, each)
        if closer is not None:
            each.failed = FailedBuild(target.epoch, None)
            return set_outcome(each, closer)
        if each.gives_up_at is not None:
            return self._give_up(each, target) if now >= each.gives_up_at else self._renew(each, target, now)
        if sum(build.old is not None for build in self._builds.values()) >= MAX_BUILDS:
            return []
        return self._start_successor(each, target, now)

    def _give_up(self, each: OpenedGeneration, target: Membership) -> list[SuccessorAction]:
        missing = () if each.failed is None else each.failed.missing
        each.failed = FailedBuild(target.epoch, None, missing)
        return set_outcome(each, RecoveryTimedOut(ranks_of(each.membership, missing)))

    def _renew(self, each: OpenedGeneration, target: Membership, now: float) -> list[SuccessorAction]:
        """Request a renewal if it is time, again and again: every change drops the request."""
        failed = each.failed
        if failed is None or failed.until is None or failed.renew_at is None or now < failed.renew_at:
            return []
        each.failed = failed._replace(renew_at=now + self._patience)
        each.renewal = Renewal(nodes_of(target), failed.until)
        return [RequestRenewal((each.key.communicator,), self.world.epoch)]

    def _start_successor(self, each: OpenedGeneration, target: Membership, now: float) -> list[SuccessorAction]:
        loss = self._history.loss_in(target)
        if loss is not None:  # it left quietly after the change that made this target
            each.failed = FailedBuild(target.epoch, now + self._recovery_timeout, (loss[0],))
            return self._need(each.key.communicator, target, *loss)
        number, self._next_build = self._next_build, self._next_build + 1
        each.build, each.failed = number, None
        if each.renewal is not None and each.renewal.nodes != nodes_of(target):
            each.renewal = None
        until = now + self._recovery_timeout
        if each.renewal is not None and now < each.renewal.until:
            until = each.renewal.until
        old = ClosedCommunicator(each.key.communicator, each.membership)
        self._builds[number] = Build(each.key.communicator, target, nodes_of(target), old, until)
        return [StartBuild(number, each.key.communicator, target, each.key, until)]

    def _build_failed(self, number: BuildId, failure: BuildFailure, now: float) -> list[SuccessorAction]:
        build = self._builds.pop(number, None)
        if build is None:
            return []
        failure = self._actual_failure(build, failure)
        if build.old is None:
            return [RejectBegin(number, failure)]
        each = self._open.get(build.old.key)
        if each is None:  # its user closed it: the others must not wait for this node
            return self._closing_notice(build.old)
        each.build = None
        # A renewal after the target was given up is the last chance. Otherwise members whose links are cut would renew
        # without end, and each renewal, a new epoch, would drop the disputes that remove one of them.
        until = build.until if each.renewal is None else min(build.until, each.renewal.until)
        each.failed = FailedBuild(build.membership.epoch, until, self._missed(build.membership, failure.nodes))
        if failure.kind is BuildFailureKind.PEER_LOST and failure.nodes:
            each.failed = each.failed._replace(renew_at=now + self._patience)
            return self._need(build.communicator, build.membership, failure.nodes[0], failure.cause)
        return []

    def _actual_failure(self, build: Build, failure: BuildFailure) -> BuildFailure:
        """The reason that this node knows is better than the error in which it showed."""
        if self.terminated is not None:
            return BuildFailure(BuildFailureKind.REJECTED)
        if self._history.following(build.communicator, build.membership) is not None:
            return BuildFailure(BuildFailureKind.OVERTAKEN)
        return build.aborted or failure

    def _missed(self, target: Membership, nodes: Iterable[NodeId]) -> tuple[NodeId, ...]:
        """These members; all others if none of them is named."""
        named = frozenset(nodes)
        others = tuple(member.node for member in target.members if member.node != self.me)
        return tuple(node for node in others if node in named) or others

    def _finished(self, number: BuildId, completed: int | None) -> list[SuccessorAction]:
        build = self._builds.pop(number, None)
        if build is None:
            return []
        if build.old is None:
            return self._open_first(number, build)
        old = self._open.get(build.old.key)
        if old is None:  # its user closed it
            self._closed.add(build.communicator, build.membership)
            return [DiscardBuild(number)]
        old.build = None
        if self.terminated is not None or closer_in(build.membership, old) is not None:
            return [DiscardBuild(number)]
        return self._hand_over(number, build, old, completed)

    def _open_first(self, number: BuildId, build: Build) -> list[SuccessorAction]:
        end = self.terminated
        if end is not None and end.kind is TerminationKind.CLOSED:
            return [DiscardBuild(number)]
        if end is None and build.aborted is not None and self._is_abandoned(build):
            self._closed.add(build.communicator, build.membership)  # members that opened it do not wait for this one
            return [DiscardBuild(number), RejectBegin(number, build.aborted)]
        made, actions = self._list(number, build, ())
        return actions if end is None else [*actions, *interrupt(made), *set_outcome(made, end)]

    def _is_abandoned(self, build: Build) -> bool:
        """Whether other members may have ended this first build without a successor. A joiner takes part in the next
        generation of the world in any case.
        """
        return build.communicator != WORLD and self._history.following(build.communicator, build.membership) is None

    def _list(
        self, number: BuildId, build: Build, ancestors: tuple[GenerationKey, ...]
    ) -> tuple[OpenedGeneration, list[SuccessorAction]]:
        """Open a built generation. Notices about it count before it is used, and so does a change during its build."""
        key, old = GenerationKey(build.communicator, build.membership.epoch), build.old
        target = self._history.following(build.communicator, build.membership)
        made = self._open[key] = OpenedGeneration(key, build.membership, build.nodes, ancestors, target)
        actions: list[SuccessorAction] = [OpenGeneration(number, key, None if old is None else old.key)]
        if self.terminated is None:
            actions += [action for notice in self._early.take(key) for action in self._follow(made, notice)]
        return made, actions if target is None else [*actions, *interrupt(made)]

    # ------------------------------------------------------------ hand-over

    def _hand_over(
        self, number: BuildId, build: Build, old: OpenedGeneration, completed: int | None
    ) -> list[SuccessorAction]:
        """Every ancestor leads to the newest successor. The outcome of the old generation comes last."""
        del self._open[old.key]
        self._superseded[old.key] = SupersededGeneration(old.membership, completed)
        ancestors = (old.key, *(key for key in old.ancestors if key in self._superseded))
        made, actions = self._list(number, build, ancestors)
        changes = self._history.between(old.key.epoch, made.key.epoch)
        for key in reversed(ancestors):
            outcome = supersede(self._superseded[key], made.key, made.membership, changes)
            actions.append(SetOutcome(key, outcome))
        return actions

    # ------------------------------------------------------------ closing

    def _close(self, key: GenerationKey) -> list[SuccessorAction]:
        each = self._open.pop(key, None)
        if each is None:
            return []
        self._needed.forget(key.communicator)
        self._closed.add(key.communicator, each.membership)
        # While this node builds the successor, the others are told only if that fails. With an outcome they may wait.
        is_making = each.build is not None and each.outcome is None
        if each.target is None or is_making:
            return [CloseGeneration(key)]
        return [CloseGeneration(key), *self._closing_notice(ClosedCommunicator(key.communicator, each.membership))]

    def _closing_notices(self, change: Change) -> list[SuccessorAction]:
        """Of closed communicators that get a successor by this change."""
        return [notice for each in self._closed.concerned(change) for notice in self._closing_notice(each)]

    def _closing_notice(self, closed: ClosedCommunicator) -> list[SuccessorAction]:
        rank = closed.membership.rank_of(self.me)
        if rank is None or self.terminated is not None:
            return []
        return self._send(closed.membership, SendNotice((), closed.key, rank, "it has closed it", closed=True))

    def _send(self, membership: Membership, notice: SendNotice) -> list[SuccessorAction]:
        """To all other members that are still in the world, also those without a link: they may wait too."""
        others = (member.node for member in membership.members if member.node != self.me)
        nodes = tuple(node for node in others if self.world.rank_of(node) is not None)
        return [SendNotice(nodes, notice.key, notice.rank, notice.reason, notice.closed)] if nodes else []

    def _closed_by(self, each: OpenedGeneration, node: NodeId) -> list[SuccessorAction]:
        """A member closed it: end builds of this communicator that wait for that member."""
        each.closed_by.add(node)
        overtaken = BuildFailure(BuildFailureKind.OVERTAKEN)
        return [
            action
            for number, build in self._builds.items()
            if build.communicator == each.key.communicator and node in build.nodes
            for action in abort(number, build, overtaken)
        ]

    # ------------------------------------------------------------ revocation

    def _revoke_requested(self, key: GenerationKey, reason: str) -> list[SuccessorAction]:
        each = self._open.get(key)
        if each is None:
            return []
        rank = each.membership.rank_of(self.me)
        assert rank is not None  # only members open a generation
        return self._revoke(each, rank, sendable(reason))

    def _revoke(self, each: OpenedGeneration, rank: Rank, reason: str, forwarded_by: str = "") -> list[SuccessorAction]:
        """Forwarded once: the revoking rank may have no link to each member."""
        outcome = set_outcome(each, RevokedBy(rank, reason + forwarded_by))
        if not outcome:
            return []
        notice = SendNotice((), each.key, rank, reason[:MAX_CAUSE_CHARACTERS], closed=False)
        return [*outcome, *interrupt(each), *self._send(each.membership, notice)]

    def _notice_received(self, notice: RevokeReceived) -> list[SuccessorAction]:
        if self.terminated is not None:
            return []
        each = self._open_of(notice.key.communicator) if notice.closed else self._open.get(notice.key)
        if each is not None:
            return self._follow(each, notice)
        if not self._is_over(notice.key):
            self._early.add(notice)
        return []

    def _open_of(self, communicator: int) -> OpenedGeneration | None:
        """Its newest generation: all others have successors."""
        return next((each for key, each in self._open.items() if key.communicator == communicator), None)

    def _is_over(self, key: GenerationKey) -> bool:
        """This node had this generation or a newer one, so it never opens this one."""
        newest = (each for each in (*self._open, *self._superseded) if each.communicator == key.communicator)
        return self._closed.is_closed(key) or any(key.epoch <= each.epoch for each in newest)

    def _follow(self, each: OpenedGeneration, notice: RevokeReceived) -> list[SuccessorAction]:
        """It counts only from a member, a closing notice only about the sender, and none in this node's name.

        A member announces only the close of the newest generation that it had or built, and takes part in no other
        afterwards. That may be older or newer than the one here: a build can end on some members only.
        """
        sender, size = each.membership.rank_of(notice.sender), each.membership.size
        if sender is None or notice.sender == self.me:
            return []
        if notice.closed:
            return self._closed_by(each, notice.sender) if self._names_sender(each, notice) else []
        if not 0 <= notice.rank < size or notice.rank == each.membership.rank_of(self.me):
            return []
        forwarded_by = "" if notice.rank == sender else f" (as rank {sender} passed on)"
        return self._revoke(each, notice.rank, foreign_line(notice.reason), forwarded_by)

    def _names_sender(self, each: OpenedGeneration, notice: RevokeReceived) -> bool:
        """Whether the rank is the sender's. It is not known in a generation that this node does not have."""
        named = each if notice.key == each.key else self._superseded.get(notice.key)
        return named is None or named.membership.rank_of(notice.sender) == notice.rank

    # ------------------------------------------------------------ the end

    def _terminate(self, cause: Terminated) -> list[SuccessorAction]:
        """The first cause counts. A node that its user closes frees its generations at once: nothing to interrupt."""
        if self.terminated is not None:
            return []
        self.terminated = cause
        actions: list[SuccessorAction] = []
        for each in self._open.values():
            actions += [] if cause.kind is TerminationKind.CLOSED else interrupt(each)
            actions += set_outcome(each, cause)
        rejected = BuildFailure(BuildFailureKind.REJECTED)
        return actions + [action for number, build in self._builds.items() for action in abort(number, build, rejected)]
