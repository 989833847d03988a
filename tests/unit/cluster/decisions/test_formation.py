"""Children whose end is reported before the cluster has formed.

Joiners that come before an elastic cluster has formed: they wait, and come in when there is room or a checkpoint.

A membership in the making holds who was let in, and nothing of who went.

What comes of joiners while a cluster forms; the stories at the seed are in test_admission.
"""

import pytest

from nexar.cluster.decisions.admission_checks import AdmissionLimits, Compatibility, JoinConnectionState
from nexar.cluster.decisions.admission_events import (
    AdmissionTick,
    AdmitNode,
    ChildReported,
    CommitMembership,
    ConnectionEnded,
    FailFormation,
    JoinerReady,
    JoinRequested,
    RefuseConnection,
    SeedEvent,
    SeedEventKind,
)
from nexar.cluster.decisions.formation import DraftMembership, EarlyJoiners, Forming, LauncherChildren
from nexar.cluster.decisions.refusals import NoRanksLeft, Refusal, RefusalLog
from nexar.cluster.membership import Member, PinnedNode, decode_member
from nexar.wire.join import Current, ReserveRanks, WaitingJoiners
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
    notified,
    only,
)

LAUNCHER = JoinConnectionState(51, "10.0.0.9:51", hello(51, "launcher"))


def a_formation() -> DraftMembership:
    formation = DraftMembership("cluster", 2, SEED)
    formation.reserve(PinnedNode(51, key(51)), 1, 0)
    return formation


def test_one_that_died_is_waited_for_in_vain_and_one_that_ended_well_when_somebody_waits() -> None:
    children, formation = LauncherChildren({51: LAUNCHER}), a_formation()
    died = ChildReported(51, 0, "killed")
    assert children.ended(formation, LAUNCHER, died, others_wait=False) == (
        SeedEvent("child died", "10.0.0.9:51", None, 0, "killed"),
        True,
    )
    well = ChildReported(51, 0, "done", well=True)
    assert children.ended(formation, LAUNCHER, well, others_wait=True)[1]
    assert children.missing == []
    assert not children.ended(formation, LAUNCHER, well, others_wait=False)[1]
    assert children.missing == [well]
    children.forget(51)
    children.forget(51)
    assert children.missing == []


def test_one_without_a_rank_is_not_waited_for() -> None:
    children = LauncherChildren({51: LAUNCHER})
    assert not children.ended(
        DraftMembership("c", 2, SEED), LAUNCHER, ChildReported(51, 7, "killed"), others_wait=True
    )[1]


def test_nobody_reports_the_children_of_others() -> None:
    children, formation = LauncherChildren({51: LAUNCHER}), a_formation()
    with pytest.raises(Refusal, match="rank 1 as its child, which it is not"):
        children.ended(formation, LAUNCHER, ChildReported(51, 1, "killed"), others_wait=True)
    with pytest.raises(Refusal, match="is no launcher"):
        children.ended(
            formation, JoinConnectionState(52, "x", hello(52)), ChildReported(52, 0, "killed"), others_wait=True
        )


def candidate(node: int) -> JoinConnectionState:
    return JoinConnectionState(node, f"10.0.0.9:{node}", hello(node))


def early_member(node: int) -> Member:
    return Member(node, "a", key(node), {"quic": ("10.0.0.1:1",)})


# ---------------------------------------------------------------- alone


def test_who_finds_no_place_waits_up_to_the_maximum() -> None:
    early, formation = EarlyJoiners(1, AdmissionLimits(elastic=True, most=2)), DraftMembership("cluster", 1, SEED)
    assert early.admit(formation, candidate(1), early_member(1), None)
    waiting = candidate(2)
    assert not early.admit(formation, waiting, early_member(2), None)
    with pytest.raises(Refusal, match="formed of 1, 1 wait to join, and no more than 2 are allowed"):
        early.admit(formation, candidate(3), early_member(3), None)
    assert early.find(2) is waiting
    assert early.make_ready(waiting)
    assert not early.make_ready(candidate(2))  # another connection
    assert early.promote(formation) is None  # there is no place
    taken = early.take()
    assert taken is not None
    assert (taken.joiner, taken.member, taken.ready) == (waiting, early_member(2), True)
    assert early.take() is None


