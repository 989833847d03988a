"""How a cluster forms: who is let in with what, who is turned away and informed why, and when everybody is there.

While the cluster forms: children that end without coming, who comes from another cluster, and who only looks.

After the commit: late ones are informed, members come and go, and a restarted seed knows its members again.

Between the commit of the first membership and its start: all members go on, or none.

Which failure stops a run on all hosts.
"""

import pytest

from nexar.cluster.decisions.admission import START_TIMEOUT, Admission
from nexar.cluster.decisions.admission_checks import MAX_OBSERVERS, WRONG_SECRET, JoinConnectionState
from nexar.cluster.decisions.admission_events import (
    AdmissionTick,
    AdmitNode,
    BadMessage,
    BoardRequested,
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
    MemberConnected,
    NotifyConnections,
    ProgressRequested,
    RanksRequested,
    RefuseConnection,
    RunFailureReported,
    SeedEvent,
    SendChallenge,
    StartCluster,
    StartFailureReported,
)
from nexar.cluster.decisions.failure_detector import OwnDelay
from nexar.cluster.membership import MAX_MEMBERS, decode_membership, encode_membership, pin_of
from nexar.errors import InternalError, UsageError
from nexar.types import format_node
from nexar.wire.join import FormationProgress, JoinRequest, ReserveRanks, Started
from nexar.wire.join import RunFailed as Message
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
    notes,
    notified,
    only,
)

# ---------------------------------------------------------------- the good story


def test_a_hello_is_answered_by_a_challenge() -> None:
    assert an_admission(2).greet(1) == [SeedEvent("knocked", "10.0.0.9:1"), SendChallenge(1)]


def test_a_candidate_with_the_secret_is_admitted_and_waits_for_the_others() -> None:
    admission = an_admission(2)
    actions = admission.join(1)
    assert only(actions, AdmitNode) == AdmitNode(1, 1, "10.0.0.9:1", 2)
    assert not every(actions, CommitMembership)
    assert (admission.machine.joined, admission.machine.pending, admission.machine.membership) == (1, 0, None)


def test_the_membership_is_committed_at_once_when_the_last_one_comes_and_never_again() -> None:
    admission = an_admission(3)
    for connection, host in ((1, "a"), (2, "b"), (3, "a")):
        actions = admission.join(connection, host=host)
    commit = only(actions, CommitMembership)
    assert commit.connections == (1, 2, 3)
    membership = commit.membership
    assert (membership.cluster, membership.epoch, membership.size, membership.seed) == ("cluster", 1, 3, SEED)
    assert admission.order() == [1, 3, 2]
    assert membership.member(2).capabilities == {"quic", "tls"}
    assert pin_of(membership, 2) == key(2)
    assert membership is admission.machine.membership
    admission.feed(ConnectionEnded(3, "killed"))
    admission.join(4)
    admission.now = 100.0
    admission.feed(AdmissionTick())
    assert len(every(admission.actions, CommitMembership)) == 1
    assert not every(admission.actions, FailFormation)


def test_candidates_get_the_ranks_they_bring() -> None:
    admission = an_admission(3)
    assert only(admission.join(1, rank=2), AdmitNode).rank == 2
    admission.join(2)
    admission.join(3, rank=0)
    assert admission.order() == [3, 2, 1]


def test_a_rank_that_is_taken_is_refused_naming_the_holder_who_keeps_it() -> None:
    admission = an_admission(2)
    admission.join(1, rank=1)
    assert only(admission.join(2, rank=1), RefuseConnection).reason.startswith(
        f"rank 1 is held by node {format_node(1)};"
    )
    assert "outside 0..1" in only(admission.join(3, rank=2), RefuseConnection).reason
    admission.join(4)
    assert admission.order() == [4, 1]


@pytest.mark.parametrize("size", [-1, 0, MAX_MEMBERS + 1])
def test_a_size_that_no_cluster_has_is_refused_at_once(size: int) -> None:
    with pytest.raises(UsageError, match=f"1 to {MAX_MEMBERS}"):
        an_admission(size)


# ---------------------------------------------------------------- launchers


def test_launchers_get_blocks_and_their_children_exactly_their_ranks() -> None:
    admission = an_admission(4)
    first, second = only(admission.reserve(51, 2), AdmitNode), only(admission.reserve(52, 2), AdmitNode)
    assert (first.first_rank, first.group_rank, first.size) == (0, 0, 4)
    assert (second.first_rank, second.group_rank) == (2, 1)
    for connection, rank, launcher in ((1, 3, 52), (2, 0, 51), (3, 1, 51)):
        assert only(admission.join(connection, rank=rank, launcher=launcher), AdmitNode).rank == rank
    commit = only(admission.join(4, rank=2, launcher=52), CommitMembership)
    assert admission.order() == [2, 3, 4, 1]
    assert [attendant.node for attendant in commit.membership.attendants] == [51, 52]
    assert sorted(commit.connections) == [1, 2, 3, 4, 51, 52]
    assert commit.membership.member(0).launcher == 51


def test_reserved_ranks_are_for_nobody_else() -> None:
    admission = an_admission(2)
    admission.reserve(51, 2)
    assert "reserved by launcher" in only(admission.join(1, rank=0), RefuseConnection).reason
    assert "taken or reserved" in only(admission.join(2), RefuseConnection).reason
    assert "taken or reserved" in only(admission.reserve(52, 1), RefuseConnection).reason


def test_a_block_is_returned_when_its_launcher_goes_before_the_commit() -> None:
    admission = an_admission(2)
    admission.reserve(51, 2)
    admission.feed(ConnectionEnded(51, "killed"))
    admission.join(1, rank=0)
    commit = only(admission.join(2), CommitMembership)
    assert commit.membership.attendants == ()


