"""Machines about successors that are broken on purpose, at least one for each law of `successor_laws`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec

from nexar.cluster.decisions import successor_machine, successor_state
from nexar.cluster.decisions.completion import CompletionExchange, CompletionNews
from nexar.cluster.decisions.node_machine import NodeAction, NodeMachine
from nexar.cluster.decisions.successor_events import (
    AbortBuild,
    AdoptMembership,
    BeginRequested,
    DiscardBuild,
    GenerationKey,
    Interrupt,
    OpenGeneration,
    Released,
    RevokeReceived,
    SetOutcome,
    StartBuild,
    SuccessorAction,
    Superseded,
    Terminated,
    TerminationKind,
)
from nexar.cluster.decisions.successor_machine import SuccessorMachine
from nexar.cluster.decisions.successor_state import (
    ChangeHistory,
    ClosedCommunicators,
    EarlyNotices,
    OpenedGeneration,
    interrupt,
)
from nexar.cluster.membership import Change, Membership
from nexar.testing.simulator import Simulation, SimulationResult
from nexar.testing.simulator.generations import SimulatedGeneration
from tests.unit.testing.simulator.mutants import Running


def _patched(place: Any, name: str, instead: object) -> Running:
    def run(seed: int, nodes: int) -> SimulationResult:
        with patch.object(place, name, instead):
            return Simulation(seed, nodes).run()

    return run


def _acts(change: Callable[[list[SuccessorAction]], list[SuccessorAction]]) -> Running:
    """The actions of every step of SuccessorMachine are changed."""
    step = SuccessorMachine.step
    return _patched(SuccessorMachine, "step", lambda self, event, now: change(step(self, event, now)))


# -- same members


def _drops_last(self: ChangeHistory, communicator: int, membership: Membership) -> Membership | None:
    """The next generation lacks the last of its members."""
    found = _following(self, communicator, membership)
    return found if found is None or found.size == 1 else replace(found, members=found.members[:-1])


_following = ChangeHistory.following


def _lacks_last(self: SuccessorMachine, event: BeginRequested, now: float) -> list[SuccessorAction]:
    """All members but the last one build a first generation without the last one."""
    members = event.membership.members
    if len(members) > 2 and members[-1].node != self.me:
        event = msgspec.structs.replace(event, membership=replace(event.membership, members=members[:-1]))
    return _begin(self, event, now)


_begin = SuccessorMachine._begin


def _opens_unbuilt(actions: list[SuccessorAction]) -> list[SuccessorAction]:
    """A successor is opened under a key that no member built."""
    return [
        msgspec.structs.replace(each, key=GenerationKey(each.key.communicator, each.key.epoch + 1000))
        if isinstance(each, OpenGeneration) and each.old is not None
        else each
        for each in actions
    ]


def _keeps_first_target(self: SuccessorMachine, change: Change) -> list[SuccessorAction]:
    """A newer change does not change the target of a generation that already has one."""
    actions: list[SuccessorAction] = []
    for each in self._open.values():
        if change.concerns(each.key.communicator, each.nodes):
            each.target = each.target or self._history.following(each.key.communicator, each.membership)
            actions += interrupt(each)
    return actions


# -- fenced


def _reopens(actions: list[SuccessorAction]) -> list[SuccessorAction]:
    """A successor is opened under the key of the old generation."""
    return [
        msgspec.structs.replace(each, key=each.old)
        if isinstance(each, OpenGeneration) and each.old is not None
        else each
        for each in actions
    ]


def _early_calls(self: SimulatedGeneration) -> bool:
    """A call ends one step too early, as with frames of another generation."""
    return _is_complete(self) or (self.call is not None and 2 << self.call.step >= self.size)


_is_complete = SimulatedGeneration.is_complete


# -- all or nobody


def _early_result(self: CompletionExchange) -> int | None:
    """The exchange ends one step too early."""
    return None if 2 * self._distance < self._size else self._known.least


# -- one successor


def _outcome_first(actions: list[SuccessorAction]) -> list[SuccessorAction]:
    """Calls are told of a successor before it is open."""
    return sorted(actions, key=lambda each: not (isinstance(each, SetOutcome) and isinstance(each.outcome, Superseded)))


def _forgets_ancestors(actions: list[SuccessorAction]) -> list[SuccessorAction]:
    """Only the direct ancestor leads to the newest successor."""
    direct = {each.old for each in actions if isinstance(each, OpenGeneration)}
    return [
        each
        for each in actions
        if not (isinstance(each, SetOutcome) and isinstance(each.outcome, Superseded)) or each.key in direct
    ]


def _ends_superseded(self: SuccessorMachine, cause: Terminated) -> list[SuccessorAction]:
    """The end of a node replaces the outcomes of generations that have a successor."""
    superseded = [] if self.terminated is not None else list(self._superseded)
    return [*_terminate(self, cause), *(SetOutcome(key, cause) for key in superseded)]


# -- completed


def _most(self: CompletionNews, other: CompletionNews) -> CompletionNews:
    """The last call that any member completed."""
    return CompletionNews(max(self.least, other.least), min(self.oldest, other.oldest), max(self.newest, other.newest))


def _mixed(self: CompletionExchange) -> int | None:
    """Call numbers of different generations are compared."""
    return None if self._distance < self._size else self._known.least


# -- exact

_supersede = successor_state.supersede


# -- undisturbed


def _interrupts_all(self: SuccessorMachine, change: Change) -> list[SuccessorAction]:
    """Every change ends every generation."""
    actions = _interrupt_concerned(self, change)
    return actions + [action for each in self._open.values() for action in interrupt(each)]


def _replaces_all(self: SuccessorMachine, change: Change) -> list[SuccessorAction]:
    """Every change gives every generation a successor."""
    for each in self._open.values():
        if each.target is None and not change.concerns(each.key.communicator, each.nodes):
            each.target = replace(each.membership, epoch=change.epoch)
    return _interrupt_concerned(self, change)


def _interrupts_quiet(self: SuccessorMachine, change: Change) -> list[SuccessorAction]:
    """A quiet departure ends calls, although nobody needs the departed member."""
    actions = _interrupt_concerned(self, change)
    left = (each for each in self._open.values() if not change.gone.isdisjoint(each.nodes))
    return actions + [action for each in left for action in interrupt(each)]


_interrupt_concerned = SuccessorMachine._interrupt_concerned


# -- everybody stops together


def _adopts_first(self: NodeMachine, first: Any, now: float) -> list[NodeAction]:
    """Links close before the calls of a generation end."""
    order = {AdoptMembership: 0, Interrupt: 1}
    return sorted(_follow_actions(self, first, now), key=lambda each: order.get(type(each), 2))


_follow_actions = NodeMachine._follow


# -- nobody waits


def _goes_on_after_close(self: SuccessorMachine, key: GenerationKey) -> list[SuccessorAction]:
    """The machine takes no notice of the user's close."""
    return []