def test_where_the_cluster_is_not_elastic_nobody_waits() -> None:
    early, formation = EarlyJoiners(1, AdmissionLimits()), DraftMembership("cluster", 1, SEED)
    early.admit(formation, candidate(1), early_member(1), None)
    with pytest.raises(NoRanksLeft, match="all 1 places are taken"):
        early.admit(formation, candidate(2), early_member(2), None)
    with pytest.raises(NoRanksLeft):
        early.reserve(formation, PinnedNode(51, key(51)), ReserveRanks(PROOF, b"request", "a", 1, None))


def test_a_request_that_cannot_be_granted_is_refused_and_does_not_wait() -> None:
    early, formation = EarlyJoiners(2, AdmissionLimits(elastic=True)), DraftMembership("cluster", 2, SEED)
    early.admit(formation, candidate(1), early_member(1), 0)
    with pytest.raises(Refusal, match="rank 0 is held"):
        early.admit(formation, candidate(2), early_member(2), 0)
    assert early.find(2) is None


def test_who_goes_waits_no_longer_and_an_unknown_node_changes_nothing() -> None:
    early, formation = EarlyJoiners(1, AdmissionLimits(elastic=True)), DraftMembership("cluster", 1, SEED)
    for node in (1, 2, 3):
        early.admit(formation, candidate(node), early_member(node), None)
    early.withdraw(candidate(3))  # another connection of it
    assert early.find(3) is not None
    found = early.find(3)
    assert found is not None
    early.withdraw(found)
    early.withdraw(JoinConnectionState(9, "10.0.0.9:9"))
    assert early.clear() == (2,)
    assert early.take() is None


# ---------------------------------------------------------------- at the seed


def waiting_of(admission: AdmissionScene) -> list[int]:
    """Whom the members learned of last."""
    message, _ = notified(admission.actions, WaitingJoiners)[-1]
    return [decode_member(each).node for each in message.members]


def test_they_wait_at_the_seed_and_the_members_learn_of_them_when_the_cluster_has_formed() -> None:
    admission = an_admission(2, elastic=True, most=4)
    admission.reserve(51, 2)
    for node in (3, 4):
        assert only(admission.join(node), AdmitNode).node == node
    assert "no more than 4" in only(admission.join(5), RefuseConnection).reason
    admission.join(1, rank=0, launcher=51)
    actions = admission.join(2, rank=1, launcher=51)
    assert set(only(actions, CommitMembership).connections) == {1, 2, 51}  # not those who wait
    assert [to for _, to in notified(actions, Current)] == [(3,), (4,)]
    assert waiting_of(admission) == [3, 4]
    assert admission.order() == [1, 2]


def test_who_was_not_ready_is_waited_for_after_the_formation_too() -> None:
    admission = an_admission(1, elastic=True)
    admission.reserve(51, 1)
    admission.greet(3)
    admission.feed(JoinRequested(3, application(), True, key(3)))
    assert notified(admission.join(1, rank=0, launcher=51), Current) == []
    assert [to for _, to in notified(admission.feed(JoinerReady(3)), Current)] == [(3,)]
    assert waiting_of(admission) == [3]


def test_a_place_that_becomes_free_is_for_the_first_who_waits() -> None:
    admission = an_admission(2, elastic=True)
    admission.reserve(51, 1)
    admission.join(1)
    admission.join(2)
    assert admission.machine.membership is None
    commit = only(admission.feed(ConnectionEnded(51, "killed")), CommitMembership)
    assert sorted(each.node for each in commit.membership.members) == [1, 2]