def test_the_rank_of_a_dead_child_is_kept_for_the_next_one() -> None:
    admission = an_admission(2)
    admission.reserve(51, 2)
    admission.join(1, rank=0, launcher=51)
    gone = admission.feed(ConnectionEnded(1, "killed"))
    assert only(gone, SeedEvent) == SeedEvent("gone", "10.0.0.9:1", 1, 0, "killed")
    assert every(admission.join(2, rank=0), RefuseConnection)
    admission.join(3, rank=0, launcher=51)
    admission.join(4, rank=1, launcher=51)
    assert admission.order() == [3, 4]


def test_a_child_that_dies_before_the_commit_fails_the_formation_at_once_and_is_named() -> None:
    admission = an_admission(2)
    admission.reserve(51, 2)
    admission.join(1, rank=1, launcher=51)
    admission.now = 3.0
    actions = admission.feed(ChildReported(51, 0, "Traceback …\nImportError: no module named x\n"))
    assert actions[0].reason.startswith("Traceback")
    fail = only(actions, FailFormation)
    assert fail.timeout == 3.0
    assert fail.refused == {"rank 0": "it died before the cluster had formed: ImportError: no module named x"}
    assert set(fail.connections) == {51, 1}
    assert (
        only(admission.feed(ConnectionOpened(7, "10.0.0.9:7")), RefuseConnection).reason
        == "rank 0 died before the cluster had formed"
    )


def test_nobody_learns_of_the_others_before_all_of_them_can_be_dialed() -> None:
    admission = an_admission(2)
    admission.join(1)
    assert not every(
        admission.greet(2) + admission.feed(JoinRequested(2, application(), True, key(2))), CommitMembership
    )
    assert set(only(admission.feed(JoinerReady(2)), CommitMembership).connections) == {1, 2}
    assert admission.feed(JoinerReady(2)) == []


def test_who_was_ready_and_goes_is_waited_for_again() -> None:
    admission = an_admission(2)
    admission.join(1)
    admission.feed(ConnectionEnded(1, "killed"))
    admission.join(2)
    admission.greet(3)
    assert not every(admission.feed(JoinRequested(3, application(), True, key(3))), CommitMembership)
    assert every(admission.feed(JoinerReady(3)), CommitMembership)


def test_who_never_became_ready_is_named_when_the_formation_fails() -> None:
    admission = an_admission(2)
    admission.join(1)
    admission.greet(2)
    admission.feed(JoinRequested(2, application(), True, key(2)))
    admission.now = 60.0
    first, second = only(admission.feed(AdmissionTick()), FailFormation).joined
    assert not first.endswith("(admitted, but not ready)")
    assert second.endswith("(admitted, but not ready)")


def test_only_who_has_joined_can_be_ready() -> None:
    admission = an_admission(2)
    admission.greet(1)
    assert "has not joined" in only(admission.feed(JoinerReady(1)), RefuseConnection).reason
    admission.reserve(2, 1)
    assert "has not joined" in only(admission.feed(JoinerReady(2)), RefuseConnection).reason


def test_a_launcher_reports_its_dead_children_after_the_commit() -> None:
    admission = an_admission(1)
    admission.reserve(51, 1)
    admission.join(1, rank=0, launcher=51)
    traceback = "Traceback\n" + "  line\n" * 100
    assert admission.feed(ChildReported(51, 0, traceback)) == [SeedEvent("child died", "10.0.0.9:51", 1, 0, traceback)]


@pytest.mark.parametrize("committed", [False, True])
def test_nobody_reports_the_children_of_others(committed: bool) -> None:
    admission = an_admission(2)
    admission.reserve(51, 1)
    admission.reserve(52, 1)
    admission.join(1, rank=0, launcher=51)
    if committed:
        admission.join(2, rank=1, launcher=52)
    assert "which it is not" in only(admission.feed(ChildReported(52, 0, "lies")), RefuseConnection).reason
    assert "which it is not" in only(admission.feed(ChildReported(51, 7, "lies")), RefuseConnection).reason
    assert "no launcher" in only(admission.feed(ChildReported(1, 0, "lies")), RefuseConnection).reason


# ---------------------------------------------------------------- wrong ones


def test_a_wrong_proof_is_refused_and_changes_nothing() -> None:
    admission = an_admission(1)
    assert only(admission.join(1, knows_secret=False), RefuseConnection) == RefuseConnection(
        1, WRONG_SECRET, code="wrong_secret"
    )
    assert only(admission.reserve(2, 1, ok=False), RefuseConnection) == RefuseConnection(
        2, WRONG_SECRET, code="wrong_secret"
    )
    assert only(admission.join(3, node=1), CommitMembership).connections == (3,)


def test_the_same_node_is_refused_while_its_first_connection_lives() -> None:
    admission = an_admission(2)
    admission.join(1, node=7)
    assert (
        only(admission.join(2, node=7), RefuseConnection).reason
        == f"node {format_node(7)} has joined already, from 10.0.0.9:1"
    )
    assert every(admission.reserve(3, 1, node=7), RefuseConnection)
    assert admission.machine.joined == 1
    admission.feed(ConnectionEnded(1, "killed"))
    assert every(admission.join(4, node=7), AdmitNode)


def test_saying_a_name_first_keeps_nobody_out() -> None:
    admission = an_admission(1)
    admission.greet(1, node=7)
    assert every(admission.join(2, node=7), CommitMembership)


