"""The generations of one node: puts events of users and builds, and performs actions on generations.

SuccessorMachine decides. MachineRunner orders its events and actions, and its lock guards the state here. No generation
is used before it is open here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary, finalize

from nexar.cluster.decisions.completion import CompletedCalls, completed_by_all
from nexar.cluster.decisions.node_machine import NodeAction
from nexar.cluster.decisions.successor_events import (
    AbortBuild,
    BeginRequested,
    BuildFailed,
    BuildFailure,
    BuildFailureKind,
    BuildFinished,
    BuildId,
    CloseGeneration,
    DiscardBuild,
    DropPeer,
    GenerationAction,
    GenerationKey,
    Interrupt,
    LocalClose,
    MemberNeeded,
    OpenGeneration,
    Outcome,
    RejectBegin,
    Released,
    ReportDeparture,
    SetOutcome,
    StartBuild,
    Superseded,
    Terminate,
    Terminated,
    TerminationKind,
)
from nexar.cluster.machine_runner import MachineRunner
from nexar.cluster.membership import Membership
from nexar.communicator.events import FailureEvent
from nexar.communicator.generation import Generation, GenerationOutcome
from nexar.communicator.generation_builder import GenerationBuilder
from nexar.communicator.outcome_errors import (
    LocalRank,
    build_overtaken,
    error_of,
    error_of_failure,
    failure_of,
    in_ranks_of,
    member_of,
    termination_error,
)
from nexar.errors import LinkClosed, NexarError, OperationTimeout, PeerLost, Revoked, UsageError
from nexar.group import Group
from nexar.links.progress import NODE_CLOSED
from nexar.types import NodeId, Rank

if TYPE_CHECKING:
    from nexar.communicator.communicator import Communicator  # which imports this module

_log = logging.getLogger(__name__)

_ABORT_TIMEOUT: Final = 5.0  # seconds; aborted builds end at once, unless a fault has ended the driving of this node


@dataclass(slots=True, eq=False)
class _Build:
    """A build at this node. The runner's lock guards it."""

    communicator: int
    membership: Membership
    old: Generation | None = None
    may_start: bool = False
    group: Group | None = None  # while members are waited for
    aborted: BuildFailure | None = None
    made: Generation | None = None
    is_open: bool = False


@dataclass(slots=True, eq=False)
class _HandOver:
    """Only the performing thread uses it."""

    old: Generation
    new: Generation
    communicator: Communicator | None = None  # the user's, made when the first outcome is set


