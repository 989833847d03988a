"""The generations of one simulated node: builds, calls and notices over the simulated links.

This is the shell of SuccessorMachine in the simulator. A call and a build both end only when every member took part:
in round i each rank sends to the one 2**i ranks further. Frames carry the key of their generation, and a frame of
another generation never counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from nexar.cluster.decisions.completion import (
    NEW_MEMBER,
    NONE_COMPLETED,
    CompletedCalls,
    CompletionExchange,
    CompletionNews,
    SendNews,
    completed_by_all,
)
from nexar.cluster.decisions.successor_events import (
    AbortBuild,
    BeginRequested,
    BuildFailed,
    BuildFailure,
    BuildFailureKind,
    BuildFinished,
    BuildId,
    DiscardBuild,
    DropPeer,
    GenerationKey,
    Interrupt,
    LocalClose,
    MemberNeeded,
    OpenGeneration,
    Outcome,
    RejectBegin,
    RevokedBy,
    RevokeReceived,
    SendNotice,
    SetOutcome,
    StartBuild,
    SuccessorAction,
)
from nexar.cluster.membership import WORLD, Change, Membership
from nexar.testing.simulator.world import RECOVERY_TIMEOUT, LinkFrame, SimulationContext
from nexar.types import NodeId, Rank

if TYPE_CHECKING:  # both import this module
    from nexar.testing.simulator.application import Application
    from nexar.testing.simulator.nodes import SimulatedMember

_BUILD_SECONDS: Final = 0.02  # that a first generation takes: it waits for nobody
_INQUIRY_INTERVAL: Final = 5.0
LAST_STEP: Final = -1  # of a build: it is complete, and not reported yet
_MAX_EARLY: Final = 256  # generations whose frames are kept before they are built here


class PeerLossError(NamedTuple):
    """A call failed: it needs a member that cannot be reached."""

    node: NodeId


CallResult: TypeAlias = Outcome | PeerLossError | None
"""None: the call is complete."""


class SimulatedCall:
    """One call of this node."""

    __slots__ = ("number", "step", "waits")

    def __init__(self, number: int) -> None:
        self.number = number
        self.step = 0
        self.waits = False  # for the outcome of the generation


class SimulatedGeneration:
    """One generation at one node."""

    def __init__(self, key: GenerationKey, membership: Membership, rank: Rank) -> None:
        self.key = key
        self.membership = membership
        self.rank = rank
        self.size = membership.size
        self.completed = NONE_COMPLETED
        self.agreements = 0
        """Calls of `agree()` here."""
        self.interrupted = False
        self.outcome: Outcome | None = None
        self.call: SimulatedCall | None = None
        self.closed_by: set[NodeId] = set()
        """Members whose users closed it."""
        self.lost: set[NodeId] = set()
        """Members whose link broke since it was opened: frames may be missing."""
        self.received: set[tuple[int, int]] = set()
        """Calls and steps whose frame has arrived."""

    def node(self, rank: Rank) -> NodeId:
        return self.membership.members[rank % self.size].node

    def is_broadcast(self, number: int) -> bool:
        """Whether this call is a broadcast: its root completes it before the others."""
        return (number + self.key.epoch) % 3 == 0

    def awaited(self) -> NodeId | None:
        """The member whose frame the call waits for."""
        call = self.call
        if call is None:
            return None
        return self.node(call.number if self.is_broadcast(call.number) else self.rank - (1 << call.step))

    def receivers(self) -> list[NodeId]:
        """The members to which the call sends in this step."""
        call = self.call
        if call is None:
            return []
        if self.is_broadcast(call.number):
            is_root = call.number % self.size == self.rank
            return [self.node(self.rank + each) for each in range(1, self.size)] if is_root else []
        distance = 1 << call.step
        return [self.node(self.rank + distance)] if distance < self.size else []

    def is_complete(self) -> bool:
        """Whether the call has taken all its steps."""
        call = self.call
        if call is None:
            return False
        if self.is_broadcast(call.number):
            return call.step > 0 or call.number % self.size == self.rank
        return 1 << call.step >= self.size


class _Begin(NamedTuple):
    """A first generation at this node."""

    communicator: int
    membership: Membership
    after: int | None  # the epoch of an earlier attempt, if other members may have completed calls on that


class _Build:
    """One build of this node."""

    def __init__(self, start: StartBuild, rank: Rank, exchange: CompletionExchange | None) -> None:
        self.start = start
        self.key = start.key
        self.rank = rank
        self.exchange = exchange
        self.is_over = False
        self.awaited: Rank | None = None
        self.lost: set[NodeId] = set()  # members whose link broke since it began
        self.early: list[tuple[NodeId, LinkFrame]] = []  # of calls


class Generations:
    """All generations of one node."""

    def __init__(self, world: SimulationContext, host: SimulatedMember, user: Application) -> None:
        self._world = world
        self._host = host
        self._user = user
        self._laws = world.successor_laws
        self._open: dict[GenerationKey, SimulatedGeneration] = {}
        self._builds: dict[BuildId, _Build] = {}
        self._building: dict[GenerationKey, _Build] = {}
        self._begins: dict[BuildId, _Begin] = {}
        self._early: dict[GenerationKey, list[tuple[NodeId, LinkFrame]]] = {}
        self._newest: dict[int, int] = {}  # the newest epoch opened, by communicator
        self._begun = 0
        self._closed: set[int] = set()  # communicators that the user closed
        self._quiet: frozenset[NodeId] = frozenset()  # that left with the last change

    def find(self, key: GenerationKey) -> SimulatedGeneration | None:
        return self._open.get(key)

    def open_generations(self) -> list[SimulatedGeneration]:
        return list(self._open.values())

    def adopted(self, change: Change) -> None:
        self._quiet = change.quiet

    # -- actions of the machine

    def perform(self, action: SuccessorAction) -> None:
        match action:
            case Interrupt(key):
                self._interrupt(key)
            case StartBuild():
                self._start(action)
            case AbortBuild(build, failure):
                self._fail(build, failure)
            case RejectBegin(build, failure):
                self._rejected(build, failure)
            case OpenGeneration(build, key):
                self._opened(build, key)
            case DiscardBuild(build):
                self._discard(build)
            case SetOutcome(key, outcome):
                self._set_outcome(key, outcome)
            case SendNotice():
                self._send_notice(action)
            case DropPeer(node):
                self._dropped(node)
            case _:
                return

    def _interrupt(self, key: GenerationKey) -> None:
        generation = self._open.get(key)
        if generation is not None:
            generation.interrupted = True
            self._wait_for_outcome(generation, PeerLossError(0))

    def _wait_for_outcome(self, generation: SimulatedGeneration, error: PeerLossError) -> None:
        """The call ends with the outcome, or with the error if none comes in time."""
        call = generation.call
        if call is None or call.waits:
            return
        call.waits = True
        if generation.outcome is not None:
            self._end_call(generation, generation.outcome)
            return

        def give_up() -> None:
            if generation.call is call:
                self._end_call(generation, error)

        self._host.after(1.5 * RECOVERY_TIMEOUT, give_up)

    def _set_outcome(self, key: GenerationKey, outcome: Outcome) -> None:
        generation = self._open.get(key)
        if generation is not None:
            generation.outcome = outcome
            self._end_call(generation, outcome)

    def _end_call(self, generation: SimulatedGeneration, result: CallResult) -> None:
        call, generation.call = generation.call, None
        if call is not None:
            if result is None:
                generation.completed = call.number
            self._laws.call_ended(
                self._host.node,
                generation.key,
                call.number,
                completed=result is None,
                together=not generation.is_broadcast(call.number),
                without_outcome=call.waits and isinstance(result, PeerLossError),
            )
            self._user.call_ended(generation, call.number, result)

    def _send_notice(self, notice: SendNotice) -> None:
        me = self._host.node
        event = RevokeReceived(me, notice.key, notice.rank, notice.reason, notice.closed)
        for node in notice.nodes:
            self._world.send_notice(me, node, event)

    # -- builds

    def begin(self, communicator: int, membership: Membership, *, after: int | None = None) -> None:
        """The user makes a communicator. `after`: the epoch of an earlier attempt that failed."""
        self._begun += 1
        self._begins[self._begun] = _Begin(communicator, membership, after)
        self._host.handle(BeginRequested(self._begun, communicator, membership))

    def _start(self, start: StartBuild) -> None:
        rank = start.membership.rank_of(self._host.node)
        if rank is None:
            raise ValueError(f"node {self._host.node} builds {start.key} without being a member")
        completed = self._completed(start)
        exchange = None if completed is None else CompletionExchange(rank, start.membership.size, completed)
        build = self._builds[start.build] = self._building[start.key] = _Build(start, rank, exchange)
        self._laws.build_began(self._host.node, start, completed)
        if exchange is None:
            self._host.after(_BUILD_SECONDS * self._world.random.random(), lambda: self._finish(build, None))
            return
        seconds = RECOVERY_TIMEOUT if start.until is None else start.until - self._host.now()
        self._host.after(seconds, lambda: self._time_out(build))
        self._send_rounds(build, exchange.start())
        for sender, frame in self._early.pop(build.key, []):
            self._build_frame(build, sender, frame)
        self._check_build(build)

    def _completed(self, start: StartBuild) -> CompletedCalls | None:
        """What this node tells the others: its last call; None if nobody has an earlier generation."""
        if start.old is not None:
            return CompletedCalls(start.old.epoch, self._open[start.old].completed)
        if start.communicator != WORLD:
            return None
        after = self._begins[start.build].after
        return NEW_MEMBER if after is None else CompletedCalls(after, NONE_COMPLETED)

    def _send_rounds(self, build: _Build, sends: list[SendNews]) -> None:
        for each in sends:
            node = build.start.membership.members[each.rank].node
            self._world.build_step(self._host.node, build.key, each.step)
            if build.is_over or not self._host.alive:
                return
            build.awaited = each.source
            frame = LinkFrame("build", build.key, 0, each.step, each.news)
            if not self._host.dial_again(node) or not self._world.links.send(self._host.node, node, frame):
                self._fail(build.start.build, BuildFailure(BuildFailureKind.PEER_LOST, (node,), "its link is lost"))
        if build.exchange is not None and (result := build.exchange.result) is not None:
            build.awaited = None
            self._finish(build, completed_by_all(result))

    def _build_frame(self, build: _Build, sender: NodeId, frame: LinkFrame) -> None:
        if frame.kind != "build":
            build.early.append((sender, frame))
        elif not build.is_over and build.exchange is not None:
            assert isinstance(frame.content, CompletionNews)
            self._send_rounds(build, build.exchange.received(frame.step, frame.content))

    def _check_build(self, build: _Build) -> None:
        """Fails a build that waits for a member whose link is lost."""
        awaited = self._awaited(build)
        if not build.is_over and awaited is not None and not self._host.dial_again(awaited):
            failure = BuildFailure(BuildFailureKind.PEER_LOST, (awaited,), "its link is lost")
            self._fail(build.start.build, failure)

    def _awaited(self, build: _Build) -> NodeId | None:
        return None if build.awaited is None else build.start.membership.members[build.awaited].node

    def _time_out(self, build: _Build) -> None:
        awaited = self._awaited(build)
        missing = () if awaited is None else (awaited,)
        self._fail(build.start.build, BuildFailure(BuildFailureKind.TIMED_OUT, missing, "it does not answer"))

    def _finish(self, build: _Build, completed: int | None) -> None:
        self._world.build_step(self._host.node, build.key, LAST_STEP)
        if not build.is_over and self._host.alive:
            build.is_over = True
            self._host.handle(BuildFinished(build.start.build, completed))

    def _fail(self, build_id: BuildId, failure: BuildFailure) -> None:
        build = self._builds.get(build_id)
        if build is None or build.is_over:
            return
        build.is_over = True
        self._forget_build(build)
        self._host.handle(BuildFailed(build_id, failure))

    def _rejected(self, build: BuildId, failure: BuildFailure) -> None:
        begin = self._begins.pop(build)
        self._user.begin_failed(begin.communicator, begin.membership, failure)

    def _forget_build(self, build: _Build) -> None:
        self._builds.pop(build.start.build, None)
        if self._building.get(build.key) is build:
            del self._building[build.key]

    def _opened(self, build_id: BuildId, key: GenerationKey) -> None:
        build = self._builds[build_id]
        self._forget_build(build)
        self._newest[key.communicator] = max(key.epoch, self._newest.get(key.communicator, 0))
        generation = self._open[key] = SimulatedGeneration(key, build.start.membership, build.rank)
        generation.lost |= build.lost | self._world.links.ends[self._host.node].broken
        for sender, frame in [*build.early, *self._early.pop(key, [])]:
            self._generation_frame(generation, sender, frame)
        self._user.opened(generation)

    def _discard(self, build_id: BuildId) -> None:
        """Other members may use the generation: they must not wait for this node."""
        build = self._builds[build_id]
        self._forget_build(build)
        self._leave(build.key, build.start.membership)

    def _leave(self, key: GenerationKey, membership: Membership) -> None:
        """Tells the other members, after what was sent before, that this node takes no part."""
        for member in membership.members:
            if member.node != self._host.node:
                self._world.links.send(self._host.node, member.node, LinkFrame("closed", key))

    # -- frames

    def frame_received(self, sender: NodeId, frame: LinkFrame) -> None:
        key = frame.key
        if frame.kind == "question":
            if key.communicator in self._closed:
                self._world.links.send(self._host.node, sender, LinkFrame("closed", key))
            return
        generation = self._open.get(key)
        if generation is not None:
            self._generation_frame(generation, sender, frame)
        elif (build := self._building.get(key)) is not None:
            self._build_frame(build, sender, frame)
            self._check_build(build)
        elif key.epoch > self._newest.get(key.communicator, 0):
            self._early.setdefault(key, []).append((sender, frame))
            if len(self._early) > _MAX_EARLY:
                del self._early[next(iter(self._early))]

    def _generation_frame(self, generation: SimulatedGeneration, sender: NodeId, frame: LinkFrame) -> None:
        if frame.kind == "call":
            generation.received.add((frame.number, frame.step))
            self._advance(generation)
        elif frame.kind == "closed":
            generation.closed_by.add(sender)
            self._check_call(generation)

    def _dropped(self, node: NodeId) -> None:
        """The node left the world. If it left quietly, its frames still arrive, and then the end of its link."""
        if node not in self._quiet:
            self._world.links.lose(self._host.node, node, "it left the world")
            self.link_ended(node)

    def link_ended(self, peer: NodeId) -> None:
        for build in list(self._builds.values()):
            build.lost.add(peer)
            if self._awaited(build) == peer:
                failure = BuildFailure(BuildFailureKind.PEER_LOST, (peer,), "its link ended")
                self._fail(build.start.build, failure)
        for generation in list(self._open.values()):
            generation.lost.add(peer)
            self._check_call(generation)

    # -- calls

    def call(self, generation: SimulatedGeneration) -> None:
        """Starts the next call. Its end is told to the user."""
        number = generation.completed + 1
        generation.call = SimulatedCall(number)
        self._laws.call_began(self._host.node, generation.key, number)
        if generation.outcome is not None or generation.interrupted:
            self._wait_for_outcome(generation, PeerLossError(0))
        else:
            self._send_call(generation)
            self._advance(generation)
            self._host.after(_INQUIRY_INTERVAL, lambda: self._inquire(generation, number))

    def _inquire(self, generation: SimulatedGeneration, number: int) -> None:
        """Asks the awaited member from time to time whether it takes part: its closing notice may have been lost."""
        call, awaited = generation.call, generation.awaited()
        if call is not None and call.number == number and awaited is not None and not call.waits:
            self._world.links.send(self._host.node, awaited, LinkFrame("question", generation.key))
            self._host.after(_INQUIRY_INTERVAL, lambda: self._inquire(generation, number))

    def _send_call(self, generation: SimulatedGeneration) -> None:
        """Sends the frames of the present step."""
        call = generation.call
        for node in generation.receivers():
            if call is None or generation.call is not call or call.waits:
                return
            frame = LinkFrame("call", generation.key, call.number, call.step)
            if node in generation.lost or not self._world.links.send(self._host.node, node, frame):
                self._call_failed(generation, node)

    def _advance(self, generation: SimulatedGeneration) -> None:
        call = generation.call
        if call is None or call.waits:
            return
        while not generation.is_complete():
            if (call.number, call.step) not in generation.received:
                self._check_call(generation)
                return
            generation.received.discard((call.number, call.step))
            call.step += 1
            self._send_call(generation)
            if generation.call is not call or call.waits:
                return
        self._end_call(generation, None)

    def _check_call(self, generation: SimulatedGeneration) -> None:
        """Ends a call that waits for a member that closed the communicator or cannot be reached."""
        call = generation.call
        if call is None or call.waits or not (generation.closed_by or generation.lost):
            return
        awaited = generation.awaited()
        if awaited is None or (call.number, call.step) in generation.received:
            return
        if awaited in generation.closed_by:
            rank = generation.membership.rank_of(awaited) or 0
            self._end_call(generation, RevokedBy(rank, "it has closed it", closed=True))
        elif awaited in generation.lost:
            self._call_failed(generation, awaited)

    def _call_failed(self, generation: SimulatedGeneration, node: NodeId) -> None:
        """The call needs this member: it waits for the outcome, or fails under the other policies."""
        if self._world.policy == "automatic":
            self._wait_for_outcome(generation, PeerLossError(node))
            self._host.handle(MemberNeeded(generation.key, node, "its link is lost"))
            return
        if self._world.is_manual:
            self._host.investigate(node, "its link is lost")
        self._end_call(generation, PeerLossError(node))

    # -- closing

    def close(self, generation: SimulatedGeneration) -> None:
        """The user closes it: the other members are told after what was sent before."""
        self._open.pop(generation.key, None)
        self._closed.add(generation.key.communicator)
        self._host.handle(LocalClose(generation.key))
        self._leave(generation.key, generation.membership)

    def release(self, generation: SimulatedGeneration) -> None:
        """The user dropped a superseded generation."""
        self._open.pop(generation.key, None)