def _builds_closed(self: SuccessorMachine, key: GenerationKey) -> list[SuccessorAction]:
    """A closed generation still gets a successor."""
    each, actions = self._open.get(key), _close(self, key)
    if each is not None:
        self._open[key] = each
    return actions


_close = SuccessorMachine._close


def _opens_closed(self: SuccessorMachine, number: int, completed: int | None) -> list[SuccessorAction]:
    """A successor is opened although its user closed the communicator while it was built."""
    build, is_over = self._builds.get(number), self.terminated is not None
    actions = _finished(self, number, completed)
    if build is None or build.old is None or is_over or not any(isinstance(each, DiscardBuild) for each in actions):
        return actions
    return [OpenGeneration(number, GenerationKey(build.communicator, build.membership.epoch), build.old.key)]


_finished = SuccessorMachine._finished


def _hears_of_its_own_generation_only(self: SuccessorMachine, notice: RevokeReceived) -> list[SuccessorAction]:
    """A closing notice about an older or newer generation is not followed."""
    is_other = notice.closed and notice.key not in self._open and self._open_of(notice.key.communicator) is not None
    return [] if is_other else _notice_received(self, notice)


_notice_received = SuccessorMachine._notice_received


# -- bounded


def _keeps_released(self: SuccessorMachine, event: Any, now: float) -> list[SuccessorAction]:
    """What the user released stays."""
    return [] if isinstance(event, Released) else _handle(self, event, now)


_handle = SuccessorMachine._handle


