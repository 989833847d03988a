"""The laws about communicators, checked after every step of every node.

- Same members: a generation has one member list, and it is `next_generation` of the decided changes.
- Fenced: at one node the epochs of a communicator only grow, and a call completes only if all members made it.
- All or nobody: a node opens a successor, or a generation of the world, only after every member began to build it.
- One successor: Superseded names an open generation, ancestors name the newest one, and final outcomes do not change.
- Completed: the last call of the old generation that all continuing members completed; unknown if members come from
  different generations.
- Exact: `lost` and `joined` are the differences of the two member lists; `agreed`: every departure was willing.
- Undisturbed: only a change that concerns a communicator, a stall, a revocation or the end of the node ends its calls.
- Everybody stops together: a change interrupts the generations that it concerns before their links close.
- No wait for a member that closed: a node that closed a communicator neither builds nor opens a generation of it, and
  tells the others when a change concerns it. A node that was told, about any generation, builds no successor with it.
- No wait for a departed member: a change aborts the builds that it concerns or whose members it removes.
- Bounded: at most 16 successors are built at a time, a failed build is not repeated, what the user released is
  forgotten, and changes, closed communicators and early notices are remembered up to their limits.
- Not handed out: a generation that was revoked before it is opened is revoked from the start.
- Revocations are honest: the named rank has revoked, or closed, the generation.
- A terminated node takes no part: it ends all its calls and builds at once, and opens, builds and sends nothing more.
- Calls end: with a result or an outcome, in time once the network is calm and a majority lives. Under the automatic
  policy an error of the link is no outcome: the time of the next call counts from the first one.

First generations of parts are not built together: a member may open one before another one begins. So "all or nobody"
does not apply to them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from nexar.cluster.decisions import successor_state
from nexar.cluster.decisions.completion import NEW_MEMBER, NONE_COMPLETED, CompletedCalls
from nexar.cluster.decisions.membership_events import SelfExpelled
from nexar.cluster.decisions.successor_events import (
    AbortBuild,
    AdoptMembership,
    BuildFailed,
    BuildFinished,
    BuildId,
    GenerationKey,
    Interrupt,
    LocalClose,
    OpenGeneration,
    Outcome,
    QuorumLost,
    RecoveryTimedOut,
    Released,
    RevokedBy,
    RevokeReceived,
    RevokeRequested,
    SendNotice,
    SetOutcome,
    StartBuild,
    Superseded,
    Terminate,
    Terminated,
)
from nexar.cluster.decisions.successor_machine import SuccessorMachine
from nexar.cluster.membership import WORLD, Membership
from nexar.testing.simulator.laws import Laws, Violation
from nexar.types import NodeId, Rank

MAX_BUILDS: Final = 16


class _NodeState:
    """What the laws know of one node."""

    def __init__(self) -> None:
        self.epoch = 0
        self.terminated = False
        self.is_over = False  # its end was checked
        self.builds: dict[BuildId, StartBuild] = {}
        self.aborted: set[BuildId] = set()
        self.tried: set[GenerationKey] = set()
        self.newest: dict[int, GenerationKey] = {}  # opened, by communicator
        self.open: set[GenerationKey] = set()  # and not closed, released or replaced by the user
        self.outcomes: defaultdict[int, dict[GenerationKey, Outcome]] = defaultdict(dict)  # by communicator
        self.interrupted: set[GenerationKey] = set()
        self.closed: dict[int, GenerationKey] = {}  # the newest generation that the user closed, by communicator
        self.told: defaultdict[int, set[NodeId]] = defaultdict(set)  # who said that it closed, by communicator
        self.released: list[GenerationKey] = []
        self.revoked_early: set[GenerationKey] = set()  # before it was opened here
        self.pending: dict[GenerationKey, tuple[int, float]] = {}  # the call and when it began
        self.unresolved: dict[GenerationKey, float] = {}  # when a call began that ended without an outcome

    def is_in_use(self, key: GenerationKey) -> bool:
        """Whether it is open and has no successor."""
        return key in self.open and self.newest.get(key.communicator) == key

    def successor_builds(self) -> int:
        return sum(start.old is not None for start in self.builds.values())


class SuccessorLaws:
    """Checks the laws of one run."""

    def __init__(self, laws: Laws, now: Callable[[], float]) -> None:
        self._laws = laws
        self._now = now
        self._nodes: defaultdict[NodeId, _NodeState] = defaultdict(_NodeState)
        self._memberships: dict[GenerationKey, Membership] = {}
        self._began: defaultdict[GenerationKey, dict[NodeId, CompletedCalls | None]] = defaultdict(dict)
        self._calls: defaultdict[tuple[GenerationKey, int], set[NodeId]] = defaultdict(set)
        self._revoked: set[tuple[NodeId, GenerationKey]] = set()

    def enters(self, node: NodeId, epoch: int) -> None:
        self._nodes[node].epoch = epoch

    def died(self, node: NodeId) -> None:
        """Its pending calls and builds end with it."""
        state = self._nodes[node]
        for each in (state.pending, state.unresolved, state.builds):
            each.clear()

    # -- the application

    def build_began(self, node: NodeId, start: StartBuild, completed: CompletedCalls | None) -> None:
        self._began[start.key][node] = completed

    def call_began(self, node: NodeId, key: GenerationKey, number: int) -> None:
        self._calls[key, number].add(node)
        state = self._nodes[node]
        state.pending[key] = (number, state.unresolved.get(key, self._now()))

    def call_ended(
        self,
        node: NodeId,
        key: GenerationKey,
        number: int,
        *,
        completed: bool,
        together: bool = True,
        without_outcome: bool = False,
    ) -> None:
        """`together`: it completes only after all members made it. `without_outcome`: it waited for the outcome of its
        generation in vain.
        """
        state = self._nodes[node]
        _, began = state.pending.pop(key, (number, self._now()))
        state.unresolved.pop(key, None)
        if without_outcome:
            state.unresolved[key] = began
        missing = self._memberships[key].size - len(self._calls[key, number]) if completed and together else 0
        if missing:
            raise Violation("fenced", f"call {number} of {key} completes without {missing} members", node)

    # -- steps

    def before_step(self, node: NodeId, event: object) -> None:
        """Records what the event says. Call it before the node's step."""
        match event:
            case BuildFailed(build) | BuildFinished(build):
                self._build_ended(self._nodes[node], build, finished=isinstance(event, BuildFinished))
            case LocalClose(key):
                self._nodes[node].closed[key.communicator] = key
                self._forget(node, key)
            case Released(key):
                self._forget(node, key)
                self._nodes[node].released.append(key)
                self._nodes[node].outcomes[key.communicator].pop(key, None)
            case RevokeReceived(sender=sender, key=key, closed=True) if self._concerns(node, event):
                self._nodes[node].told[key.communicator].add(sender)
            case RevokeReceived(key=key, rank=rank, closed=False) if self._is_early(node, key, rank):
                self._nodes[node].revoked_early.add(key)
            case RevokeRequested(key):
                self._revoked.add((node, key))
            case _:
                return

    def _build_ended(self, state: _NodeState, build: BuildId, *, finished: bool) -> None:
        start = state.builds.pop(build, None)
        if start is not None and finished and start.communicator in state.closed:
            state.closed[start.communicator] = start.key  # the others may use it

    def _is_early(self, node: NodeId, key: GenerationKey, rank: Rank) -> bool:
        """Whether this notice is true and about a generation that the node has not opened."""
        newest = self._nodes[node].newest.get(key.communicator)
        if key not in self._memberships or (newest is not None and newest.epoch >= key.epoch):
            return False
        members = self._memberships[key].members
        return 0 <= rank < len(members) and members[rank].node != node and (members[rank].node, key) in self._revoked

    def _concerns(self, node: NodeId, notice: RevokeReceived) -> bool:
        """Whether this closing notice is true and the sender is a member of the generation in use."""
        state, sender, communicator = self._nodes[node], notice.sender, notice.key.communicator
        newest = state.newest.get(communicator)
        if newest is None or not state.is_in_use(newest) or state.terminated:
            return False
        named = self._memberships.get(notice.key)
        is_true = (
            named is not None and named.rank_of(sender) == notice.rank and communicator in self._nodes[sender].closed
        )
        return is_true and self._memberships[newest].rank_of(sender) is not None

    def _forget(self, node: NodeId, key: GenerationKey) -> None:
        state = self._nodes[node]
        state.open.discard(key)
        state.pending.pop(key, None)
        state.unresolved.pop(key, None)

    def after_step(self, node: NodeId, event: object, actions: Sequence[object]) -> None:
        """Checks the actions of a step. Raises Violation."""
        interrupted: list[GenerationKey] = []
        opened: list[GenerationKey] = []
        state = self._nodes[node]
        for action in actions:
            kind = type(action)
            if kind is Interrupt:
                interrupted.append(action.key)  # type: ignore[attr-defined]
                state.interrupted.add(action.key)  # type: ignore[attr-defined]
            elif kind is AdoptMembership:
                self._check_adoption(node, state, action, actions)  # type: ignore[arg-type]
            elif (check := self._checks.get(kind)) is not None:
                check(self, node, state, action)
                if kind is OpenGeneration:
                    opened.append(action.key)  # type: ignore[attr-defined]
        for key in interrupted:
            self._check_interrupt(node, state, key)
        for key in opened:
            self._check_ancestors(node, state, key.communicator)
            if key in state.revoked_early and not isinstance(state.outcomes[key.communicator].get(key), RevokedBy):
                raise Violation("not handed out", f"node {node} opens {key}, which was revoked before", node)
        if isinstance(event, RevokeReceived):
            self._check_told(node, state, actions)
        state.terminated = state.terminated or isinstance(event, Terminate)
        self._check_end(node, state, actions)

    # -- changes

    def _check_adoption(
        self, node: NodeId, state: _NodeState, action: AdoptMembership, actions: Sequence[object]
    ) -> None:
        change, world = action.change, action.after
        state.epoch = change.epoch
        for key in state.newest.values():
            is_idle = key in state.open and key not in state.interrupted
            if is_idle and change.concerns(key.communicator, _nodes(self._memberships[key])):
                raise Violation("everybody stops together", f"node {node} goes on with {key} in {change.epoch}", node)
        aborted = {each.build for each in actions if isinstance(each, AbortBuild)}
        for build, start in state.builds.items():
            gone = not start.membership.nodes <= world.nodes
            over = gone or change.concerns(start.communicator, _nodes(start.membership))
            if over and build not in aborted and build not in state.aborted:
                raise Violation("nobody waits for who left", f"node {node} goes on building {start.key}", node)
        state.aborted |= aborted
        self._check_closing_notices(node, state, action, actions)

    def _check_closing_notices(
        self, node: NodeId, state: _NodeState, action: AdoptMembership, actions: Sequence[object]
    ) -> None:
        if state.terminated:
            return  # it sends no notices; under the policy abort the others terminate too
        notices = [each for each in actions if isinstance(each, SendNotice) and each.closed] if state.closed else []
        for key in state.closed.values():
            told = {other for each in notices if each.key == key for other in each.nodes}
            nodes = _nodes(self._memberships[key])
            awaiting = {each for each in nodes if each != node and action.after.rank_of(each) is not None}
            if action.change.concerns(key.communicator, nodes) and not awaiting <= told:
                raise Violation("nobody waits for who closed", f"node {node} does not say that it closed {key}", node)

    def _check_end(self, node: NodeId, state: _NodeState, actions: Sequence[object]) -> None:
        """The step that terminates a node ends everything."""
        if state.is_over or not state.terminated:
            return
        state.is_over = True
        for key in state.newest.values():
            outcome = state.outcomes[key.communicator].get(key)
            if state.is_in_use(key) and not isinstance(outcome, Terminated):
                raise Violation("a terminated node takes no part", f"node {node} goes on with {key}", node)
        aborted = {each.build for each in actions if isinstance(each, AbortBuild)} | state.aborted
        for build, start in state.builds.items():
            if build not in aborted:
                raise Violation("a terminated node takes no part", f"node {node} goes on building {start.key}", node)

    def _expelled(self, node: NodeId, state: _NodeState, _: SelfExpelled) -> None:
        del node
        state.terminated = True

    # -- builds

    def _check_start(self, node: NodeId, state: _NodeState, start: StartBuild) -> None:
        self._check_takes_part(node, state, f"builds {start.key}")
        if start.communicator in state.closed:
            raise Violation("nobody waits for who closed", f"node {node} builds {start.key}, which it closed", node)
        if start.old is not None:
            self._check_target(node, state, start, start.old)
            self._check_nobody_closed(node, state, start)
        self._check_members(node, start)
        state.builds[start.build] = start
        if state.successor_builds() > MAX_BUILDS:
            raise Violation("bounded", f"node {node} builds {state.successor_builds()} successors", node)

    def _check_told(self, node: NodeId, state: _NodeState, actions: Sequence[object]) -> None:
        """The node aborts the builds of successors with a member that closed."""
        state.aborted |= {each.build for each in actions if isinstance(each, AbortBuild)}
        for build, start in state.builds.items():
            if start.old is not None and build not in state.aborted:
                self._check_nobody_closed(node, state, start)

    def _check_nobody_closed(self, node: NodeId, state: _NodeState, start: StartBuild) -> None:
        closed = state.told[start.communicator].intersection(_nodes(start.membership))
        if closed:
            raise Violation("nobody waits for who closed", f"node {node} builds {start.key} with {closed}", node)

    def _check_target(self, node: NodeId, state: _NodeState, start: StartBuild, old: GenerationKey) -> None:
        expected = self._laws.generation_after(start.communicator, self._memberships[old], state.epoch)
        if expected is None:
            raise Violation("undisturbed", f"node {node} replaces {old}, which no change concerns", node)
        if expected != start.membership:
            raise Violation(
                "same members",
                f"node {node} builds {start.key} of {_nodes(start.membership)} after {old}; "
                f"the changes give epoch {expected.epoch} of {_nodes(expected)}",
                node,
            )
        if start.key in state.tried:
            raise Violation("bounded", f"node {node} builds {start.key} again", node)
        state.tried.add(start.key)

    def _check_members(self, node: NodeId, start: StartBuild) -> None:
        known = self._memberships.setdefault(start.key, start.membership)
        if known.members != start.membership.members:
            raise Violation(
                "same members",
                f"node {node} builds {start.key} of {_nodes(start.membership)}, others of {_nodes(known)}",
                node,
            )

    def _check_takes_part(self, node: NodeId, state: _NodeState, does: str) -> None:
        if state.terminated:
            raise Violation("a terminated node takes no part", f"node {node} {does}", node)

    def _check_open(self, node: NodeId, state: _NodeState, action: OpenGeneration) -> None:
        key, old = action.key, action.old
        self._check_takes_part(node, state, f"opens {key}")
        if key.communicator in state.closed:
            raise Violation("nobody waits for who closed", f"node {node} opens {key}, which it closed", node)
        newest = state.newest.get(key.communicator)
        if newest is not None and newest.epoch >= key.epoch:
            raise Violation("fenced", f"node {node} opens {key} after {newest}", node)
        if key not in self._memberships or self._memberships[key].rank_of(node) is None:
            raise Violation("same members", f"node {node} opens {key} without being a member", node)
        missing = self._memberships[key].nodes - self._began[key].keys()
        if missing and (old is not None or key.communicator == WORLD):
            raise Violation("all or nobody", f"node {node} opens {key}; {sorted(missing)} did not begin it", node)
        state.newest[key.communicator] = key
        state.open.add(key)

    # -- outcomes

    def _check_outcome(self, node: NodeId, state: _NodeState, action: SetOutcome) -> None:
        key, outcome = action.key, action.outcome
        known = state.outcomes[key.communicator].get(key)
        self._check_final(node, key, known, outcome)
        if isinstance(outcome, Superseded):
            self._check_superseded(node, state, key, outcome, known)
        elif isinstance(outcome, RevokedBy):
            self._check_revocation(node, key, outcome.rank, closed=outcome.closed)
        elif isinstance(outcome, Terminated):
            state.terminated = True
        state.outcomes[key.communicator][key] = outcome

    def _check_final(self, node: NodeId, key: GenerationKey, known: Outcome | None, outcome: Outcome) -> None:
        newer = (
            isinstance(known, Superseded)
            and isinstance(outcome, Superseded)
            and outcome.successor.epoch > known.successor.epoch
        )
        if isinstance(known, Superseded | Terminated) and known != outcome and not newer:
            raise Violation("one successor", f"node {node} replaces {known} of {key} by {outcome}", node)

    def _check_superseded(
        self, node: NodeId, state: _NodeState, key: GenerationKey, outcome: Superseded, known: Outcome | None
    ) -> None:
        successor = outcome.successor
        if successor not in state.open or successor.communicator != key.communicator:
            raise Violation("one successor", f"node {node} continues {key} with {successor}, which is not open", node)
        old, new = self._memberships[key], self._memberships[successor]
        if set(outcome.lost) != _missing_in(new, old) or set(outcome.joined) != _missing_in(old, new):
            raise Violation(
                "exact",
                f"node {node}: {key} of {_nodes(old)} → {successor} of {_nodes(new)} loses {dict(outcome.lost)} "
                f"and gains {outcome.joined}",
                node,
            )
        agreed = self._laws.all_willing(key.epoch, successor.epoch)
        if outcome.agreed != agreed:
            raise Violation("exact", f"node {node}: {key} → {successor} is agreed: {outcome.agreed}", node)
        completed = known.completed if isinstance(known, Superseded) else self._completed(key, successor)
        if outcome.completed != completed:
            raise Violation(
                "completed",
                f"node {node}: {key} → {successor} says {outcome.completed}; all members completed {completed}",
                node,
            )

    def _completed(self, key: GenerationKey, successor: GenerationKey) -> int | None:
        """The last call that all members of the successor completed on the old generation."""
        numbers = [each for each in self._began[successor].values() if each is not None and each != NEW_MEMBER]
        least = min((each.number for each in numbers), default=NONE_COMPLETED)
        same = all(each.generation == key.epoch for each in numbers)
        return least if same and least != NONE_COMPLETED else None

    def _check_ancestors(self, node: NodeId, state: _NodeState, communicator: int) -> None:
        newest = state.newest[communicator]
        for key, outcome in state.outcomes[communicator].items():
            if isinstance(outcome, Superseded) and outcome.successor != newest:
                raise Violation(
                    "one successor", f"node {node} continues {key} with {outcome.successor}, not {newest}", node
                )

    def _check_interrupt(self, node: NodeId, state: _NodeState, key: GenerationKey) -> None:
        """Interrupts without a reason are violations."""
        outcome = state.outcomes[key.communicator].get(key)
        if isinstance(outcome, RevokedBy | Terminated | QuorumLost | RecoveryTimedOut):
            return
        if self._laws.generation_after(key.communicator, self._memberships[key], state.epoch) is None:
            raise Violation("undisturbed", f"node {node} ends calls of {key}, which no change concerns", node)

    # -- revocations

    def _check_revocation(self, node: NodeId, key: GenerationKey, rank: Rank, *, closed: bool) -> None:
        author = self._memberships[key].members[rank].node
        is_true = key.communicator in self._nodes[author].closed if closed else (author, key) in self._revoked
        if not is_true:
            what = "closed" if closed else "revoked"
            raise Violation("revocations are honest", f"node {node} says that node {author} {what} {key}", node)

    def _check_notice(self, node: NodeId, state: _NodeState, notice: SendNotice) -> None:
        self._check_takes_part(node, state, f"sends a notice about {notice.key}")
        self._check_revocation(node, notice.key, notice.rank, closed=notice.closed)

    _checks: dict[type, Callable[..., None]] = {  # noqa: RUF012 - never written
        SelfExpelled: _expelled,
        StartBuild: _check_start,
        OpenGeneration: _check_open,
        SetOutcome: _check_outcome,
        SendNotice: _check_notice,
    }

    # -- time

    def overdue(self, calm: float, bound: float, lives: Callable[[NodeId], bool]) -> None:
        """Raises Violation if a call or build of a living node is older than `bound` since `calm`."""
        limit = self._now() - bound
        if calm > limit:
            return
        for node, state in self._nodes.items():
            if not state.pending or not lives(node):
                continue
            for key, (number, began) in state.pending.items():
                if began < limit:
                    raise Violation("calls end", f"call {number} on {key} of node {node} is pending", node)

    def check_memory(self, node: NodeId, machine: SuccessorMachine) -> None:
        """Raises Violation if the machine keeps what the user closed or released, or forgot what is in use, or exceeds
        a limit.
        """
        state = self._nodes[node]
        limits = (successor_state.MAX_CHANGES, successor_state.MAX_CLOSED, successor_state.MAX_EARLY)
        if any(count > limit for count, limit in zip(machine.remembered(), limits, strict=True)):
            raise Violation("bounded", f"node {node} remembers {machine.remembered()}", node)
        kept = [key for key in state.released if machine.is_concerned(key)]
        used = {key for key in state.newest.values() if state.is_in_use(key)}
        if kept or set(machine.generations()) != used:
            what = (
                f"keeps {kept[:3]}" if kept else f"has {machine.generations()[:3]} open instead of {sorted(used)[:3]}"
            )
            raise Violation("bounded", f"node {node} {what}", node)

    def has_pending(self, since: float, lives: Callable[[NodeId], bool]) -> bool:
        """Whether a living node has a call that began before `since` and has neither a result nor an outcome."""
        for node, state in self._nodes.items():
            times = [*(began for _, began in state.pending.values()), *state.unresolved.values()]
            if times and min(times) < since and lives(node):
                return True
        return False


def _nodes(membership: Membership) -> list[NodeId]:
    return list(membership.nodes)


def _missing_in(one: Membership, other: Membership) -> set[Rank]:
    """Ranks of `other` whose node is not in `one`."""
    return (
        {rank for rank, node in enumerate(other.nodes) if node not in one.nodes} if other.nodes - one.nodes else set()
    )