def test_nobody_is_the_seed() -> None:
    admission = an_admission(1)
    assert "is the seed" in only(admission.join(1, node=SEED.node), RefuseConnection).reason
    assert "is the seed" in only(admission.reserve(2, 1, node=SEED.node), RefuseConnection).reason


def test_messages_out_of_order_are_refused() -> None:
    admission = an_admission(4)
    knocked = ConnectionOpened(1, "x")
    assert (
        "before it sent its hello"
        in only(admission.feed(knocked, JoinRequested(1, application(), True, key(1))), RefuseConnection).reason
    )
    admission.greet(2)
    assert "hello twice" in only(admission.feed(HelloReceived(2, hello(2))), RefuseConnection).reason
    admission.join(3)
    assert "twice" in only(admission.feed(JoinRequested(3, application(), True, key(3))), RefuseConnection).reason
    admission.greet(4, role="launcher")
    assert (
        "its hello says launcher"
        in only(admission.feed(JoinRequested(4, application(), True, key(4))), RefuseConnection).reason
    )
    admission.greet(5)
    reserve = ReserveRanks(PROOF, b"r", "a", 1)
    assert (
        "its hello says candidate"
        in only(admission.feed(RanksRequested(5, reserve, True, key(5))), RefuseConnection).reason
    )
    assert admission.machine.joined == admission.machine.pending == 0


def test_a_hello_of_no_node_or_another_role_is_refused() -> None:
    admission = an_admission(1)
    assert "names no node" in only(admission.greet(1, node=0), RefuseConnection).reason
    assert "a member cannot join" in only(admission.greet(2, role="member"), RefuseConnection).reason
    assert "a seed cannot join" in only(admission.greet(3, role="seed"), RefuseConnection).reason


def test_a_bad_message_is_refused_with_its_reason_on_one_line() -> None:
    admission = an_admission(1)
    admission.feed(ConnectionOpened(1, "10.0.0.9:1"))
    actions = admission.feed(BadMessage(1, "nonsense\nall is well"))
    assert actions == [
        RefuseConnection(1, "nonsense all is well"),
        SeedEvent("refused", "10.0.0.9:1", None, None, "nonsense all is well"),
    ]
    assert admission.machine.refused == {"a peer at 10.0.0.9:1": "nonsense all is well"}


def test_a_candidate_that_would_make_the_membership_too_large_is_refused() -> None:
    admission = an_admission(1000)
    many = JoinRequest(PROOF, b"r", "a", {"quic": tuple(f"{'x' * 48}:1" for _ in range(60))})
    admission.greet(1)
    assert (
        "advertise fewer addresses"
        in only(admission.feed(JoinRequested(1, many, True, key(1))), RefuseConnection).reason
    )


def test_what_a_connection_says_after_its_end_is_ignored() -> None:
    admission = an_admission(1)
    admission.join(1, knows_secret=False)
    assert (
        admission.feed(
            HelloReceived(1, hello(1)),
            ConnectionEnded(1, "closed"),
            LeaveReceived(1),
            BadMessage(1, "x"),
            ChildReported(1, 0, ""),
        )
        == []
    )
    assert admission.feed(ConnectionEnded(77, "never seen")) == []


def test_a_connection_number_is_used_once() -> None:
    admission = an_admission(1)
    admission.feed(ConnectionOpened(1, "x"))
    with pytest.raises(InternalError, match="was opened twice"):
        admission.feed(ConnectionOpened(1, "x"))


# ---------------------------------------------------------------- limits and time


def test_when_too_many_are_pending_the_source_with_the_most_gives_way() -> None:
    admission = an_admission(1, max_pending=4)
    admission.greet(1)
    admission.feed(*[ConnectionOpened(connection, f"10.6.6.6:{connection}") for connection in (2, 3, 4)])
    actions = admission.feed(ConnectionOpened(5, "10.7.7.7:5"))
    assert "too many" in only(actions, DropConnection).reason
    assert ends(actions) == [2]
    assert admission.machine.pending == 4
    assert every(admission.feed(JoinRequested(1, application(), True, key(1)), JoinerReady(1)), CommitMembership)


def test_when_too_many_are_pending_a_newcomer_of_the_largest_source_is_dropped_and_may_come_again() -> None:
    admission = an_admission(1, max_pending=4)
    admission.feed(*[ConnectionOpened(connection, f"10.6.6.6:{connection}") for connection in (1, 2, 3, 4)])
    actions = admission.feed(ConnectionOpened(5, "10.6.6.6:5"))
    assert "too many" in only(actions, DropConnection).reason
    assert ends(actions) == [5]
    admission.now = 1.0
    assert ends(admission.feed(ConnectionOpened(6, "10.6.6.6:6"))) == [1]


def test_two_hundred_silent_ones_delay_nobody() -> None:
    admission = an_admission(4, max_pending=16)
    for connection in range(1000, 1200):
        admission.feed(ConnectionOpened(connection, f"10.6.6.6:{connection}"))
    for connection in range(1, 5):
        actions = admission.join(connection)
    assert every(actions, CommitMembership)
    assert admission.machine.pending <= 16


def test_who_does_not_authenticate_in_time_is_dropped() -> None:
    admission = an_admission(1)
    admission.feed(ConnectionOpened(1, "one"))
    admission.now = 4.0
    admission.feed(ConnectionOpened(2, "two"))
    assert admission.machine.due(admission.now) == 10.0
    admission.now = 10.0
    actions = admission.feed(AdmissionTick())
    assert only(actions, DropConnection) == DropConnection(1, "it did not authenticate within 10 s")
    assert notes(actions) == ["dropped"]
    assert admission.machine.due(admission.now) == 14.0
    assert admission.machine.due(20.0) == 20.0