def test_when_a_whole_block_becomes_free_as_many_of_those_who_wait_get_a_place() -> None:
    admission = an_admission(3, elastic=True)
    admission.reserve(51, 3)
    for node in (1, 2, 3, 4):
        admission.join(node)
    actions = admission.feed(ConnectionEnded(51, "killed"))
    commit = only(actions, CommitMembership)
    assert sorted(each.node for each in commit.membership.members) == [1, 2, 3]
    assert waiting_of(admission) == [4]


def test_who_gets_a_place_late_does_not_wait_for_children_that_have_ended() -> None:
    admission = an_admission(2, elastic=True)
    admission.reserve(51, 1)
    admission.reserve(52, 1)
    admission.join(3)
    assert every(admission.feed(ChildReported(52, 1, "it had nothing to do", well=True)), FailFormation) == []
    fail = only(admission.feed(ConnectionEnded(51, "killed")), FailFormation)
    assert any("it ended before the cluster had formed" in reason for reason in fail.refused.values())
    assert sorted(fail.connections) == [3, 52]


def test_a_launcher_that_comes_early_gets_no_ranks_and_its_children_wait() -> None:
    admission = an_admission(1, elastic=True, most=3)
    admission.reserve(51, 1)
    admit = only(admission.reserve(52, 2), AdmitNode)
    assert (admit.first_rank, admit.group_rank) == (None, None)
    assert "no more than 3" in only(admission.reserve(53, 3), RefuseConnection).reason
    admission.join(2, launcher=52)
    admission.join(1, rank=0, launcher=51)
    assert waiting_of(admission) == [2]
    admission.feed(ConnectionEnded(52, "killed"))  # it held nothing


def test_when_the_formation_fails_those_who_wait_are_notified() -> None:
    admission = an_admission(1, elastic=True)
    admission.reserve(51, 1)
    admission.join(2)
    admission.now = 61.0
    actions = admission.feed(AdmissionTick())
    assert sorted(only(actions, FailFormation).connections) == [2, 51]
    assert sorted(ends(actions)) == [2, 51]


def test_who_waits_and_comes_again_is_refused_while_its_first_connection_lives() -> None:
    admission = an_admission(1, elastic=True)
    admission.reserve(51, 1)
    admission.join(2)
    assert "has joined already" in only(admission.join(12, node=2), RefuseConnection).reason
    admission.feed(ConnectionEnded(2, "killed"))
    assert len(every(admission.join(12, node=2), AdmitNode)) == 1


def member(node: int, launcher: int = 0, address: str = "10.0.0.1:1") -> Member:
    return Member(node, "a", key(node), {"quic": (address,)}, frozenset(), launcher)


def test_it_becomes_a_membership_when_everybody_is_there() -> None:
    formation = DraftMembership("cluster", 2, SEED)
    block = formation.reserve(PinnedNode(9, key(9)), 1, None)
    formation.admit(member(1), None)
    assert not formation.is_complete
    formation.admit(member(2, launcher=9), block.first_rank)
    formation.make_ready(1)
    assert not formation.is_complete
    formation.make_ready(2)
    assert formation.is_complete
    made = formation.make_membership()
    assert (made.epoch, made.members, made.attendants, made.seed) == (
        1, (member(2, launcher=9), member(1)), (PinnedNode(9, key(9)),), SEED,
    )  # fmt: skip


def test_who_withdraws_leaves_no_trace() -> None:
    formation = DraftMembership("cluster", 1, None)
    formation.reserve(PinnedNode(9, key(9)), 1, None)
    assert formation.is_child(9, 0)
    formation.withdraw(9)
    assert not formation.is_child(9, 0)
    formation.admit(member(1), 0)
    assert (formation.rank_of(1), formation.holder(0)) == (0, 1)
    formation.withdraw(1)
    formation.admit(member(2), None)
    made = formation.make_membership()
    assert (made.members, made.attendants) == ((member(2),), ())


def test_the_id_of_the_seed_is_not_given_to_another() -> None:
    formation = DraftMembership("cluster", 2, SEED)
    with pytest.raises(Refusal, match="is the seed"):
        formation.admit(member(SEED.node), None)
    with pytest.raises(Refusal, match="is the seed"):
        formation.reserve(SEED, 1, None)


