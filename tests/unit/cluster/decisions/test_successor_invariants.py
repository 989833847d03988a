"""Random sequences of events at one node: what holds after every step, and that every interrupted call ends."""

from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from nexar.cluster.decisions.successor_events import (
    AdoptMembership,
    DiscardBuild,
    GenerationKey,
    Interrupt,
    OpenGeneration,
    Outcome,
    QuorumLost,
    RecoveryTimedOut,
    RejectBegin,
    RequestRenewal,
    RevokedBy,
    SendNotice,
    SetOutcome,
    StartBuild,
    SuccessorAction,
    Superseded,
    Terminated,
)
from nexar.cluster.decisions.successor_machine import MAX_BUILDS
from nexar.cluster.membership import WORLD, Membership
from tests.unit.cluster.decisions.successor_scene import (
    ME,
    TIMED_OUT,
    TIMEOUT,
    Scene,
    killed,
    kinds,
    left,
    lost,
    member,
)

COMMUNICATORS = MAX_BUILDS + 4


class Run:
    """One node with random events; every action is checked."""

    def __init__(self) -> None:
        self.scene = Scene(1, 2, 3, 4, 5, 6)
        self.running: dict[int, StartBuild] = {}
        self.used: set[int] = set()
        self.memberships: dict[GenerationKey, Membership] = {}
        self.open: set[GenerationKey] = set()
        self.interrupted: set[GenerationKey] = set()
        self.outcomes: dict[GenerationKey, Outcome] = {}
        self.closers: dict[GenerationKey, set[int]] = {}
        self.released: set[GenerationKey] = set()
        self.next_node = 7
        self.next_communicator = WORLD
        self.has_world = False

    # -- events

    def do(self, name: str, first: int, second: int) -> None:
        event: Callable[[int, int], list[SuccessorAction]] = getattr(self, name)
        self.check(event(first, second))

    def begin(self, first: int, second: int) -> list[SuccessorAction]:
        if first % 4 == 0 and not self.has_world:
            self.has_world = True
            return self.scene.request()
        nodes = [each.node for each in self.scene.machine.world.members]
        chosen = {ME, *(node for place, node in enumerate(nodes) if second >> place & 1)}
        self.next_communicator += 1
        return self.scene.request(*sorted(chosen), communicator=self.next_communicator)

    def _others(self) -> list[int]:
        return [each.node for each in self.scene.machine.world.members if each.node != ME]

    def die(self, first: int, _: int) -> list[SuccessorAction]:
        others = self._others()
        return self._changed(left=killed(others[first % len(others)])) if others else []

    def leave(self, first: int, _: int) -> list[SuccessorAction]:
        others = self._others()
        return self._changed(left=left(others[first % len(others)])) if others else []

    def join(self, _: int, __: int) -> list[SuccessorAction]:
        self.next_node += 1
        return self._changed(joined=(member(self.next_node),))

    def renew(self, first: int, second: int) -> list[SuccessorAction]:
        found = [self._pick(number) for number in (first, second)]
        return self._changed(renewed=tuple(sorted({each.communicator for each in found if each is not None})))

    def _changed(self, **facts: Any) -> list[SuccessorAction]:
        actions = self.scene.change(**facts)
        adopted = kinds(actions).index("AdoptMembership")
        assert set(kinds(actions[:adopted])) <= {"Interrupt"}
        assert "Interrupt" not in kinds(actions[adopted:])
        assert "RequestRenewal" not in kinds(actions[:-1])
        return actions

    def _pick(self, number: int) -> GenerationKey | None:
        keys = sorted(self.memberships)
        return keys[number % len(keys)] if keys else None

    def _build(self, number: int) -> StartBuild | None:
        return self.running.pop(sorted(self.running)[number % len(self.running)]) if self.running else None

    def finish(self, first: int, second: int) -> list[SuccessorAction]:
        build = self._build(first)
        if build is None:
            return []
        self.memberships.setdefault(build.key, build.membership)
        return self.scene.finish(build, second or None)

    def fail(self, first: int, second: int) -> list[SuccessorAction]:
        build = self._build(first)
        if build is None:
            return []
        others = [each.node for each in build.membership.members if each.node != ME]
        return self.scene.fail(build, lost(others[second % len(others)]) if second and others else TIMED_OUT)

    def need(self, first: int, second: int) -> list[SuccessorAction]:
        key = self._pick(first)
        return [] if key is None else self.scene.need(key, second % self.next_node)

    def close(self, first: int, _: int) -> list[SuccessorAction]:
        key = self._pick(first)
        if key is None:
            return []
        self.open.discard(key)
        return self.scene.close(key)

    def revoke(self, first: int, _: int) -> list[SuccessorAction]:
        key = self._pick(first)
        return [] if key is None else self.scene.revoke(key)

    def hear(self, first: int, second: int) -> list[SuccessorAction]:
        key = self._pick(first)
        if key is None:
            return []
        members = self.memberships[key].members
        rank, closed = second % len(members), second % 2 == 0
        sender = members[rank].node if first % 4 else second % self.next_node
        if closed and key in self.open and sender == members[rank].node != ME:
            self.closers.setdefault(key, set()).add(sender)
        return self.scene.hear(sender, key, rank, closed=closed)

    def stall(self, first: int, second: int) -> list[SuccessorAction]:
        alive = tuple(node for node in (ME, *self._others()) if node == ME or first >> node & 1)
        return self.scene.stall(alive=alive, needed=4, missing_votes=(2,) if second % 2 else ())

    def release(self, first: int, _: int) -> list[SuccessorAction]:
        key = self._pick(first)
        if key is None or key in self.open:
            return []
        self.released.add(key)
        return self.scene.release(key)

    def wait(self, first: int, _: int) -> list[SuccessorAction]:
        actions = self.scene.tick(first)
        due = self.scene.machine.due(self.scene.now)
        assert due is None or due > self.scene.now, "the owner would tick for ever"
        return actions

    def terminate(self, first: int, second: int) -> list[SuccessorAction]:
        return self.scene.terminate() if first == second == 0 else []

    # -- what holds

    def check(self, actions: list[SuccessorAction]) -> None:
        for action in actions:
            self._check(action)
        machine = self.scene.machine
        assert set(machine.generations()) == self.open
        assert len({key.communicator for key in self.open}) == len(self.open), "one generation of each is open"
        assert sum(build.old is not None for build in self.running.values()) <= MAX_BUILDS
        assert set(machine.builds()) == set(self.running)
        self._check_ancestors()

    def _check_ancestors(self) -> None:
        newest: dict[int, GenerationKey] = {}
        for key, outcome in self.outcomes.items():
            if isinstance(outcome, Superseded) and key not in self.released:
                assert newest.setdefault(key.communicator, outcome.successor) == outcome.successor

    def _check(self, action: SuccessorAction) -> None:  # noqa: C901 - one case for each action
        machine = self.scene.machine
        match action:
            case StartBuild():
                self._check_start(action)
            case OpenGeneration(_, key, old):
                older = [each.epoch for each in self.open if each.communicator == key.communicator]
                assert all(epoch < key.epoch for epoch in older)
                self.open.add(key)
                if old is not None:
                    assert machine.terminated is None
                    assert all(self.memberships[key].rank_of(each) is None for each in self.closers.get(old, ()))
                    self.open.remove(old)
            case Interrupt(key):
                assert key in self.open | self.memberships.keys()
                assert key not in self.interrupted, "once is enough"
                self.interrupted.add(key)
            case SetOutcome(key, outcome):
                self._check_outcome(key, outcome)
            case SendNotice(nodes, key, rank, _, closed):
                assert machine.terminated is None
                assert ME not in nodes
                if closed:
                    assert self.memberships[key].rank_of(ME) == rank
            case RequestRenewal(communicators, epoch):
                assert communicators == tuple(sorted(set(communicators)))
                assert epoch == machine.world.epoch
            case AdoptMembership(_, after):
                assert after == machine.world
            case DiscardBuild(build) | RejectBegin(build):
                assert build not in self.running

    def _check_start(self, build: StartBuild) -> None:
        machine = self.scene.machine
        assert machine.terminated is None
        assert build.build not in self.used
        self.used.add(build.build)
        self.running[build.build] = build
        nodes = {each.node for each in build.membership.members}
        assert ME in nodes
        assert all(machine.world.rank_of(node) is not None for node in nodes), "it would wait in vain"
        if build.old is not None:
            assert build.old in self.open
            assert build.membership.epoch > build.old.epoch
            assert not self.closers.get(build.old, set()) & nodes

    def _check_outcome(self, key: GenerationKey, outcome: Outcome) -> None:
        before = self.outcomes.get(key)
        match before:
            case None | QuorumLost() | RecoveryTimedOut():
                pass
            case RevokedBy():
                assert isinstance(outcome, Superseded | Terminated) or (
                    isinstance(outcome, RevokedBy) and outcome.closed
                )
            case Superseded():
                assert isinstance(outcome, Superseded)
                assert outcome.successor > before.successor
            case Terminated():
                raise AssertionError("final")
        self.outcomes[key] = outcome
        if isinstance(outcome, Superseded):
            old, new = self.memberships[key], self.memberships[outcome.successor]
            assert outcome.successor in self.open
            gone = [rank for rank, each in enumerate(old.members) if new.rank_of(each.node) is None]
            assert list(outcome.lost) == gone
            assert list(outcome.joined) == [
                rank for rank, each in enumerate(new.members) if old.rank_of(each.node) is None
            ]

    def settle(self) -> None:
        """No build finishes any more: within the timeout every interrupted call has its outcome."""
        for _ in range(3 * COMMUNICATORS):
            while self.running:
                self.check(self.fail(0, 0))
            self.check(self.wait(int(TIMEOUT), 0))
        machine = self.scene.machine
        without = [key for key in self.open & self.interrupted if machine.outcome(key) is None]
        assert without == []
        assert machine.due(self.scene.now) is None


EVENTS = [
    *["begin"] * 3, *["finish"] * 4, *["fail"] * 2, "die", "leave", "join", *["renew"] * 2, "need", "close", "revoke",
    *["hear"] * 2, "stall", "release", "wait", "terminate",
]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32))
def test_every_step_keeps_the_rules_and_every_interrupted_generation_gets_an_outcome(seed: int) -> None:
    """Seeds and not lists of events: those that hypothesis makes are too short to reach the rare cases."""
    random, run = Random(seed), Run()
    for _ in range(150):
        run.do(random.choice(EVENTS), random.randrange(64), random.randrange(64))
    run.settle()


def test_more_communicators_than_slots_are_all_succeeded() -> None:
    run = Run()
    for _ in range(COMMUNICATORS):
        run.do("begin", 0, 63)
        run.do("finish", 0, 0)
    run.do("die", 0, 0)
    while run.running:
        run.do("finish", 5, 0)
    assert {key.epoch for key in run.open} == {2}