def test_who_says_hello_has_a_third_of_the_time_for_its_proof() -> None:
    admission = an_admission(1, auth_timeout=9.0)
    admission.feed(ConnectionOpened(1, "one"))
    admission.now = 2.0
    admission.feed(HelloReceived(1, hello(1)))
    assert admission.machine.due(admission.now) == 5.0
    admission.now = 5.0
    actions = admission.feed(AdmissionTick())
    assert only(actions, DropConnection) == DropConnection(
        1, "it did not prove within 3 s of its hello that it may join"
    )


def test_a_late_hello_buys_no_time() -> None:
    admission = an_admission(1, auth_timeout=9.0)
    admission.feed(ConnectionOpened(1, "one"))
    admission.now = 8.0
    admission.feed(HelloReceived(1, hello(1)))
    assert admission.machine.due(admission.now) == 9.0


REMEDY = "start all ranks at about the same time, or raise NEXAR_FORMATION_TIMEOUT_SECS"


def test_a_formation_that_takes_too_long_fails_and_says_who_came_and_who_was_refused() -> None:
    admission = an_admission(3, timeout=5.0)
    admission.join(1, rank=1)
    admission.reserve(51, 1)
    admission.join(2, knows_secret=False)
    admission.feed(ConnectionOpened(3, "three"))
    assert admission.machine.due(0.0) == 5.0
    admission.now = 5.0
    actions = admission.feed(AdmissionTick())
    fail = only(actions, FailFormation)
    assert fail.joined == (f"rank 1 (node {format_node(1)} at 10.0.0.9:1)",)
    assert (fail.expected, fail.timeout, fail.refused_count) == (3, 5.0, 2)
    assert fail.refused == {
        f"node {format_node(2)} at 10.0.0.9:2": WRONG_SECRET,
        "a peer at three": f"the cluster did not form within 5 s; {REMEDY}",
    }
    (failed,) = [each for each in every(actions, SeedEvent) if each.kind == "failed"]
    assert failed.reason == f"the cluster did not form within 5 s, 1 of 3 joined; {REMEDY}"
    assert fail.connections == (1, 51)
    assert ends(actions) == [3, 1, 51]
    assert admission.machine.failed
    assert admission.machine.due(5.0) is None
    assert "did not form" in only(admission.feed(ConnectionOpened(9, "nine")), RefuseConnection).reason
    assert admission.feed(AdmissionTick(), ConnectionEnded(1, "closed"), ConnectionEnded(51, "closed")) == []


def test_a_formation_has_longer_by_the_own_delay_of_a_seed_that_runs_slowly() -> None:
    """A timer of the seed is 0.5 s late every second: ten turns of threads take 5 s longer."""
    measured = OwnDelay()
    admission = an_admission(2, timeout=5.0, own_delay=lambda: measured.seconds)
    admission.join(1, rank=0)
    for second in range(1, 10):
        measured.timer_ran(float(second), second + 0.5)
        admission.now = second + 0.5
        assert not every(admission.feed(AdmissionTick()), FailFormation)
    assert admission.machine.due(admission.now) == pytest.approx(10.0)
    assert every(admission.join(2, rank=1), CommitMembership), "it came late, and the seed was late by as much"


def test_a_formation_that_takes_too_long_at_a_seed_that_runs_slowly_fails_at_the_extended_time_and_names_it() -> None:
    delay = 4.0
    admission = an_admission(2, timeout=5.0, own_delay=lambda: delay)
    admission.join(1, rank=0)
    admission.now = 8.9
    assert not every(admission.feed(AdmissionTick()), FailFormation)
    admission.now = 9.0
    actions = admission.feed(AdmissionTick())
    assert only(actions, FailFormation).timeout == 9.0
    (failed,) = [each for each in every(actions, SeedEvent) if each.kind == "failed"]
    assert failed.reason.startswith("the cluster did not form within 9 s")


def test_a_formation_ends_on_time_when_the_delay_of_the_seed_is_over() -> None:
    delays = [4.0]
    admission = an_admission(2, timeout=5.0, own_delay=lambda: delays[-1])
    admission.join(1, rank=0)
    admission.now = 5.0
    assert not every(admission.feed(AdmissionTick()), FailFormation)
    delays.append(0.0)
    assert admission.machine.due(5.5) == 5.5
    admission.now = 5.5
    assert only(admission.feed(AdmissionTick()), FailFormation).timeout == 5.0


def test_a_candidate_that_is_gone_before_the_commit_frees_its_place() -> None:
    admission = an_admission(2)
    admission.join(1, rank=0)
    assert notes(admission.feed(ConnectionEnded(1, "killed"))) == ["gone"]
    admission.join(2, rank=0)
    left = admission.feed(LeaveReceived(2, "changed my mind"))
    assert ends(left) == [2]
    assert notes(left) == ["left"]
    admission.join(3)
    admission.join(4)
    assert admission.order() == [3, 4]


def test_a_child_that_ended_without_coming_ends_the_formation_as_soon_as_somebody_waits() -> None:
    ended = ChildReported(51, 1, "ended with exit code 0", well=True)
    for before in (True, False):
        admission = an_admission(2)
        admission.reserve(51, 2)
        for has_ended in (before, not before):
            assert not admission.machine.failed
            if has_ended:
                admission.feed(ended)
            else:
                admission.join(1, rank=0, launcher=51)
        fail = only(admission.actions, FailFormation)
        cause = "it ended before the cluster had formed: ended with exit code 0; every rank must call nexar.init()"
        assert fail.refused["rank 1"] == cause
        assert fail.connections == (1, 51)