class Successors:
    """Makes this node's successors as the machine decides. Any thread, except `perform`. Close before the mesh."""

    def __init__(
        self,
        builder: GenerationBuilder,
        runner: MachineRunner,
        *,
        wrap: Callable[[Generation], Communicator],
        opened: Callable[[Generation], None],
        report_unreachable: Callable[[NodeId, str], None],
    ) -> None:
        """`wrap` makes the user's communicator of a generation. `opened` is called with each generation before its use,
        `report_unreachable` when a call needs an unreachable member. None of them may block.
        """
        self._builder = builder
        self._config = builder.config
        self.wrap: Final = wrap
        self._opened = opened
        self._report_unreachable = report_unreachable
        self._runner = runner
        self._machine = runner.machine.successor_machine  # for queries, under the lock
        self._changed = runner.changed  # guards everything below
        self._hand_over: _HandOver | None = None  # from opening the successor to the outcome of the old one
        self._numbers = count(1)
        self._building: dict[BuildId, _Build] = {}
        self._in_background: set[_Build] = set()  # successors that are being built
        self._generations: dict[GenerationKey, Generation] = {}  # without a successor, oldest first
        # Superseded and closed ones too, while they are referenced.
        self._known: WeakValueDictionary[GenerationKey, Generation] = WeakValueDictionary()

    # -- actions -----------------------------------------------------------------------------------------------

    def perform(self, action: GenerationAction) -> None:
        """Called by the performing thread. Never blocks."""
        match action:
            case Interrupt(key):
                self._interrupt(key)
            case DropPeer(node, cause):
                self._builder.lose(node, cause)
            case ReportDeparture(key, node, cause):
                self._report_departure(key, node, cause)
            case AbortBuild(build, failure):
                self._abort(build, failure)
            case StartBuild():
                self._start(action)
            case OpenGeneration():
                self._open(action)
            case CloseGeneration(key):
                self._close_generation(key)
            case DiscardBuild(build) | RejectBegin(build):  # the thread that asked for it knows
                with self._changed:
                    self._building.pop(build, None)
            case SetOutcome(key, outcome):
                self._set_outcome(key, outcome)

    def _interrupt(self, key: GenerationKey) -> None:
        with self._changed:
            generation = self._known.get(key)
        if generation is not None and not generation.interrupted:
            error = generation.outcome.error
            generation.interrupt(error if isinstance(error, Revoked) else None)

    def _report_departure(self, key: GenerationKey, node: NodeId, cause: str) -> None:
        with self._changed:
            generation = self._generations.get(key)
        rank = None if generation is None else generation.membership.rank_of(node)
        if generation is not None and rank is not None:
            generation.failures.publish(FailureEvent(rank, node, cause, "left", key.epoch))

    # -- called by the user's threads ------------------------------------------------------------------------

    def begin(
        self,
        membership: Membership,
        communicator: int,
        deadline: float,
        *,
        completed: CompletedCalls | None = None,
        parent: Generation | None = None,
    ) -> Generation:
        """Build and return a communicator's first generation here. `completed`: this node's progress, if other members
        had an earlier generation. `parent`: of a split or group. Blocks until it is open. Raises PeerLost,
        OperationTimeout, LinkClosed if a change came first or the node is closed, UsageError if the node was closed
        during the build, or the error that ended all communicators.
        """
        number, build = next(self._numbers), _Build(communicator, membership)
        with self._changed:
            self._building[number] = build
        of = None if parent is None else _key(parent)
        rejected = _rejection(self._runner.put(BeginRequested(number, communicator, membership, of)))
        if rejected is not None:
            raise self._begin_error(build, rejected)
        try:
            self._wait(lambda: build.may_start, deadline)  # then the build raises the timeout
            made, _ = self._make(build, deadline, completed)
            self._opened(made)
        except BaseException as error:
            rejected = _rejection(self._runner.put(BuildFailed(number, failure_of(error))))
            actual = self._begin_error(build, rejected, error) if rejected is not None else error
            if actual is error:
                raise
            raise actual from error
        with self._changed:
            build.made = made
        actions = self._runner.put(BuildFinished(number))
        if DiscardBuild(number) in actions:
            made.leave()  # a member that opened it must not wait for this one
            made.end()
            rejected = _rejection(actions)
            raise UsageError(NODE_CLOSED) if rejected is None else self._begin_error(build, rejected)
        self._wait(lambda: build.is_open)
        return made

    def _begin_error(self, build: _Build, failure: BuildFailure, error: BaseException | None = None) -> BaseException:
        """Return the reason that this node knows, else `error`."""
        if error is not None and not isinstance(error, NexarError):
            return error
        if failure.kind is BuildFailureKind.REJECTED:
            rank = build.membership.rank_of(self._builder.me)
            assert rank is not None
            return self._ended(LocalRank(rank, build.membership)) or build_overtaken()
        if failure.kind is BuildFailureKind.OVERTAKEN and not isinstance(error, LinkClosed):
            return build_overtaken()
        return error or error_of_failure(failure, build.membership)

    def forget(self, generation: Generation) -> None:
        """The user closed it. Tells the members that make its successor; while this node builds one, only if that
        build fails.
        """
        key = _key(generation)
        if CloseGeneration(key) in self._runner.put(LocalClose(key)):
            generation.end()
        else:
            generation.close()  # its successor has the event feeds

    def find(self, communicator: int, generation: int) -> Generation | None:
        with self._changed:
            return self._generations.get(GenerationKey(communicator, generation))

    def generations(self) -> list[Generation]:
        with self._changed:
            return list(self._generations.values())

    def wait_for_successor(self, generation: Generation, deadline: float) -> Communicator | None:
        """Block. Return None after a timeout, or if a member closed the generation. Raises the error that ended all
        communicators, and UsageError if this node closed this one.
        """
        key, machine = _key(generation), self._machine
        self._wait(
            lambda: (
                generation.is_superseded
                or self._is_blocked_by_close(generation)
                or machine.terminated is not None
                or machine.is_closed(key)
            ),
            deadline,
        )
        with self._changed:
            terminated, is_closed = machine.terminated, machine.is_closed(key)
        if generation.successor is None and terminated is not None:
            raise termination_error(terminated, LocalRank(generation.group.rank, generation.membership), self._config)
        if generation.successor is None and is_closed:
            raise UsageError("this communicator is closed, so it has no successor here")
        return generation.successor

    def wait_for_following(self, communicator: int, membership: Membership, deadline: float) -> Membership | None:
        """Block. None: no change that concerns it was chosen in time."""
        machine = self._machine
        self._wait(
            lambda: machine.following(communicator, membership) is not None or machine.terminated is not None, deadline
        )
        with self._changed:
            return None if machine.terminated is not None else machine.following(communicator, membership)

    def _wait(self, is_done: Callable[[], bool], deadline: float | None = None) -> None:
        with self._changed:
            self._changed.wait_for(is_done, None if deadline is None else max(0.0, deadline - time.monotonic()))

    def is_concerned(self, generation: Generation) -> bool:
        """Whether it has a successor, or a chosen change gives it one that was not abandoned."""
        with self._changed:
            return self._machine.is_concerned(_key(generation))

    def is_blocked_by_close(self, generation: Generation) -> bool:
        """Whether calls on it raise that a current member of the world closed it."""
        with self._changed:
            return self._is_blocked_by_close(generation)

    def _is_blocked_by_close(self, generation: Generation) -> bool:
        """Under the lock."""
        return generation.is_blocked_by_close and self._machine.is_closed_by_member(_key(generation))

    def missing(self, generation: Generation) -> tuple[Rank, ...]:
        """Ranks that the successor's last failed build missed."""
        with self._changed:
            return self._machine.missing(_key(generation))

    def gone_from(self, generation: Generation) -> dict[NodeId, str]:
        """Former members of the world, and why they left."""
        with self._changed:
            return self._machine.gone_from(generation.membership)

    def need(self, communicator: int, membership: Membership, node: NodeId, cause: str) -> None:
        """Report an unreachable member of a generation that this node could not build. If it is lost, the others agree
        on that; if it left the world, the communicator gets a successor without it. Never blocks.
        """
        self._runner.put(MemberNeeded(GenerationKey(communicator, membership.epoch), node, cause, membership))

    def ended(self, group: Group) -> NexarError | None:
        """The error that ended all communicators, as `group` raises it; None: not ended, or closed."""
        return self._ended(LocalRank(group.rank, group.membership))

    def _ended(self, place: LocalRank) -> NexarError | None:
        with self._changed:
            cause = self._machine.terminated
        if cause is None or cause.kind is TerminationKind.CLOSED:
            return None
        return termination_error(cause, place, self._config)

    # -- builds ------------------------------------------------------------------------------------------------

    def _start(self, action: StartBuild) -> None:
        """The requesting thread builds a first generation, the driver a successor."""
        with self._changed:
            if action.old is None:
                self._building[action.build].may_start = True
                return
            old = self._known.get(action.old)
            build = _Build(action.communicator, action.membership, old)
            self._building[action.build] = build
            self._in_background.add(build)
        if old is None:  # closed meanwhile and garbage-collected
            self._failed(action.build, build, build_overtaken())
        else:
            self._start_successor(action, build, old)

    def _start_successor(self, action: StartBuild, build: _Build, old: Generation) -> None:
        assert action.until is not None
        number = action.build
        try:
            self._builder.start(
                build.membership,
                build.communicator,
                CompletedCalls(old.membership.epoch, old.context.call_log.completed),
                timeout=max(0.0, action.until - time.monotonic()),
                begun=partial(self._began, build),
                finished=partial(self._finished, number, build, old),
                failed=partial(self._failed, number, build),
            )
        except Exception as error:  # noqa: BLE001 - reported like a build that fails later
            self._failed(number, build, error)

    def _finished(self, number: BuildId, build: _Build, old: Generation, made: Generation, least: int) -> None:
        made.inherit(old)
        self._opened(made)
        with self._changed:
            build.made, build.group = made, None  # a late abort must not close what is built
        if DiscardBuild(number) in self._runner.put(BuildFinished(number, completed_by_all(least))):
            made.leave()  # a member that opened it must not wait for this one
            made.close()  # not `end`, which may block: the old generation has the same event feeds, and closes them
        self._ended_in_background(build)

    def _failed(self, number: BuildId, build: _Build, error: BaseException) -> None:
        """Also reports bugs of nexar: a build must not be retried for ever."""
        if not isinstance(error, NexarError):
            _log.error("no successor of communicator %d", build.communicator, exc_info=error)
        _log.info("no successor yet of communicator %d: %s", build.communicator, error)
        with self._changed:
            self._building.pop(number, None)
        self._runner.put(BuildFailed(number, failure_of(error)))
        self._ended_in_background(build)

    def _ended_in_background(self, build: _Build) -> None:
        with self._changed:
            self._in_background.discard(build)
            self._changed.notify_all()

    def _make(self, build: _Build, deadline: float, completed: CompletedCalls | None) -> tuple[Generation, int]:
        """Runs in this thread. Ends early if the build is aborted."""
        try:
            return self._builder.make(
                build.membership, build.communicator, deadline, completed, partial(self._began, build)
            )
        finally:
            with self._changed:
                build.group = None  # a late abort must not close what is built

    def _began(self, build: _Build, group: Group) -> None:
        """Closes an aborted build's group: members that know of the abort do not take part."""
        with self._changed:
            build.group, aborted = group, build.aborted
        if aborted is not None:
            group.close(error_of_failure(aborted, build.membership))

    def _abort(self, number: BuildId, failure: BuildFailure) -> None:
        with self._changed:
            build = self._building.get(number)
            if build is None:
                return
            build.aborted, group = failure, build.group
        if group is not None:
            group.close(error_of_failure(failure, build.membership))

    def _open(self, action: OpenGeneration) -> None:
        """Replaces the old generation atomically."""
        with self._changed:
            build = self._building.pop(action.build)
            assert build.made is not None
            if action.old is not None:
                self._generations.pop(action.old, None)
            self._generations[action.key] = self._known[action.key] = build.made
            build.is_open = True
            self._hand_over = None if build.old is None else _HandOver(build.old, build.made)
        finalize(build.made, self._runner.put_later, Released(action.key)).atexit = False

    def _close_generation(self, key: GenerationKey) -> None:
        """Calls of other threads that wait for its outcome end as pending ones do."""
        with self._changed:
            generation = self._generations.pop(key, None)
        if generation is not None and not generation.outcome.done:
            generation.outcome.resolve(generation.group.closed_error())

    # -- outcomes ----------------------------------------------------------------------------------------------

    def _set_outcome(self, key: GenerationKey, outcome: Outcome) -> None:
        with self._changed:
            generation, hand_over = self._known.get(key), self._hand_over
        if generation is None:
            return
        if not isinstance(outcome, Superseded):
            generation.outcome.resolve(error_of(outcome, generation, self._config))
            return
        assert hand_over is not None
        if hand_over.communicator is None:
            hand_over.communicator = self.wrap(hand_over.new)
        self._supersede(generation, outcome, hand_over, hand_over.communicator)
        if generation is hand_over.old:
            with self._changed:
                self._hand_over = None  # the machine sets the outcomes of its ancestors first

    def _supersede(
        self, generation: Generation, outcome: Superseded, hand_over: _HandOver, communicator: Communicator
    ) -> None:
        generation.gone, generation.agreed = dict(outcome.lost), outcome.agreed
        generation.successor = communicator
        generation.outcome.resolve(error_of(outcome, generation, self._config, successor=communicator))
        if generation is not hand_over.old:
            return  # an ancestor: it had a successor already
        generation.memberships.publish(generation.membership_event_to(hand_over.new, outcome.joined, communicator))
        generation.is_superseded = True
        generation.close_in_background(hand_over.new)

    # -- closing ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all generations; waiters raise. Blocks for aborted builds, up to 5 seconds. Idempotent."""
        self._runner.put(Terminate(Terminated(TerminationKind.CLOSED)))
        # The terminated machine starts no build and has aborted all; the driver notices that.
        self._runner.wait()
        self._wait(lambda: not self._in_background, time.monotonic() + _ABORT_TIMEOUT)
        with self._changed:
            generations = list(self._generations.values())
            self._generations.clear()
        for generation in generations:
            generation.end()

    # -- errors of calls, mapped to outcomes of their generation ------------------------------------------------

    def resolve_error(self, generation: Generation, error: BaseException) -> BaseException:
        """May block until the survivors agree (automatic policy), up to 1.5 × `recovery_timeout` plus the own delay."""
        outcome = self.outcome_to_await(generation, error)
        if outcome is None:
            return self._advised(generation, error)
        with suppress(NexarError):  # the outcome is checked below
            for deadline in self._wait_deadlines(outcome):
                with suppress(OperationTimeout):
                    generation.group.wait((outcome,), deadline)
        return copy(outcome.error) if outcome.error is not None else in_ranks_of(generation, error)

    async def resolve_awaited_error(self, generation: Generation, error: BaseException) -> BaseException:
        """As `resolve_error`, for a task: it suspends instead of blocking."""
        import asyncio  # noqa: PLC0415 - already loaded for callers that await; a cost for others

        outcome = self.outcome_to_await(generation, error)
        if outcome is None:
            return self._advised(generation, error)
        with suppress(NexarError):  # the outcome is checked below
            for deadline in self._wait_deadlines(outcome):
                with suppress(TimeoutError):
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await outcome
        return copy(outcome.error) if outcome.error is not None else in_ranks_of(generation, error)

    def _wait_deadlines(self, outcome: GenerationOutcome) -> Iterator[float]:
        """Until when a caller waits for this outcome (time.monotonic). Reads the own delay again at each deadline,
        because it also extends the machine's running deadlines.
        """
        begin = time.monotonic()
        while not outcome.done:
            deadline = begin + 1.5 * self._config.recovery_timeout + self._runner.own_delay()
            if deadline <= time.monotonic():
                return
            yield deadline

    def _advised(self, generation: Generation, error: BaseException) -> BaseException:
        node = member_of(generation, error)
        if node is None or self._config.recovery_policy != "manual":
            return in_ranks_of(generation, error)
        self._report_unreachable(node, getattr(error, "cause", "it left"))  # so that the successor lacks it
        return PeerLost(
            rank=generation.membership.rank_of(node),
            node=node,
            address=getattr(error, "address", None),
            cause=getattr(error, "cause", "it left"),
            operation=getattr(error, "operation", None),
            remedy="comm.shrink() gives the next communicator, without it",
        )

    def outcome_to_await(self, generation: Generation, error: BaseException) -> GenerationOutcome | None:
        """The outcome that the caller must await; it replaces the error. None: raise the error unchanged."""
        consequence = isinstance(error, (PeerLost, Revoked, LinkClosed))
        if not consequence or not (generation.outcome.done or self._expect_outcome(generation, error)):
            return None
        return generation.outcome

    def _expect_outcome(self, generation: Generation, error: BaseException) -> bool:
        """Whether an outcome will follow: a change has interrupted the generation, or the error names a member that the
        call needs, which this reports.
        """
        if generation.interrupted:
            return True
        node = member_of(generation, error) if self._config.recovery_policy == "automatic" else None
        if node is None:
            return False
        self._runner.put(MemberNeeded(_key(generation), node, getattr(error, "cause", "it left")))
        return True


def _key(generation: Generation) -> GenerationKey:
    return GenerationKey(generation.communicator, generation.membership.epoch)


def _rejection(actions: list[NodeAction]) -> BuildFailure | None:
    return next((action.failure for action in actions if isinstance(action, RejectBegin)), None)


class ErrorResolver:
    """Maps an operation's error to the one its communicator raises. Any thread."""

    def __init__(self, successors: Successors, generation: Generation, communicator: object) -> None:
        """Keeps `communicator` alive while one of its requests is pending: unused ones are closed."""
        self._successors = successors
        self._generation = generation
        self._communicator = communicator

    def resolve_error(self, error: BaseException) -> BaseException:
        """May block until the survivors agree."""
        return self._successors.resolve_error(self._generation, error)

    async def resolve_awaited_error(self, error: BaseException) -> BaseException:
        """As `resolve_error`, for a task: it suspends instead of blocking."""
        return await self._successors.resolve_awaited_error(self._generation, error)