def test_nobody_takes_more_than_its_share_of_the_membership() -> None:
    formation = DraftMembership("cluster", 4000, None)
    formation.admit(member(1), None)
    with pytest.raises(Refusal, match="advertise fewer addresses"):
        formation.admit(member(2, address="x" * 300), None)
    assert formation.rank_of(2) is None


def note(kind: SeedEventKind, candidate: JoinConnectionState, reason: str = "") -> SeedEvent:
    return SeedEvent(kind, candidate.address, candidate.node, None, reason)


class Scene:
    """A cluster in the making, and who has come."""

    def __init__(self, size: int, *, elastic: bool = False) -> None:
        self.members: dict[int, JoinConnectionState] = {}
        self.launchers: dict[int, JoinConnectionState] = {}
        self.refusals = RefusalLog()
        self.forming = Forming(
            DraftMembership("cluster", size, SEED),
            size,
            AdmissionLimits(elastic=elastic),
            members=self.members,
            launchers=self.launchers,
            refusals=self.refusals,
            compatibility=Compatibility(),
            note=note,
        )

    def candidate(self, node: int) -> JoinConnectionState:
        return JoinConnectionState(node, f"10.0.0.9:{node}", hello=hello(node), fingerprint=key(node))

    def apply(self, node: int, *, ready: bool = True, epoch: int = 0) -> JoinConnectionState:
        candidate = self.candidate(node)
        self.forming.join_requested(
            candidate, hello(node), JoinRequested(node, application(epoch=epoch), True, key(node))
        )
        if ready:
            self.forming.ready(candidate)
        return candidate

    def reserve(self, node: int, count: int) -> JoinConnectionState:
        candidate = self.candidate(node)
        (admit, _) = self.forming.reserved(
            candidate, hello(node, "launcher"), ReserveRanks(PROOF, b"request", "a", count)
        )
        assert isinstance(admit, AdmitNode)
        return candidate


def test_it_is_complete_when_everybody_is_there_and_can_be_dialed() -> None:
    scene = Scene(2)
    scene.apply(1)
    late = scene.apply(2, ready=False)
    assert not scene.forming.complete
    scene.forming.ready(late)
    assert scene.forming.complete
    assert not scene.forming.failure


def test_who_goes_leaves_its_place_to_the_first_who_waits() -> None:
    scene = Scene(2, elastic=True)
    first, second = scene.apply(1), scene.apply(2, ready=False)
    scene.apply(3)
    assert set(scene.members) == {1, 2}
    scene.forming.withdrawn(second)
    assert set(scene.members) == {1, 3}
    assert scene.forming.complete  # the one who waited was ready
    assert first is scene.members[1]


def test_it_fails_when_a_child_has_died_whose_rank_nobody_else_may_have() -> None:
    scene = Scene(2)
    launcher = scene.reserve(51, 2)
    scene.forming.child_died(launcher, ChildReported(51, 1, "Traceback\nKeyError: 3"))
    assert scene.forming.failure == "rank 1 died before the cluster had formed"
    assert scene.refusals.listed()["rank 1"].endswith("KeyError: 3")


def test_it_fails_when_its_time_is_over() -> None:
    scene = Scene(2)
    scene.forming.expire(60.0)
    assert scene.forming.failure == "the cluster did not form within 60 s"


def test_a_node_comes_in_once() -> None:
    scene = Scene(2)
    scene.apply(1)
    with pytest.raises(Refusal, match="has joined already"):
        scene.apply(1)


def test_a_member_of_another_cluster_is_refused() -> None:
    with pytest.raises(Refusal, match="started without its state"):
        Scene(2).apply(1, epoch=3)


def test_who_has_not_joined_cannot_be_ready() -> None:
    scene = Scene(2)
    with pytest.raises(Refusal, match="has not joined"):
        scene.forming.ready(scene.candidate(1))