def test_children_that_want_nothing_of_the_cluster_end_nothing() -> None:
    admission = an_admission(2)
    admission.reserve(51, 2)
    for rank in (0, 1):
        assert notes(admission.feed(ChildReported(51, rank, "ended with exit code 0", well=True))) == ["child died"]
    admission.feed(LeaveReceived(51))
    assert not admission.machine.failed
    admission.join(1)
    assert every(admission.join(2), CommitMembership)


def test_members_of_a_seed_that_was_here_before_are_not_taken_for_new_ones() -> None:
    admission = an_admission(2)
    asked = ReserveRanks(PROOF, b"request", "a", 1, None, 1)
    launcher = admission.greet(2, role="launcher") + admission.feed(RanksRequested(2, asked, True, key(2)))
    for actions in (admission.join(1, epoch=3), launcher):
        assert "started without its state" in only(actions, RefuseConnection).reason
    assert admission.machine.joined == 0


def test_who_only_looks_is_notified_that_the_cluster_did_not_form_and_is_forgotten() -> None:
    admission = an_admission(1, timeout=1.0)
    for connection in range(MAX_OBSERVERS):
        admission.greet(connection, node=connection + 1, role="onlooker")
        admission.feed(BoardRequested(connection, proof_ok=True))
    admission.now = 2.0
    refused = every(admission.feed(AdmissionTick()), RefuseConnection)
    assert [each.connection for each in refused] == list(range(MAX_OBSERVERS))
    (reason,) = {each.reason for each in refused}
    assert reason.startswith("the cluster did not form within 1 s\n")
    assert "NEXAR_FORMATION_TIMEOUT_SECS" in reason
    admission.machine._observers.enter(JoinConnectionState(99, "10.0.0.9:99"))  # there is room again


LATE = "the cluster has formed with 2 members and is not elastic"


def formed() -> AdmissionScene:
    admission = an_admission(2)
    admission.reserve(51, 1)
    admission.join(1, rank=0, launcher=51)
    admission.join(2)
    assert admission.machine.membership is not None
    return admission


def resumed() -> AdmissionScene:
    membership = formed().machine.membership
    assert membership is not None
    return AdmissionScene(Admission.resumed(decode_membership(encode_membership(membership))))


def test_late_joiners_are_refused_with_the_reason_once_they_know_the_secret() -> None:
    for admission in (formed(), resumed()):
        assert only(admission.join(3), RefuseConnection).reason == LATE
        assert only(admission.reserve(4, 1), RefuseConnection).reason == LATE
        assert only(admission.join(5, knows_secret=False), RefuseConnection).reason != LATE


def test_a_second_process_of_a_rank_is_notified_that_it_is_the_second() -> None:
    for admission in (formed(), resumed()):
        reason = only(admission.join(3, rank=0, launcher=51), RefuseConnection).reason
        assert reason == f"{LATE}; rank 0 is one of them: nexar.init() is called once for each rank"


def test_members_that_end_are_noted_with_their_rank_and_the_membership_stays() -> None:
    admission = formed()
    assert only(admission.feed(ConnectionEnded(1, "killed")), SeedEvent) == SeedEvent(
        "gone", "10.0.0.9:1", 1, 0, "killed"
    )
    left = admission.feed(LeaveReceived(2, "done"))
    assert only(left, SeedEvent) == SeedEvent("left", "10.0.0.9:2", 2, 1, "done")
    assert ends(left) == [2]
    assert notes(admission.feed(ConnectionEnded(51, "killed"))) == ["gone"]
    assert admission.machine.joined == 0
    assert admission.order() == [1, 2]


def test_a_formed_cluster_never_fails() -> None:
    for admission in (formed(), resumed()):
        assert admission.machine.due(0.0) is None
        admission.now = 1e9
        assert admission.feed(AdmissionTick()) == []
        assert not admission.machine.failed


def test_a_restarted_seed_welcomes_the_members_it_pins() -> None:
    admission = resumed()
    for connection, node, rank in ((11, 2, 1), (12, 1, 0)):
        actions = admission.join(connection, node=node)
        assert only(actions, AdmitNode).rank == rank
        assert only(actions, CommitMembership).connections == (connection,)
        assert only(actions, CommitMembership).membership == admission.machine.membership
        assert notes(actions) == ["knocked", "returned"]
    assert only(admission.reserve(13, 1, node=51), CommitMembership).connections == (13,)
    assert admission.machine.joined == 2


def test_another_key_or_another_role_does_not_pass_for_a_member() -> None:
    admission = resumed()
    assert "known with another key" in only(admission.join(11, node=1, fingerprint=b"x" * 32), RefuseConnection).reason
    assert only(admission.join(12, node=51), RefuseConnection).reason == LATE
    assert only(admission.reserve(13, 1, node=1), RefuseConnection).reason == LATE
    assert only(admission.join(14, node=SEED.node, fingerprint=SEED.fingerprint), RefuseConnection).reason == LATE
    assert "ticket or token" in only(admission.join(15, node=1, knows_secret=False), RefuseConnection).reason
    assert admission.machine.joined == 0


def test_a_member_whose_line_broke_unnoticed_comes_back_on_another() -> None:
    admission = formed()
    actions = admission.join(21, node=1)
    assert only(actions, DropConnection).connection == 1
    assert every(actions, CommitMembership)
    assert admission.feed(ConnectionEnded(1, "closed")) == []
    assert only(admission.feed(ConnectionEnded(21, "killed")), SeedEvent).rank == 0
    assert admission.machine.joined == 1


RANKS = (1, 2, 3)


