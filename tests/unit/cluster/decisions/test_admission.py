"""How a cluster forms: who is let in with what, who is turned away and told why, and when everybody is there."""

import pytest

from nexar.cluster.decisions.admission_events import (
    Admit,
    Applied,
    BadMessage,
    ChildDied,
    Commit,
    Drop,
    Fail,
    Gone,
    Greeted,
    Knocked,
    Left,
    Note,
    Ready,
    Refuse,
    Reserved,
    SendChallenge,
    Tick,
)
from nexar.cluster.decisions.authenticating import WRONG_SECRET
from nexar.cluster.membership import MAX_MEMBERS
from nexar.errors import InternalError, UsageError
from nexar.types import format_node
from nexar.wire.joining import Apply, Reserve
from tests.unit.cluster.decisions.door import PROOF, SEED, a_door, application, ends, every, hello, key, notes, only

# ---------------------------------------------------------------- the good story


def test_a_hello_is_answered_by_a_challenge() -> None:
    assert a_door(2).greet(1) == [Note("knocked", "10.0.0.9:1"), SendChallenge(1)]


def test_a_candidate_with_the_secret_is_admitted_and_waits_for_the_others() -> None:
    door = a_door(2)
    actions = door.join(1)
    assert only(actions, Admit) == Admit(1, 1, "10.0.0.9:1", 2)
    assert not every(actions, Commit)
    assert (door.machine.joined, door.machine.pending, door.machine.membership) == (1, 0, None)


def test_the_membership_is_committed_at_once_when_the_last_one_comes_and_never_again() -> None:
    door = a_door(3)
    for connection, host in ((1, "a"), (2, "b"), (3, "a")):
        actions = door.join(connection, host=host)
    commit = only(actions, Commit)
    assert commit.connections == (1, 2, 3)
    membership = commit.membership
    assert (membership.cluster, membership.epoch, membership.size, membership.seed) == ("cluster", 1, 3, SEED)
    assert door.order() == [1, 3, 2]
    assert membership.member(2).capabilities == {"quic", "tls"}
    assert membership.pin(2) == key(2)
    assert membership is door.machine.membership
    door.tell(Gone(3, "killed"))
    door.join(4)
    door.now = 100.0
    door.tell(Tick())
    assert len(every(door.actions, Commit)) == 1
    assert not every(door.actions, Fail)


def test_candidates_get_the_ranks_they_bring() -> None:
    door = a_door(3)
    assert only(door.join(1, rank=2), Admit).rank == 2
    door.join(2)
    door.join(3, rank=0)
    assert door.order() == [3, 2, 1]


def test_a_rank_that_is_taken_is_refused_naming_the_holder_who_keeps_it() -> None:
    door = a_door(2)
    door.join(1, rank=1)
    assert only(door.join(2, rank=1), Refuse).reason.startswith(f"rank 1 is held by node {format_node(1)};")
    assert "outside 0..1" in only(door.join(3, rank=2), Refuse).reason
    door.join(4)
    assert door.order() == [4, 1]


@pytest.mark.parametrize("size", [-1, 0, MAX_MEMBERS + 1])
def test_a_size_that_no_cluster_has_is_refused_at_once(size: int) -> None:
    with pytest.raises(UsageError, match=f"1 to {MAX_MEMBERS}"):
        a_door(size)


# ---------------------------------------------------------------- launchers


def test_launchers_get_blocks_and_their_children_exactly_their_ranks() -> None:
    door = a_door(4)
    first, second = only(door.reserve(51, 2), Admit), only(door.reserve(52, 2), Admit)
    assert (first.first_rank, first.group_rank, first.size) == (0, 0, 4)
    assert (second.first_rank, second.group_rank) == (2, 1)
    for connection, rank, launcher in ((1, 3, 52), (2, 0, 51), (3, 1, 51)):
        assert only(door.join(connection, rank=rank, launcher=launcher), Admit).rank == rank
    commit = only(door.join(4, rank=2, launcher=52), Commit)
    assert door.order() == [2, 3, 4, 1]
    assert [attendant.node for attendant in commit.membership.attendants] == [51, 52]
    assert sorted(commit.connections) == [1, 2, 3, 4, 51, 52]
    assert commit.membership.member(0).launcher == 51


