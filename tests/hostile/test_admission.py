"""Whatever happens at the door, in whatever order: the laws of admission hold, and strangers change nothing."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from nexar.cluster.decisions.admission import Admission
from nexar.cluster.decisions.admission_events import (
    Action,
    Admit,
    Applied,
    BadMessage,
    ChildDied,
    Commit,
    Drop,
    Event,
    Fail,
    Gone,
    Greeted,
    Knocked,
    Left,
    Ready,
    Refuse,
    Reserved,
    SendChallenge,
    Tick,
)
from nexar.cluster.decisions.door_rules import DoorRules
from nexar.cluster.membership import Membership
from nexar.wire.joining import MAX_REFUSALS, Apply, Reserve
from tests.unit.cluster.decisions.door import PROOF, SEED, Door, a_door, application, ends, every, hello, key

MAX_PENDING = 3
nodes = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7, 0, SEED.node])
launchers = st.sampled_from([0, 0, 8, 9])
connections = st.integers(0, 11)
maybe_ranks = st.sampled_from([None, None, None, 0, 1, 2, 3, 5])
applications = st.builds(
    Apply, st.just(PROOF), st.just(b"r"), st.sampled_from("abc"), st.just({}), maybe_ranks, launchers
)
reservations = st.builds(Reserve, st.just(PROOF), st.just(b"r"), st.just("a"), st.integers(1, 3), maybe_ranks)
hellos = st.builds(hello, nodes, st.sampled_from(["candidate", "launcher", "member", "seed"]))
proofs = st.sampled_from([True, True, True, False])
keys = st.integers(1, 2).map(key)

single: st.SearchStrategy[list[Event]] = st.one_of(
    st.builds(lambda connection: [Knocked(connection, f"10.0.0.1:{connection}")], connections),
    st.builds(lambda *facts: [Greeted(*facts)], connections, hellos),
    st.builds(lambda *facts: [Applied(*facts)], connections, applications, proofs, keys),
    st.builds(lambda *facts: [Reserved(*facts)], connections, reservations, proofs, keys),
    st.builds(lambda connection: [Ready(connection)], connections),
    st.builds(lambda connection: [BadMessage(connection, "nonsense")], connections),
    st.builds(lambda connection: [Gone(connection, "killed")], connections),
    st.builds(lambda connection: [Left(connection)], connections),
    st.builds(lambda *facts: [ChildDied(*facts, "exit 1")], connections, st.integers(0, 9)),
    st.just([Tick()]),
)


def _joins(connection: int, node: int, asked: Apply, proof: bool, shown: bytes) -> list[Event]:
    knock = Knocked(connection, f"10.0.0.1:{connection}")
    return [knock, Greeted(connection, hello(node)), Applied(connection, asked, proof, shown), Ready(connection)]


def _reserves(connection: int, node: int, asked: Reserve, shown: bytes) -> list[Event]:
    knock = Knocked(connection, f"10.0.0.1:{connection}")
    return [knock, Greeted(connection, hello(node, "launcher")), Reserved(connection, asked, True, shown)]


whole = st.builds(_joins, connections, nodes, applications, proofs, keys)
launch = st.builds(_reserves, connections, st.sampled_from([8, 9, 1]), reservations, keys)
stories = st.lists(
    st.tuples(st.one_of(single, whole, whole, launch), st.sampled_from([0.0, 0.0, 0.5, 4.0])), max_size=60
)


class Witness:
    """Watches a door and holds it to the laws."""

    def __init__(self, machine: Admission) -> None:
        self.door = Door(machine)
        self.open: set[int] = set()
        self.challenged: set[int] = set()
        self.admitted: dict[int, tuple[int, Applied | Reserved]] = {}
        self.numbers: dict[int, int] = {}  # a connection of the story is used again; the machine sees a new number
        self.fresh = iter(range(10_000))

    def tell(self, event: Event) -> None:
        event = self._renumbered(event)
        actions = self.door.tell(event)
        self._check_ends(event, actions)
        for action in actions:
            self._check(event, action)
        assert self.door.machine.pending == len(self.open - set(self.admitted)) <= MAX_PENDING
        assert self.door.machine.joined == len(self._admitted("candidate"))
        assert len(self.door.machine.refused) <= MAX_REFUSALS
        self._check_due()

    def _admitted(self, role: str) -> list[int]:
        """Nodes with an open connection on which they were let in."""
        kind = Applied if role == "candidate" else Reserved
        return [node for node, asked in self.admitted.values() if isinstance(asked, kind)]

    def _renumbered(self, event: Event) -> Event:
        if isinstance(event, Tick):
            return event
        name = event.connection
        if isinstance(event, Knocked):
            if self.numbers.get(name) in self.open:
                return Tick()
            self.numbers[name] = next(self.fresh)
            self.open.add(self.numbers[name])
        fields = {each: getattr(event, each) for each in event.__slots__}
        return type(event)(**(fields | {"connection": self.numbers.get(name, -1)}))

    def _check_ends(self, event: Event, actions: list[Action]) -> None:
        ended = ends(actions)
        assert not set(ended) & {each.connection for each in every(actions, Admit)}
        if isinstance(event, Gone) and event.connection in self.open:
            assert event.connection not in ended
            ended = [*ended, event.connection]
        assert len(ended) == len(set(ended))
        assert set(ended) <= self.open, "a connection ended twice"
        self.open -= set(ended)
        for connection in ended:
            self.admitted.pop(connection, None)

    def _check(self, event: Event, action: Action) -> None:
        if isinstance(action, SendChallenge):
            assert action.connection not in self.challenged
            self.challenged.add(action.connection)
        elif isinstance(action, Admit):
            self._check_admit(event, action)
        elif isinstance(action, Commit):
            assert set(action.connections) <= set(self.admitted)
            self._check_pins(action.membership)

    def _check_admit(self, event: Event, admit: Admit) -> None:
        assert isinstance(event, Applied | Reserved)
        assert event.proof_ok
        assert event.connection == admit.connection
        assert admit.connection in self.challenged
        assert admit.node not in [node for node, _ in self.admitted.values()], "a node was let in twice"
        assert admit.node not in (0, SEED.node)
        self.admitted[admit.connection] = (admit.node, event)

    def _check_pins(self, membership: Membership) -> None:
        for node, asked in self.admitted.values():
            assert membership.pin(node) == asked.fingerprint

    def check_first_commit(self, commit: Commit) -> None:
        """The moment everybody is there: everybody is in, with the rank it asked for, and told."""
        assert sorted(commit.connections) == sorted(self.admitted)
        assert sorted(member.node for member in commit.membership.members) == sorted(self._admitted("candidate"))
        assert [each.node for each in commit.membership.attendants] == self._admitted("launcher")
        for node, asked in self.admitted.values():
            if isinstance(asked, Applied) and asked.application.rank is not None:
                assert commit.membership.rank_of(node) == asked.application.rank

    def _check_due(self) -> None:
        due = self.door.machine.due(self.door.now)
        assert due is None or due >= self.door.now

    def run(self, story: Sequence[tuple[list[Event], float]]) -> None:
        for events, pause in story:
            self.door.now += pause
            for event in events:
                self.tell(event)


@given(st.integers(1, 4), stories)
def test_the_laws_hold_whatever_happens(size: int, story: list[tuple[list[Event], float]]) -> None:
    witness = Witness(a_door(size, timeout=40.0, max_pending=MAX_PENDING).machine)
    committed: Commit | None = None
    for events, pause in story:
        witness.door.now += pause
        for event in events:
            known = len(witness.door.actions)
            witness.tell(event)
            commits = every(witness.door.actions[known:], Commit)
            if committed is None and commits:
                committed = commits[0]
                witness.check_first_commit(committed)
            elif committed is not None:
                assert all(each.membership is committed.membership for each in commits)
                assert all(len(each.connections) == 1 for each in commits)
            assert (committed is None) == (witness.door.machine.membership is None)
            assert committed is not None or witness.door.machine.joined <= size  # all in, but not all ready
    assert len(every(witness.door.actions, Fail)) <= (committed is None)
    if committed is not None:
        assert committed.membership.size == size
        assert Membership.decode(committed.membership.encode()) == committed.membership


@given(st.integers(1, 3), stories)
def test_the_laws_hold_for_a_seed_that_was_started_again(size: int, story: list[tuple[list[Event], float]]) -> None:
    before = a_door(size, seed=SEED)
    for node in range(1, size + 1):
        before.join(node, fingerprint=key(1))
    assert before.machine.membership is not None
    witness = Witness(Admission.resumed(before.machine.membership, rules=DoorRules(max_pending=MAX_PENDING)))
    witness.run(story)
    for commit in every(witness.door.actions, Commit):
        assert commit.membership is before.machine.membership
        assert len(commit.connections) == 1


strangers = st.lists(
    st.one_of(
        st.builds(lambda connection: Knocked(connection, "10.6.6.6:1"), st.integers(100, 160)),
        st.builds(Greeted, st.integers(100, 160), hellos),
        st.builds(Applied, st.integers(100, 160), applications, st.just(False), keys),
        st.builds(Reserved, st.integers(100, 160), reservations, st.just(False), keys),
        st.builds(BadMessage, st.integers(100, 160), st.text(max_size=20)),
        st.builds(Gone, st.integers(100, 160), st.just("closed")),
        st.builds(Left, st.integers(100, 160)),
        st.builds(ChildDied, st.integers(100, 160), st.integers(0, 5), st.just("lies")),
        st.just(Tick()),
    ),
    max_size=30,
)


def _honest(actions: list[Action]) -> list[Action]:
    """What the machine wants done for the honest ones, whose connections are below 100."""
    alive = (SendChallenge, Admit, Refuse, Drop)
    return [action for action in actions if isinstance(action, Commit) or _is_below(action, alive)]


def _is_below(action: Action, kinds: tuple[type, ...]) -> bool:
    return isinstance(action, kinds) and getattr(action, "connection", 100) < 100


@given(st.data())
def test_nothing_a_stranger_does_changes_what_honest_ones_get(data: st.DataObject) -> None:
    alone, crowded = a_door(3, max_pending=MAX_PENDING), a_door(3, max_pending=MAX_PENDING)
    seen: set[int] = set()

    def disturb() -> None:
        for event in data.draw(strangers):
            if isinstance(event, Knocked) and event.connection in seen:
                continue
            if isinstance(event, Knocked):
                seen.add(event.connection)
            crowded.tell(event)

    for node in (1, 2, 3):
        asked = application(data.draw(st.sampled_from("ab")), data.draw(st.sampled_from([None, None, 0, 1])))
        alone.greet(node)
        alone.tell(Applied(node, asked, True, key(node)), Ready(node))
        disturb()
        crowded.greet(node)
        for silent in range(1000 * node, 1000 * node + 2 * MAX_PENDING):
            crowded.tell(Knocked(silent, "10.6.6.6:2"))  # while the honest one computes its proof
        crowded.tell(Applied(node, asked, True, key(node)))
        disturb()
        crowded.tell(Ready(node))
        disturb()
    assert _honest(crowded.actions) == _honest(alone.actions)
    assert crowded.machine.membership == alone.machine.membership