def _keeps_all_changes(self: ChangeHistory, change: Change, after: Membership) -> None:
    """No change is forgotten."""
    self.world = after
    self._following.clear()
    self._changes.append(change)


def _keeps_all_notices(self: EarlyNotices, notice: RevokeReceived) -> None:
    """No early notice is forgotten."""
    self._notices.setdefault(notice.key, {})[notice.sender, notice.closed] = notice


def _with_short_history(run: Running) -> Running:
    """In a simulation no history reaches the real limit."""

    def limited(seed: int, nodes: int) -> SimulationResult:
        with patch.object(successor_state, "MAX_CHANGES", 3):
            return run(seed, nodes)

    return limited


# -- revocations


def _follows_anybody(self: SuccessorMachine, each: OpenedGeneration, notice: RevokeReceived) -> list[SuccessorAction]:
    """A notice counts whoever sends it."""
    if notice.closed:
        return self._closed_by(each, each.membership.members[notice.rank].node)
    return self._revoke(each, notice.rank, notice.reason)


def _follows_in_own_name(
    self: SuccessorMachine, each: OpenedGeneration, notice: RevokeReceived
) -> list[SuccessorAction]:
    """A member may revoke in the name of the receiver."""
    if notice.closed or each.membership.rank_of(notice.sender) is None:
        return []
    return self._revoke(each, notice.rank, notice.reason)


# -- terminated


def _continues_expelled(self: SuccessorMachine, event: Any, now: float) -> list[SuccessorAction]:
    """An expelled node ends its calls, and then goes on."""
    actions = _step(self, event, now)
    self.terminated = None
    return actions


_step = SuccessorMachine.step


def _keeps_builds(self: SuccessorMachine, cause: Terminated) -> list[SuccessorAction]:
    """The end of a node aborts none of its builds."""
    return [each for each in _terminate(self, cause) if not isinstance(each, AbortBuild)]


def _ignores_abort(self: SuccessorMachine, cause: Terminated) -> list[SuccessorAction]:
    """A loss under the policy `abort` ends nothing."""
    return [] if cause.kind is TerminationKind.ABORTED else _terminate(self, cause)


def _ignores_close(self: SuccessorMachine, cause: Terminated) -> list[SuccessorAction]:
    """The close of a node ends nothing."""
    return [] if cause.kind is TerminationKind.CLOSED else _terminate(self, cause)


_terminate = SuccessorMachine._terminate


# -- calls end


def _loses_needs(self: SuccessorMachine) -> list[SuccessorAction]:
    """A need for a member that left is never requested."""
    return []


def _drops_decisions(self: SuccessorMachine, event: Any, now: float) -> list[SuccessorAction]:
    """A change interrupts, but no successor is built."""
    return [each for each in _step(self, event, now) if not isinstance(each, StartBuild) or each.old is None]


