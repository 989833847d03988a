"""Whatever happens at the seed, in any order: the laws of admission hold; unauthenticated peers change nothing."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from nexar.cluster.decisions.admission import Admission
from nexar.cluster.decisions.admission_checks import AdmissionLimits
from nexar.cluster.decisions.admission_events import (
    AdmissionAction,
    AdmissionEvent,
    AdmissionTick,
    AdmitNode,
    BadMessage,
    ChildReported,
    CommitMembership,
    ConnectionEnded,
    ConnectionOpened,
    DropConnection,
    FailFormation,
    HelloReceived,
    JoinerReady,
    JoinRequested,
    LeaveReceived,
    RanksRequested,
    RefuseConnection,
    SendChallenge,
)
from nexar.cluster.membership import Membership, decode_membership, encode_membership, pin_of
from nexar.wire.join import MAX_REFUSALS, JoinRequest, ReserveRanks
from tests.unit.cluster.decisions.admission_scene import (
    PROOF,
    SEED,
    AdmissionScene,
    an_admission,
    application,
    ends,
    every,
    hello,
    key,
)

MAX_PENDING = 3
nodes = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7, 0, SEED.node])
launchers = st.sampled_from([0, 0, 8, 9])
connections = st.integers(0, 11)
maybe_ranks = st.sampled_from([None, None, None, 0, 1, 2, 3, 5])
applications = st.builds(
    JoinRequest, st.just(PROOF), st.just(b"r"), st.sampled_from("abc"), st.just({}), maybe_ranks, launchers
)
reservations = st.builds(ReserveRanks, st.just(PROOF), st.just(b"r"), st.just("a"), st.integers(1, 3), maybe_ranks)
hellos = st.builds(hello, nodes, st.sampled_from(["candidate", "launcher", "member", "seed"]))
proofs = st.sampled_from([True, True, True, False])
keys = st.integers(1, 2).map(key)

single: st.SearchStrategy[list[AdmissionEvent]] = st.one_of(
    st.builds(lambda connection: [ConnectionOpened(connection, f"10.0.0.1:{connection}")], connections),
    st.builds(lambda *facts: [HelloReceived(*facts)], connections, hellos),
    st.builds(lambda *facts: [JoinRequested(*facts)], connections, applications, proofs, keys),
    st.builds(lambda *facts: [RanksRequested(*facts)], connections, reservations, proofs, keys),
    st.builds(lambda connection: [JoinerReady(connection)], connections),
    st.builds(lambda connection: [BadMessage(connection, "nonsense")], connections),
    st.builds(lambda connection: [ConnectionEnded(connection, "killed")], connections),
    st.builds(lambda connection: [LeaveReceived(connection)], connections),
    st.builds(lambda *facts: [ChildReported(*facts, "exit 1")], connections, st.integers(0, 9)),
    st.just([AdmissionTick()]),
)


def _joins(connection: int, node: int, asked: JoinRequest, proof: bool, shown: bytes) -> list[AdmissionEvent]:
    dial = ConnectionOpened(connection, f"10.0.0.1:{connection}")
    return [
        dial,
        HelloReceived(connection, hello(node)),
        JoinRequested(connection, asked, proof, shown),
        JoinerReady(connection),
    ]


def _reserves(connection: int, node: int, asked: ReserveRanks, shown: bytes) -> list[AdmissionEvent]:
    dial = ConnectionOpened(connection, f"10.0.0.1:{connection}")
    return [dial, HelloReceived(connection, hello(node, "launcher")), RanksRequested(connection, asked, True, shown)]


whole = st.builds(_joins, connections, nodes, applications, proofs, keys)
launch = st.builds(_reserves, connections, st.sampled_from([8, 9, 1]), reservations, keys)
stories = st.lists(
    st.tuples(st.one_of(single, whole, whole, launch), st.sampled_from([0.0, 0.0, 0.5, 4.0])), max_size=60
)


class Witness:
    """Watches an Admission and holds it to the laws."""

    def __init__(self, machine: Admission) -> None:
        self.admission = AdmissionScene(machine)
        self.open: set[int] = set()
        self.challenged: set[int] = set()
        self.admitted: dict[int, tuple[int, JoinRequested | RanksRequested]] = {}
        self.numbers: dict[int, int] = {}  # a connection of the story is used again; the machine sees a new number
        self.fresh = iter(range(10_000))

    def feed(self, event: AdmissionEvent) -> None:
        event = self._renumbered(event)
        actions = self.admission.feed(event)
        self._check_ends(event, actions)
        for action in actions:
            self._check(event, action)
        assert self.admission.machine.pending == len(self.open - set(self.admitted)) <= MAX_PENDING
        assert self.admission.machine.joined == len(self._admitted("candidate"))
        assert len(self.admission.machine.refused) <= MAX_REFUSALS
        self._check_due()

    def _admitted(self, role: str) -> list[int]:
        """Nodes with an open connection on which they were let in."""
        kind = JoinRequested if role == "candidate" else RanksRequested
        return [node for node, asked in self.admitted.values() if isinstance(asked, kind)]

    def _renumbered(self, event: AdmissionEvent) -> AdmissionEvent:
        if isinstance(event, AdmissionTick):
            return event
        name = event.connection
        if isinstance(event, ConnectionOpened):
            if self.numbers.get(name) in self.open:
                return AdmissionTick()
            self.numbers[name] = next(self.fresh)
            self.open.add(self.numbers[name])
        fields = {each: getattr(event, each) for each in event.__slots__}
        return type(event)(**(fields | {"connection": self.numbers.get(name, -1)}))

    def _check_ends(self, event: AdmissionEvent, actions: list[AdmissionAction]) -> None:
        ended = ends(actions)
        assert not set(ended) & {each.connection for each in every(actions, AdmitNode)}
        if isinstance(event, ConnectionEnded) and event.connection in self.open:
            assert event.connection not in ended
            ended = [*ended, event.connection]
        assert len(ended) == len(set(ended))
        assert set(ended) <= self.open, "a connection ended twice"
        self.open -= set(ended)
        for connection in ended:
            self.admitted.pop(connection, None)

    def _check(self, event: AdmissionEvent, action: AdmissionAction) -> None:
        if isinstance(action, SendChallenge):
            assert action.connection not in self.challenged
            self.challenged.add(action.connection)
        elif isinstance(action, AdmitNode):
            self._check_admit(event, action)
        elif isinstance(action, CommitMembership):
            assert set(action.connections) <= set(self.admitted)
            self._check_pins(action.membership)

    def _check_admit(self, event: AdmissionEvent, admit: AdmitNode) -> None:
        assert isinstance(event, JoinRequested | RanksRequested)
        assert event.proof_ok
        assert event.connection == admit.connection
        assert admit.connection in self.challenged
        assert admit.node not in [node for node, _ in self.admitted.values()], "a node was let in twice"
        assert admit.node not in (0, SEED.node)
        self.admitted[admit.connection] = (admit.node, event)

    def _check_pins(self, membership: Membership) -> None:
        for node, asked in self.admitted.values():
            assert pin_of(membership, node) == asked.fingerprint

    def check_first_commit(self, commit: CommitMembership) -> None:
        """The moment everybody is there: everybody is in, with the rank it asked for, and notified."""
        assert sorted(commit.connections) == sorted(self.admitted)
        assert sorted(member.node for member in commit.membership.members) == sorted(self._admitted("candidate"))
        assert [each.node for each in commit.membership.attendants] == self._admitted("launcher")
        for node, asked in self.admitted.values():
            if isinstance(asked, JoinRequested) and asked.application.rank is not None:
                assert commit.membership.rank_of(node) == asked.application.rank

    def _check_due(self) -> None:
        due = self.admission.machine.due(self.admission.now)
        assert due is None or due >= self.admission.now

    def run(self, story: Sequence[tuple[list[AdmissionEvent], float]]) -> None:
        for events, pause in story:
            self.admission.now += pause
            for event in events:
                self.feed(event)


@given(st.integers(1, 4), stories)
def test_the_laws_hold_whatever_happens(size: int, story: list[tuple[list[AdmissionEvent], float]]) -> None:
    witness = Witness(an_admission(size, timeout=40.0, max_pending=MAX_PENDING).machine)
    committed: CommitMembership | None = None
    for events, pause in story:
        witness.admission.now += pause
        for event in events:
            known = len(witness.admission.actions)
            witness.feed(event)
            commits = every(witness.admission.actions[known:], CommitMembership)
            if committed is None and commits:
                committed = commits[0]
                witness.check_first_commit(committed)
            elif committed is not None:
                assert all(each.membership is committed.membership for each in commits)
                assert all(len(each.connections) == 1 for each in commits)
            assert (committed is None) == (witness.admission.machine.membership is None)
            assert committed is not None or witness.admission.machine.joined <= size  # all in, but not all ready
    assert len(every(witness.admission.actions, FailFormation)) <= (committed is None)
    if committed is not None:
        assert committed.membership.size == size
        assert decode_membership(encode_membership(committed.membership)) == committed.membership


@given(st.integers(1, 3), stories)
def test_the_laws_hold_for_a_seed_that_was_started_again(
    size: int, story: list[tuple[list[AdmissionEvent], float]]
) -> None:
    before = an_admission(size, seed=SEED)
    for node in range(1, size + 1):
        before.join(node, fingerprint=key(1))
    assert before.machine.membership is not None
    witness = Witness(Admission.resumed(before.machine.membership, limits=AdmissionLimits(max_pending=MAX_PENDING)))
    witness.run(story)
    for commit in every(witness.admission.actions, CommitMembership):
        assert commit.membership is before.machine.membership
        assert len(commit.connections) == 1


strangers = st.lists(
    st.one_of(
        st.builds(lambda connection: ConnectionOpened(connection, "10.6.6.6:1"), st.integers(100, 160)),
        st.builds(HelloReceived, st.integers(100, 160), hellos),
        st.builds(JoinRequested, st.integers(100, 160), applications, st.just(False), keys),
        st.builds(RanksRequested, st.integers(100, 160), reservations, st.just(False), keys),
        st.builds(BadMessage, st.integers(100, 160), st.text(max_size=20)),
        st.builds(ConnectionEnded, st.integers(100, 160), st.just("closed")),
        st.builds(LeaveReceived, st.integers(100, 160)),
        st.builds(ChildReported, st.integers(100, 160), st.integers(0, 5), st.just("lies")),
        st.just(AdmissionTick()),
    ),
    max_size=30,
)


def _honest(actions: list[AdmissionAction]) -> list[AdmissionAction]:
    """What the machine wants done for the honest ones, whose connections are below 100."""
    alive = (SendChallenge, AdmitNode, RefuseConnection, DropConnection)
    return [action for action in actions if isinstance(action, CommitMembership) or _is_below(action, alive)]


def _is_below(action: AdmissionAction, kinds: tuple[type, ...]) -> bool:
    return isinstance(action, kinds) and getattr(action, "connection", 100) < 100


@given(st.data())
def test_nothing_an_unauthenticated_peer_does_changes_what_honest_ones_get(data: st.DataObject) -> None:
    alone, crowded = an_admission(3, max_pending=MAX_PENDING), an_admission(3, max_pending=MAX_PENDING)
    seen: set[int] = set()

    def disturb() -> None:
        for event in data.draw(strangers):
            if isinstance(event, ConnectionOpened) and event.connection in seen:
                continue
            if isinstance(event, ConnectionOpened):
                seen.add(event.connection)
            crowded.feed(event)

    for node in (1, 2, 3):
        asked = application(data.draw(st.sampled_from("ab")), data.draw(st.sampled_from([None, None, 0, 1])))
        alone.greet(node)
        alone.feed(JoinRequested(node, asked, True, key(node)), JoinerReady(node))
        disturb()
        crowded.greet(node)
        for silent in range(1000 * node, 1000 * node + 2 * MAX_PENDING):
            crowded.feed(ConnectionOpened(silent, "10.6.6.6:2"))  # while the honest one computes its proof
        crowded.feed(JoinRequested(node, asked, True, key(node)))
        disturb()
        crowded.feed(JoinerReady(node))
        disturb()
    assert _honest(crowded.actions) == _honest(alone.actions)
    assert crowded.machine.membership == alone.machine.membership