def join(admission: AdmissionScene, connection: int, rank: int | None = None, **more: object) -> list[object]:
    """A candidate that confirms, with more in its application."""
    facts: dict[str, object] = {"confirms": True, "addresses": {"quic": ("10.0.0.1:1",)}, **more}
    clock = float(facts.pop("seed_clock", 0.0))  # type: ignore[arg-type]
    asked = JoinRequest(PROOF, b"request", "a", rank=rank, **facts)  # type: ignore[arg-type]
    applied = JoinRequested(connection, asked, True, key(connection), clock)
    return [*admission.greet(connection), *admission.feed(applied, JoinerReady(connection))]


def committed(own_delay: float = 0.0) -> AdmissionScene:
    admission = an_admission(3, own_delay=lambda: own_delay)
    for connection in RANKS:
        join(admission, connection, rank=connection - 1)
    return admission


def test_the_cluster_starts_when_every_member_is_connected() -> None:
    admission = committed()
    assert not only(admission.actions, CommitMembership).starts
    assert not every(admission.feed(MemberConnected(1), MemberConnected(3), MemberConnected(3)), StartCluster)
    start = only(admission.feed(MemberConnected(2)), StartCluster)
    assert (start.membership, set(start.connections)) == (admission.machine.membership, {1, 2, 3})
    assert start.present == {1, 2, 3}
    assert admission.machine.due(0.0) is None


def test_members_that_do_not_confirm_start_with_the_commit() -> None:
    admission = an_admission(2)
    admission.join(1)
    assert only(admission.join(2), CommitMembership).starts


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (ConnectionEnded(2, "killed"), "rank 1 was lost before the cluster had started: killed"),
        (LeaveReceived(2), "rank 1 was lost before the cluster had started: it left"),
        (StartFailureReported(2, "rank 1 cannot connect to rank 2"), "rank 1 cannot connect to rank 2"),
    ],
    ids=["killed", "left", "not connected"],
)
@pytest.mark.parametrize("after", [(), (MemberConnected(1), MemberConnected(2))], ids=["nobody", "two"])
def test_the_loss_of_a_member_before_the_start_is_reported_to_every_member(
    event: ConnectionEnded | LeaveReceived | StartFailureReported, reason: str, after: tuple[MemberConnected, ...]
) -> None:
    admission = committed()
    admission.feed(*after)
    actions = admission.feed(event)
    fail = only(actions, FailFormation)
    assert fail.reason == reason
    assert set(fail.connections) >= {1, 3}
    assert "failed" in notes(actions)
    assert admission.machine.failed
    assert admission.machine.membership is None
    assert not every(admission.feed(MemberConnected(1), MemberConnected(3)), StartCluster)


def test_the_death_of_a_child_before_the_start_is_reported_to_every_member_and_launcher() -> None:
    admission = an_admission(2)
    admission.reserve(9, 2)
    for connection in (1, 2):
        join(admission, connection, rank=connection - 1, launcher=9)
    fail = only(admission.feed(ChildReported(9, 1, "Traceback\nValueError: no")), FailFormation)
    assert fail.reason == "rank 1 was lost before the cluster had started: ValueError: no"
    assert set(fail.connections) == {1, 2, 9}


def test_who_does_not_connect_in_time_is_named() -> None:
    admission = committed()
    admission.feed(MemberConnected(1))
    admission.now = 60.0
    assert admission.machine.due(0.0) == 60.0
    assert (
        only(admission.feed(AdmissionTick()), FailFormation).reason
        == "ranks 1, 2 did not connect to the other ranks within 60 s"
    )


def test_members_have_longer_to_connect_by_the_own_delay_of_a_seed_that_runs_slowly() -> None:
    admission = committed(own_delay=15.0)
    admission.feed(MemberConnected(1), MemberConnected(2))
    assert admission.machine.due(0.0) == 75.0
    admission.now = 74.0
    assert not every(admission.feed(AdmissionTick()), FailFormation)
    assert admission.machine.forms
    only(admission.feed(MemberConnected(3)), StartCluster)
    assert not admission.machine.forms


def test_members_of_a_cluster_that_formed_late_have_time_to_connect() -> None:
    admission = an_admission(1, timeout=5.0)
    admission.now = 4.9
    join(admission, 1, rank=0)
    admission.now = 5.0 + START_TIMEOUT / 2
    assert not every(admission.feed(AdmissionTick()), FailFormation)
    assert only(admission.feed(MemberConnected(1)), StartCluster)


def test_a_member_that_has_lost_its_line_since_the_start_is_notified_again() -> None:
    admission = committed()
    admission.feed(*map(MemberConnected, RANKS))
    assert not every(admission.feed(ConnectionEnded(2, "its line broke")), FailFormation)
    join(admission, 4, epoch=1)
    assert notified(admission.feed(MemberConnected(3)), Started) == [(Started(), (3,))]


def test_who_dials_after_the_start_has_failed_is_notified_why() -> None:
    admission = committed()
    admission.feed(ConnectionEnded(2, "killed"))
    assert only(admission.greet(7), RefuseConnection).reason == "rank 1 was lost before the cluster had started: killed"


def test_a_candidate_that_dies_before_the_commit_is_replaced() -> None:
    admission = an_admission(3)
    join(admission, 1, rank=0)
    join(admission, 2, rank=1)
    admission.feed(ConnectionEnded(2, "killed"))
    join(admission, 3, rank=1)
    join(admission, 4, rank=2)
    only(admission.feed(MemberConnected(1), MemberConnected(3), MemberConnected(4)), StartCluster)
    assert admission.order() == [1, 3, 4]


# ---------------------------------------------------------------- who cannot work together