def test_reserved_ranks_are_for_nobody_else() -> None:
    door = a_door(2)
    door.reserve(51, 2)
    assert "reserved by launcher" in only(door.join(1, rank=0), Refuse).reason
    assert "taken or reserved" in only(door.join(2), Refuse).reason
    assert "taken or reserved" in only(door.reserve(52, 1), Refuse).reason


def test_a_block_is_returned_when_its_launcher_goes_before_the_commit() -> None:
    door = a_door(2)
    door.reserve(51, 2)
    door.tell(Gone(51, "killed"))
    door.join(1, rank=0)
    commit = only(door.join(2), Commit)
    assert commit.membership.attendants == ()


def test_the_rank_of_a_dead_child_is_kept_for_the_next_one() -> None:
    door = a_door(2)
    door.reserve(51, 2)
    door.join(1, rank=0, launcher=51)
    gone = door.tell(Gone(1, "killed"))
    assert only(gone, Note) == Note("gone", "10.0.0.9:1", 1, 0, "killed")
    assert every(door.join(2, rank=0), Refuse)
    door.join(3, rank=0, launcher=51)
    door.join(4, rank=1, launcher=51)
    assert door.order() == [3, 4]


def test_a_child_that_dies_before_the_commit_fails_the_formation_at_once_and_is_named() -> None:
    door = a_door(2)
    door.reserve(51, 2)
    door.join(1, rank=1, launcher=51)
    door.now = 3.0
    actions = door.tell(ChildDied(51, 0, "Traceback …\nImportError: no module named x\n"))
    assert actions[0].reason.startswith("Traceback")
    fail = only(actions, Fail)
    assert fail.timeout == 3.0
    assert fail.refused == {"rank 0": "it died before the cluster had formed: ImportError: no module named x"}
    assert set(fail.connections) == {51, 1}
    assert only(door.tell(Knocked(7, "10.0.0.9:7")), Refuse).reason == "rank 0 died before the cluster had formed"


def test_nobody_hears_of_the_others_before_all_of_them_can_be_dialed() -> None:
    door = a_door(2)
    door.join(1)
    assert not every(door.greet(2) + door.tell(Applied(2, application(), True, key(2))), Commit)
    assert set(only(door.tell(Ready(2)), Commit).connections) == {1, 2}
    assert door.tell(Ready(2)) == []


def test_who_was_ready_and_goes_is_waited_for_again() -> None:
    door = a_door(2)
    door.join(1)
    door.tell(Gone(1, "killed"))
    door.join(2)
    door.greet(3)
    assert not every(door.tell(Applied(3, application(), True, key(3))), Commit)
    assert every(door.tell(Ready(3)), Commit)


def test_who_never_became_ready_is_named_when_the_formation_fails() -> None:
    door = a_door(2)
    door.join(1)
    door.greet(2)
    door.tell(Applied(2, application(), True, key(2)))
    door.now = 60.0
    first, second = only(door.tell(Tick()), Fail).joined
    assert not first.endswith("(let in, but not ready)")
    assert second.endswith("(let in, but not ready)")


def test_only_who_has_joined_can_be_ready() -> None:
    door = a_door(2)
    door.greet(1)
    assert "has not joined" in only(door.tell(Ready(1)), Refuse).reason
    door.reserve(2, 1)
    assert "has not joined" in only(door.tell(Ready(2)), Refuse).reason


def test_a_launcher_reports_its_dead_children_after_the_commit() -> None:
    door = a_door(1)
    door.reserve(51, 1)
    door.join(1, rank=0, launcher=51)
    traceback = "Traceback\n" + "  line\n" * 100
    assert door.tell(ChildDied(51, 0, traceback)) == [Note("child died", "10.0.0.9:51", 1, 0, traceback)]


@pytest.mark.parametrize("committed", [False, True])
def test_nobody_reports_the_children_of_others(committed: bool) -> None:
    door = a_door(2)
    door.reserve(51, 1)
    door.reserve(52, 1)
    door.join(1, rank=0, launcher=51)
    if committed:
        door.join(2, rank=1, launcher=52)
    assert "which it is not" in only(door.tell(ChildDied(52, 0, "lies")), Refuse).reason
    assert "which it is not" in only(door.tell(ChildDied(51, 7, "lies")), Refuse).reason
    assert "no launcher" in only(door.tell(ChildDied(1, 0, "lies")), Refuse).reason


# ---------------------------------------------------------------- wrong ones