SUCCESSOR_MUTANTS: dict[str, tuple[Running, str | tuple[str, ...], int]] = {
    "a successor lacks its last member": (_patched(ChangeHistory, "following", _drops_last), "same members", 20),
    "an older target is kept": (
        _patched(SuccessorMachine, "_interrupt_concerned", _keeps_first_target),
        "a live majority continues",
        60,
    ),
    "a first build lacks its last member": (_patched(SuccessorMachine, "_begin", _lacks_last), "same members", 20),
    "a generation that nobody built is opened": (_acts(_opens_unbuilt), "same members", 20),
    "calls end a step early": (_patched(SimulatedGeneration, "is_complete", _early_calls), "fenced", 20),
    "a successor has the old key": (_acts(_reopens), "fenced", 20),
    "the exchange ends a step early": (_patched(CompletionExchange, "result", property(_early_result)), "all or", 40),
    "outcomes come before the successor": (_acts(_outcome_first), "one successor", 20),
    "ancestors are forgotten": (_acts(_forgets_ancestors), "one successor", 60),
    "the end of a node replaces successors": (
        _patched(SuccessorMachine, "_terminate", _ends_superseded),
        "one successor",
        200,
    ),
    "completed by one is enough": (_patched(CompletionNews, "merged", _most), "completed", 60),
    "the reasons of losses are left out": (
        _patched(successor_machine, "supersede", lambda *a: msgspec.structs.replace(_supersede(*a), lost={})),
        "exact",
        20,
    ),
    "joiners are left out": (
        _patched(successor_machine, "supersede", lambda *a: msgspec.structs.replace(_supersede(*a), joined=())),
        "exact",
        60,
    ),
    "every change is agreed": (
        _patched(successor_machine, "supersede", lambda *a: msgspec.structs.replace(_supersede(*a), agreed=True)),
        "exact",
        20,
    ),
    "every change ends all calls": (
        _patched(SuccessorMachine, "_interrupt_concerned", _interrupts_all),
        "undisturbed",
        40,
    ),
    "every change replaces all generations": (
        _patched(SuccessorMachine, "_interrupt_concerned", _replaces_all),
        "undisturbed",
        60,
    ),
    "quiet departures end calls": (
        _patched(SuccessorMachine, "_interrupt_concerned", _interrupts_quiet),
        "undisturbed",
        60,
    ),
    "links close before calls end": (_patched(NodeMachine, "_follow", _adopts_first), "everybody stops together", 20),
    "a close is ignored": (_patched(SuccessorMachine, "_close", _goes_on_after_close), ("bounded", "nobody waits"), 60),
    "a closed communicator gets a successor": (
        _patched(SuccessorMachine, "_close", _builds_closed),
        "nobody waits for who closed",
        100,
    ),
    "a closed communicator is opened": (
        _patched(SuccessorMachine, "_finished", _opens_closed),
        "nobody waits for who closed",
        300,
    ),
    "nobody is told of a close": (
        _patched(ClosedCommunicators, "concerned", lambda *_: []),
        "nobody waits for who closed",
        100,
    ),
    "builds are not aborted": (
        _patched(SuccessorMachine, "_abort_builds", lambda *_: []),
        "nobody waits for who left",
        60,
    ),
    "builds are not limited": (_patched(successor_machine, "MAX_BUILDS", 10_000), "bounded", 300),
    "failed builds are repeated": (
        _patched(OpenedGeneration, "_is_current", lambda *_: False),
        "bounded",
        100,
    ),
    "released generations are kept": (
        _patched(SuccessorMachine, "_handle", _keeps_released),
        ("bounded", "completed"),
        40,
    ),
    "the history of changes grows": (
        _with_short_history(_patched(ChangeHistory, "add", _keeps_all_changes)),
        "bounded",
        40,
    ),
    "early notices are kept for ever": (_patched(EarlyNotices, "add", _keeps_all_notices), "bounded", 200),
    "early notices are lost": (_patched(EarlyNotices, "take", lambda *_: []), "not handed out", 300),
    "anybody may revoke": (_patched(SuccessorMachine, "_follow", _follows_anybody), "revocations are honest", 100),
    "others revoke in this node's name": (
        _patched(SuccessorMachine, "_follow", _follows_in_own_name),
        "revocations are honest",
        200,
    ),
    "expelled nodes continue": (
        _patched(SuccessorMachine, "step", _continues_expelled),
        "a terminated node takes no part",
        200,
    ),
    "builds go on after the end of a node": (
        _patched(SuccessorMachine, "_terminate", _keeps_builds),
        "a terminated node takes no part",
        200,
    ),
    "a loss aborts nothing": (
        _patched(SuccessorMachine, "_terminate", _ignores_abort),
        "a terminated node takes no part",
        100,
    ),
    "the close of a node ends nothing": (
        _patched(SuccessorMachine, "_terminate", _ignores_close),
        "a terminated node takes no part",
        100,
    ),
    "needs are not requested": (_patched(SuccessorMachine, "_ask_renewal", _loses_needs), "calls end", 100),
    "no successor is built": (_patched(SuccessorMachine, "step", _drops_decisions), "calls end", 20),
}
"""What is broken; the law by which it is found; and within how many seeds."""

RARE_MUTANTS: dict[str, tuple[Running, str, range]] = {
    "numbers of two generations are compared": (
        _patched(CompletionExchange, "result", property(_mixed)),
        "completed",
        range(500, 600),
    ),
    "a close of another generation is ignored": (
        _patched(SuccessorMachine, "_notice_received", _hears_of_its_own_generation_only),
        "nobody waits for who closed",
        range(60, 120),
    ),
}
"""As above, with the seeds to try: few histories show it."""