def test_two_candidates_without_a_common_transport_end_the_formation_and_both_are_named() -> None:
    admission = an_admission(3)
    join(admission, 1, rank=0, addresses={"tls": ("10.0.0.1:1",)})
    actions = join(admission, 2, rank=1)
    reason = "rank 0 offers tls, rank 1 offers quic\nthey have no transport in common; set NEXAR_TRANSPORTS"
    assert only(actions, RefuseConnection).reason == reason
    assert only(actions, FailFormation).reason == reason
    assert only(actions, FailFormation).connections == (1,)


def test_who_brought_no_rank_is_refused_alone_and_somebody_else_may_come() -> None:
    admission = an_admission(2)
    join(admission, 1, addresses={"tls": ("10.0.0.1:1",)})
    assert only(join(admission, 2), RefuseConnection).connection == 2
    assert not every(admission.actions, FailFormation)
    only(join(admission, 3, addresses={"tls": ("10.0.0.3:1",)}), CommitMembership)


def test_a_transport_that_only_one_of_many_lacks_is_found_whoever_came_first() -> None:
    admission = an_admission(4)
    both = {"quic": ("10.0.0.1:1",), "tls": ("10.0.0.1:1",)}
    join(admission, 1, rank=0, addresses=both)
    join(admission, 2, rank=1, addresses={"tls": ("10.0.0.1:1",)})
    join(admission, 3, rank=2, addresses=both)
    assert "rank 1 offers tls, rank 3 offers quic" in only(join(admission, 4, rank=3), FailFormation).reason


def test_settings_that_differ_are_named_with_both_values_and_both_ranks() -> None:
    admission = an_admission(3)
    join(admission, 1, rank=0, settings={"topology": "full_mesh", "ring_max_world": "8"})
    fail = only(join(admission, 2, rank=2, settings={"topology": "hypercube", "ring_max_world": "8"}), FailFormation)
    assert fail.reason == (
        "NEXAR_TOPOLOGY is hypercube on rank 2 and full_mesh on rank 0\nset the same value on every rank"
    )


def test_a_setting_that_the_other_does_not_know_is_not_compared() -> None:
    admission = an_admission(2)
    join(admission, 1, rank=0, settings={"topology": "full_mesh"})
    only(join(admission, 2, rank=1, settings={"topology": "full_mesh", "new": "1"}), CommitMembership)


def test_who_went_is_not_compared_with() -> None:
    admission = an_admission(2)
    join(admission, 1, rank=0, settings={"topology": "hypercube"}, addresses={"tls": ("10.0.0.1:1",)})
    admission.feed(ConnectionEnded(1, "killed"))
    join(admission, 2, rank=0, settings={"topology": "full_mesh"})
    only(join(admission, 3, rank=1, settings={"topology": "full_mesh"}), CommitMembership)


@pytest.mark.parametrize(("clock", "text"), [(10_000.0, "1800 s behind"), (13_600.0, "1800 s ahead of")])
def test_a_clock_beyond_the_limit_is_named_with_both_times(clock: float, text: str) -> None:
    admission = an_admission(2)
    join(admission, 1, rank=0, clock=11_800.0, seed_clock=11_800.0)
    actions = join(admission, 2, rank=1, clock=clock, seed_clock=11_800.0)
    reason = only(actions, RefuseConnection).reason
    assert f"the clock of rank 1 is {text} the seed's" in reason
    assert "1970-01-01 03:16:40 UTC" in reason
    assert only(actions, FailFormation).reason == reason
    assert reason.splitlines()[0].endswith("the seed's"), "the times and the remedy are on further lines"


INCOMPATIBLE = [
    {"clock": 10_000.0, "seed_clock": 11_800.0},
    {"settings": {"topology": "hypercube", "pipeline_segment_bytes": "65536"}},
    {"addresses": {"tls": ("10.0.0.1:1",)}},
    {"size": 3},
]


@pytest.mark.parametrize("facts", INCOMPATIBLE)
def test_the_reason_of_a_refusal_says_who_and_what_first_and_the_remedy_on_a_further_line(facts: object) -> None:
    admission = an_admission(2)
    join(admission, 1, rank=0, size=2, settings={"topology": "full_mesh", "pipeline_segment_bytes": "1024"})
    first, *further = only(join(admission, 2, rank=1, **facts), RefuseConnection).reason.splitlines()  # type: ignore[arg-type]
    assert "rank 1" in first
    assert len(f"the cluster did not form: {first}") <= 120
    assert "set " in further[-1] or "give " in further[-1]


@pytest.mark.parametrize("clock", [11_201.0, 12_399.0])
def test_a_clock_within_the_limit_is_let_in(clock: float) -> None:
    only(join(an_admission(1), 1, rank=0, clock=clock, seed_clock=11_800.0), CommitMembership)


def test_a_joiner_of_a_cluster_that_has_formed_is_compared_too() -> None:
    admission = an_admission(1, elastic=True)
    join(admission, 1, rank=0, settings={"topology": "full_mesh"})
    admission.feed(MemberConnected(1))
    assert (
        "NEXAR_TOPOLOGY is hypercube"
        in only(join(admission, 2, settings={"topology": "hypercube"}), RefuseConnection).reason
    )
    assert not ends(join(admission, 3, settings={"topology": "full_mesh"}))


# ---------------------------------------------------------------- a world of another size, and who is waited for