def test_a_wrong_proof_is_refused_and_changes_nothing() -> None:
    door = a_door(1)
    assert only(door.join(1, knows_secret=False), Refuse) == Refuse(1, WRONG_SECRET)
    assert only(door.reserve(2, 1, ok=False), Refuse) == Refuse(2, WRONG_SECRET)
    assert only(door.join(3, node=1), Commit).connections == (3,)


def test_the_same_node_is_refused_while_its_first_connection_lives() -> None:
    door = a_door(2)
    door.join(1, node=7)
    assert only(door.join(2, node=7), Refuse).reason == f"node {format_node(7)} has joined already, from 10.0.0.9:1"
    assert every(door.reserve(3, 1, node=7), Refuse)
    assert door.machine.joined == 1
    door.tell(Gone(1, "killed"))
    assert every(door.join(4, node=7), Admit)


def test_saying_a_name_first_keeps_nobody_out() -> None:
    door = a_door(1)
    door.greet(1, node=7)
    assert every(door.join(2, node=7), Commit)


def test_nobody_is_the_seed() -> None:
    door = a_door(1)
    assert "is the seed" in only(door.join(1, node=SEED.node), Refuse).reason
    assert "is the seed" in only(door.reserve(2, 1, node=SEED.node), Refuse).reason


def test_messages_out_of_order_are_refused() -> None:
    door = a_door(4)
    knocked = Knocked(1, "x")
    assert "before it said hello" in only(door.tell(knocked, Applied(1, application(), True, key(1))), Refuse).reason
    door.greet(2)
    assert "hello twice" in only(door.tell(Greeted(2, hello(2))), Refuse).reason
    door.join(3)
    assert "twice" in only(door.tell(Applied(3, application(), True, key(3))), Refuse).reason
    door.greet(4, role="launcher")
    assert "its hello says launcher" in only(door.tell(Applied(4, application(), True, key(4))), Refuse).reason
    door.greet(5)
    reserve = Reserve(PROOF, b"r", "a", 1)
    assert "its hello says candidate" in only(door.tell(Reserved(5, reserve, True, key(5))), Refuse).reason
    assert door.machine.joined == door.machine.pending == 0


def test_a_hello_of_no_node_or_another_role_is_refused() -> None:
    door = a_door(1)
    assert "names no node" in only(door.greet(1, node=0), Refuse).reason
    assert "a member cannot join" in only(door.greet(2, role="member"), Refuse).reason
    assert "a seed cannot join" in only(door.greet(3, role="seed"), Refuse).reason


def test_a_bad_message_is_refused_with_its_reason_on_one_line() -> None:
    door = a_door(1)
    door.tell(Knocked(1, "10.0.0.9:1"))
    actions = door.tell(BadMessage(1, "nonsense\nall is well"))
    assert actions == [
        Refuse(1, "nonsense all is well"),
        Note("refused", "10.0.0.9:1", None, None, "nonsense all is well"),
    ]
    assert door.machine.refused == {"a peer at 10.0.0.9:1": "nonsense all is well"}


def test_a_candidate_that_would_make_the_membership_too_large_is_refused() -> None:
    door = a_door(1000)
    many = Apply(PROOF, b"r", "a", {"quic": tuple(f"{'x' * 48}:1" for _ in range(60))})
    door.greet(1)
    assert "advertise fewer addresses" in only(door.tell(Applied(1, many, True, key(1))), Refuse).reason


def test_what_a_connection_says_after_its_end_is_ignored() -> None:
    door = a_door(1)
    door.join(1, knows_secret=False)
    assert door.tell(Greeted(1, hello(1)), Gone(1, "closed"), Left(1), BadMessage(1, "x"), ChildDied(1, 0, "")) == []
    assert door.tell(Gone(77, "never seen")) == []


def test_a_connection_number_is_used_once() -> None:
    door = a_door(1)
    door.tell(Knocked(1, "x"))
    with pytest.raises(InternalError, match="knocked twice"):
        door.tell(Knocked(1, "x"))


# ---------------------------------------------------------------- limits and time


def test_when_too_many_are_pending_the_source_with_the_most_gives_way() -> None:
    door = a_door(1, max_pending=4)
    door.greet(1)
    door.tell(*[Knocked(connection, f"10.6.6.6:{connection}") for connection in (2, 3, 4)])
    actions = door.tell(Knocked(5, "10.7.7.7:5"))
    assert "too many" in only(actions, Drop).reason
    assert ends(actions) == [2]
    assert door.machine.pending == 4
    assert every(door.tell(Applied(1, application(), True, key(1)), Ready(1)), Commit)