def test_who_was_started_for_a_world_of_another_size_is_refused_and_the_others_can_ask() -> None:
    admission = an_admission(2)
    join(admission, 1, rank=0, size=2)
    reason = only(join(admission, 2, rank=1, size=3), RefuseConnection).reason
    assert reason.startswith("rank 1 was started as one of 3, and this cluster forms with 2")
    assert not every(admission.actions, FailFormation)
    ((progress, connections),) = notified(admission.feed(ProgressRequested(1)), FormationProgress)
    assert (progress.joined, progress.expected, progress.missing, connections) == (1, 2, (1,), (1,))
    assert list(progress.refused.values()) == [reason.replace("\n", "; ")]


def test_the_first_of_a_host_reports_whom_all_wait_for() -> None:
    admission = an_admission(4)
    join(admission, 1)
    join(admission, 2)
    first, second = (
        notified(admission.feed(ProgressRequested(connection)), FormationProgress)[0][0] for connection in (1, 2)
    )
    assert (first.reports, second.reports) == (True, False)
    assert first.missing == (), "nobody has claimed a rank, so nobody can say which one is missing"
    assert not admission.feed(ProgressRequested(9))


def test_who_leaves_when_it_has_seen_the_proof_of_the_seed_is_noted_as_refused_with_its_address() -> None:
    admission = an_admission(2)
    admission.greet(1)
    (note,) = every(admission.feed(ConnectionEnded(1, "it closed the line")), SeedEvent)
    assert (note.kind, note.address, note.node) == ("refused", "10.0.0.9:1", 1)
    assert "another ticket or token" in note.reason
    assert list(admission.machine.refused.values()) == [note.reason]


CULPRIT = Message(1, "was killed by SIGKILL", 137, host="b")
CONSEQUENCE = Message(0, "ended with exit code 1", 1, consequence=True, host="a")


def two_launchers():
    admission = an_admission(2)
    admission.reserve(51, 1)
    admission.reserve(52, 1)
    return admission


def notified_nodes(actions):
    return [(feed.message, set(feed.connections)) for feed in every(actions, NotifyConnections)]


def test_a_failure_is_reported_to_all_launchers() -> None:
    admission = two_launchers()
    assert notified_nodes(admission.feed(RunFailureReported(52, CULPRIT))) == [(CULPRIT, {51, 52})]


def test_the_first_failure_stays_and_later_reporters_learn_of_it() -> None:
    admission = two_launchers()
    admission.feed(RunFailureReported(52, CULPRIT))
    later = Message(0, "ended with exit code 3", 3, host="a")
    assert notified_nodes(admission.feed(RunFailureReported(51, later))) == [(CULPRIT, {51})]
    assert notified_nodes(admission.feed(RunFailureReported(51, CONSEQUENCE))) == [(CULPRIT, {51})]


def test_the_cause_replaces_its_consequence() -> None:
    admission = two_launchers()
    assert notified_nodes(admission.feed(RunFailureReported(51, CONSEQUENCE))) == [(CONSEQUENCE, {51, 52})]
    assert notified_nodes(admission.feed(RunFailureReported(52, CULPRIT))) == [(CULPRIT, {51, 52})]


def test_it_is_reported_after_the_cluster_has_formed_too() -> None:
    admission = two_launchers()
    admission.join(1, rank=0, launcher=51)
    admission.join(2, rank=1, launcher=52)
    assert admission.machine.membership is not None
    assert notified_nodes(admission.feed(RunFailureReported(52, CULPRIT))) == [(CULPRIT, {51, 52})]
    assert every(admission.actions, FailFormation) == []


def test_only_launchers_report_failures() -> None:
    admission = two_launchers()
    admission.join(1, rank=0, launcher=51)
    assert "is no launcher" in only(admission.feed(RunFailureReported(1, CULPRIT)), RefuseConnection).reason


def test_a_launcher_reports_only_ranks_of_its_own() -> None:
    admission = two_launchers()
    actions = admission.feed(RunFailureReported(51, CULPRIT))
    assert only(actions, RefuseConnection).reason == "it reported that rank 1 failed, which is not its child"
    assert notified_nodes(actions) == []


def test_a_launcher_reports_only_ranks_of_its_own_after_the_cluster_has_formed_too() -> None:
    admission = two_launchers()
    admission.join(1, rank=0, launcher=51)
    admission.join(2, rank=1, launcher=52)
    assert "is not its child" in only(admission.feed(RunFailureReported(51, CULPRIT)), RefuseConnection).reason
    assert notified_nodes(admission.feed(RunFailureReported(52, CULPRIT))) == [(CULPRIT, {52})]


def test_a_launcher_without_ranks_reports_none() -> None:
    admission = an_admission(1, elastic=True)
    admission.reserve(51, 1)
    admission.join(1, rank=0, launcher=51)
    admission.reserve(52, 1)
    assert "is not its child" in only(admission.feed(RunFailureReported(52, CONSEQUENCE)), RefuseConnection).reason


def test_a_launcher_that_comes_back_is_notified_again_and_may_still_report_its_ranks() -> None:
    admission = two_launchers()
    admission.join(1, rank=0, launcher=51)
    admission.join(2, rank=1, launcher=52)
    admission.feed(RunFailureReported(51, CONSEQUENCE))
    admission.feed(ConnectionEnded(52, "its line broke"))
    assert (CONSEQUENCE, {62}) in notified_nodes(admission.reserve(62, 1, 1, node=52))
    assert notified_nodes(admission.feed(RunFailureReported(62, CULPRIT))) == [(CULPRIT, {51, 62})]


def test_a_launcher_that_comes_late_is_notified_too() -> None:
    admission = an_admission(2)
    admission.reserve(51, 1)
    admission.feed(RunFailureReported(51, CONSEQUENCE))
    assert notified_nodes(admission.reserve(52, 1)) == [(CONSEQUENCE, {52})]