def test_when_too_many_are_pending_a_newcomer_of_the_largest_source_is_dropped_and_may_come_again() -> None:
    door = a_door(1, max_pending=4)
    door.tell(*[Knocked(connection, f"10.6.6.6:{connection}") for connection in (1, 2, 3, 4)])
    actions = door.tell(Knocked(5, "10.6.6.6:5"))
    assert "too many" in only(actions, Drop).reason
    assert ends(actions) == [5]
    door.now = 1.0
    assert ends(door.tell(Knocked(6, "10.6.6.6:6"))) == [1]


def test_two_hundred_silent_ones_delay_nobody() -> None:
    door = a_door(4, max_pending=16)
    for connection in range(1000, 1200):
        door.tell(Knocked(connection, f"10.6.6.6:{connection}"))
    for connection in range(1, 5):
        actions = door.join(connection)
    assert every(actions, Commit)
    assert door.machine.pending <= 16


def test_who_does_not_authenticate_in_time_is_dropped() -> None:
    door = a_door(1)
    door.tell(Knocked(1, "one"))
    door.now = 4.0
    door.tell(Knocked(2, "two"))
    assert door.machine.due(door.now) == 10.0
    door.now = 10.0
    actions = door.tell(Tick())
    assert only(actions, Drop) == Drop(1, "it did not authenticate within 10 s")
    assert notes(actions) == ["dropped"]
    assert door.machine.due(door.now) == 14.0
    assert door.machine.due(20.0) == 20.0


def test_who_says_hello_has_a_third_of_the_time_for_its_proof() -> None:
    door = a_door(1, auth_timeout=9.0)
    door.tell(Knocked(1, "one"))
    door.now = 2.0
    door.tell(Greeted(1, hello(1)))
    assert door.machine.due(door.now) == 5.0
    door.now = 5.0
    actions = door.tell(Tick())
    assert only(actions, Drop) == Drop(1, "it did not prove within 3 s of its hello that it may join")


def test_a_late_hello_buys_no_time() -> None:
    door = a_door(1, auth_timeout=9.0)
    door.tell(Knocked(1, "one"))
    door.now = 8.0
    door.tell(Greeted(1, hello(1)))
    assert door.machine.due(door.now) == 9.0


REMEDY = "start all ranks at about the same time, or raise NEXAR_FORMATION_TIMEOUT_SECS"


def test_a_formation_that_takes_too_long_fails_and_says_who_came_and_who_was_refused() -> None:
    door = a_door(3, timeout=5.0)
    door.join(1, rank=1)
    door.reserve(51, 1)
    door.join(2, knows_secret=False)
    door.tell(Knocked(3, "three"))
    assert door.machine.due(0.0) == 5.0
    door.now = 5.0
    actions = door.tell(Tick())
    fail = only(actions, Fail)
    assert fail.joined == (f"rank 1 (node {format_node(1)} at 10.0.0.9:1)",)
    assert (fail.expected, fail.timeout, fail.refused_count) == (3, 5.0, 2)
    assert fail.refused == {
        f"node {format_node(2)} at 10.0.0.9:2": WRONG_SECRET,
        "a peer at three": f"the cluster did not form within 5 s; {REMEDY}",
    }
    (failed,) = [each for each in every(actions, Note) if each.kind == "failed"]
    assert failed.reason == f"the cluster did not form within 5 s, 1 of 3 joined; {REMEDY}"
    assert fail.connections == (1, 51)
    assert ends(actions) == [3, 1, 51]
    assert door.machine.failed
    assert door.machine.due(5.0) is None
    assert "did not form" in only(door.tell(Knocked(9, "nine")), Refuse).reason
    assert door.tell(Tick(), Gone(1, "closed"), Gone(51, "closed")) == []


def test_a_candidate_that_is_gone_before_the_commit_frees_its_place() -> None:
    door = a_door(2)
    door.join(1, rank=0)
    assert notes(door.tell(Gone(1, "killed"))) == ["gone"]
    door.join(2, rank=0)
    left = door.tell(Left(2, "changed my mind"))
    assert ends(left) == [2]
    assert notes(left) == ["left"]
    door.join(3)
    door.join(4)
    assert door.order() == [3, 4]
