"""After the commit: joiners wait, members choose, and the seed follows what was chosen.

Who is in, who waits, who may not come back.
"""

import pytest

from nexar.cluster.decisions.admission import Admission
from nexar.cluster.decisions.admission_checks import AdmissionLimits
from nexar.cluster.decisions.admission_events import (
    AdmissionAction,
    AdmitNode,
    ChildReported,
    CommitMembership,
    ConnectionEnded,
    DropConnection,
    JoinerReady,
    JoinRequested,
    LeaveReceived,
    MemberMessageReceived,
    RefuseConnection,
    SeedEvent,
)
from nexar.cluster.decisions.formed_cluster import MemberRegister
from nexar.cluster.decisions.refusals import Refusal
from nexar.cluster.membership import (
    Change,
    Departure,
    Member,
    Membership,
    MembershipError,
    PinnedNode,
    decode_member,
    decode_membership,
    encode_membership,
)
from nexar.wire.control import Chosen, Ping, decode
from nexar.wire.join import Current, MemberDied, SeedPaxosMessage, WaitingJoiners
from tests.unit.cluster.decisions.admission_scene import (
    AdmissionScene,
    an_admission,
    application,
    ends,
    every,
    key,
    notes,
    notified,
    only,
)

LATE = "the cluster has formed with 2 members and is not elastic"


def formed(*, elastic: bool = True, most: int = 0) -> AdmissionScene:
    """Members 1 and 2 on connections of these numbers; 1 was started by launcher 51."""
    admission = an_admission(2, elastic=elastic, most=most)
    admission.reserve(51, 1)
    admission.join(1, rank=0, launcher=51)
    admission.join(2)
    return admission


def resumed(admission: AdmissionScene, *, elastic: bool = True) -> AdmissionScene:
    membership = admission.machine.membership
    assert membership is not None
    return AdmissionScene(
        Admission.resumed(decode_membership(encode_membership(membership)), limits=AdmissionLimits(elastic=elastic))
    )


def waiting(admission: AdmissionScene) -> tuple[Member, ...]:
    """Who waits, as the members were notified last."""
    message, _ = notified(admission.actions, WaitingJoiners)[-1]
    return tuple(map(decode_member, message.members))


def choose(
    admission: AdmissionScene, *, left: tuple[Departure, ...] = (), joined: tuple[Member, ...] = (), by: int = 2
) -> list[AdmissionAction]:
    """A member reports what was chosen."""
    assert admission.machine.membership is not None
    epoch = admission.machine.membership.epoch
    chosen = Chosen((0, epoch, 0), Change(epoch + 1, left=left, joined=joined).encode())
    return admission.feed(MemberMessageReceived(by, chosen))


# ---------------------------------------------------------------- joining


def test_a_joiner_is_let_in_and_waits_and_all_are_notified_when_it_can_be_dialed() -> None:
    admission = formed()
    actions = admission.join(3, rank=0)  # a rank means nothing any more
    assert only(actions, AdmitNode).rank is None
    ((current, to),) = notified(actions, Current)
    assert (decode_membership(current.membership), to) == (admission.machine.membership, (3,))
    ((message, to),) = notified(actions, WaitingJoiners)
    assert [decode_member(each).node for each in message.members] == [3]
    assert to == (1, 2)
    assert admission.order() == [1, 2]


def test_before_it_can_be_dialed_nobody_is_notified() -> None:
    admission = formed()
    admission.join(3)
    applied = JoinRequested(4, application(), True, key(4))
    assert notified(admission.greet(4) + admission.feed(applied), WaitingJoiners) == []
    assert admission.feed(ConnectionEnded(4, "changed its mind")) == [
        SeedEvent("gone", "10.0.0.9:4", 4, None, "changed its mind")
    ]
    assert [member.node for member in waiting(admission)] == [3]


def test_a_joiner_that_goes_away_waits_no_more() -> None:
    for end in (ConnectionEnded(3, "killed"), LeaveReceived(3, "changed its mind")):
        admission = formed()
        admission.join(3)
        actions = admission.feed(end)
        assert notified(actions, WaitingJoiners) == [(WaitingJoiners(), (1, 2))]
        assert only(actions, SeedEvent).rank is None


def test_a_joiner_that_comes_back_on_another_line_waits_once() -> None:
    admission = formed()
    admission.join(3)
    actions = admission.join(13, node=3)
    assert only(actions, DropConnection).connection == 3
    assert [member.node for member in waiting(admission)] == [3]
    assert "another key" in only(admission.join(14, node=3, fingerprint=b"x" * 32), RefuseConnection).reason


def test_above_the_maximum_joiners_are_refused_with_that_reason() -> None:
    admission = formed(most=3)
    admission.join(3)
    refused = only(admission.join(4), RefuseConnection)
    assert "no more than 3 are allowed" in refused.reason
    assert refused.code == "full"
    admission.feed(ConnectionEnded(1, "killed"))  # who died makes room for who is started in its place
    assert every(admission.join(5), AdmitNode)


def test_a_cluster_that_is_not_elastic_refuses_them() -> None:
    assert only(formed(elastic=False).join(3), RefuseConnection) == RefuseConnection(3, LATE, code="not_elastic")


def test_who_waits_or_comes_when_the_last_member_is_gone_is_refused_with_that_code() -> None:
    admission = formed()
    admission.join(3)
    admission.feed(ConnectionEnded(1, "killed"))
    waited = only(admission.feed(ConnectionEnded(2, "killed")), RefuseConnection)
    came = only(admission.join(4), RefuseConnection)
    assert [(each.connection, each.code) for each in (waited, came)] == [(3, "nobody_left"), (4, "nobody_left")]


def test_a_known_node_does_not_join_as_somebody_else() -> None:
    admission = formed()
    assert "in another role" in only(admission.join(3, node=51), RefuseConnection).reason
    assert "has not joined" in only(admission.feed(JoinerReady(51)), RefuseConnection).reason


def test_a_launcher_may_come_later_too_for_children_without_ranks() -> None:
    admission = formed(most=4)
    actions = admission.reserve(61, 2)
    assert (only(actions, AdmitNode).first_rank, only(actions, CommitMembership).connections) == (None, (61,))
    assert "no more than 4" in only(admission.reserve(62, 3), RefuseConnection).reason
    assert only(admission.reserve(63, 2, node=61), DropConnection).connection == 61
    assert only(formed(elastic=False).reserve(61, 2), RefuseConnection).reason == LATE


# ---------------------------------------------------------------- what was chosen


def test_a_chosen_joiner_is_notified_that_it_is_in_and_everybody_what_was_chosen() -> None:
    admission = formed()
    admission.join(3)
    admission.join(4)
    actions = choose(admission, joined=waiting(admission)[:1])
    commit = only(actions, CommitMembership)
    assert [member.node for member in commit.membership.members] == admission.order() == [1, 2, 3]
    assert (commit.connections, commit.present) == ((3,), {1, 2, 3})
    assert actions[0] is commit  # it is kept before anybody learns of it
    assert [to for _, to in notified(actions, Current)] == [(4,)]
    assert [(len(message.members), to) for message, to in notified(actions, WaitingJoiners)] == [(1, (1, 2, 3))]
    ((sent, to),) = notified(actions, SeedPaxosMessage)
    assert isinstance(decode(sent.body), Chosen)
    assert set(to) >= {1}
    assert notes(actions) == ["moved on"]


def test_who_was_expelled_learns_what_was_chosen_and_then_why_its_line_ends() -> None:
    admission = formed()
    actions = choose(admission, left=(Departure(1, "silent\nfor long"),))
    messages = [index for index, action in enumerate(actions) if notified([action], SeedPaxosMessage)]
    refusal = only(actions, RefuseConnection)
    assert refusal == RefuseConnection(1, "silent for long", 2)
    assert messages[-1] < actions.index(refusal)
    assert admission.order() == [2]
    assert only(admission.join(11, node=1), RefuseConnection) == RefuseConnection(11, refusal.reason, 2)
    assert only(admission.join(12, node=1, epoch=1), RefuseConnection).reason == "silent for long"


def test_a_member_that_raised_is_noted_as_gone_with_what_it_raised() -> None:
    """It may still be connected when the others have moved on. That is no refusal, and the launcher shows the rest."""
    admission = formed()
    raised = "it raised an exception and left:\nTraceback (most recent call last):\n  …\nValueError: on purpose"
    noted = [(note.kind, note.reason) for note in every(choose(admission, left=(Departure(1, raised),)), SeedEvent)]
    assert ("gone", "ValueError: on purpose") in noted


def test_who_left_by_its_own_will_is_not_refused() -> None:
    admission = formed()
    actions = choose(admission, left=(Departure(1, "done", willing=True),))
    assert ends(actions) == [1]
    assert not every(actions, RefuseConnection)
    assert notified(actions, MemberDied) == []


def test_nobody_moves_on_twice_or_by_nonsense() -> None:
    admission = formed()
    chosen = Chosen((0, 1, 0), Change(2, left=(Departure(1, "gone"),)).encode())
    assert every(admission.feed(MemberMessageReceived(2, chosen)), CommitMembership)
    assert not every(admission.feed(MemberMessageReceived(2, chosen)), CommitMembership)
    assert not every(admission.feed(MemberMessageReceived(2, Chosen((0, 2, 0), b"nonsense"))), CommitMembership)
    assert admission.feed(MemberMessageReceived(2, Ping(1))) == []
    assert admission.order() == [2]


def test_only_members_speak_like_members() -> None:
    admission = formed()
    admission.join(3)
    for stranger in (3, 51):
        assert (
            "is no member"
            in only(admission.feed(MemberMessageReceived(stranger, Chosen((0, 1, 0), b""))), RefuseConnection).reason
        )
    forming = an_admission(2)
    forming.join(1)
    assert (
        "before the cluster had formed"
        in only(forming.feed(MemberMessageReceived(1, Chosen((0, 1, 0), b""))), RefuseConnection).reason
    )


# ---------------------------------------------------------------- hints


def test_a_line_that_breaks_is_a_hint_for_the_other_members() -> None:
    admission = formed()
    admission.join(3)
    ((died, to),) = notified(admission.feed(ConnectionEnded(1, "reset")), MemberDied)
    assert (died, to) == (MemberDied(1, 1, "its connection to the seed broke: reset", "seed"), (2,))


def test_a_closing_message_is_none() -> None:
    assert notified(formed().feed(LeaveReceived(1, "done")), MemberDied) == []


def test_the_death_of_a_child_is_a_hint_also_when_ranks_have_moved() -> None:
    admission = formed()
    ((died, to),) = notified(admission.feed(ChildReported(51, 0, "was killed by SIGKILL")), MemberDied)
    assert (died, to) == (MemberDied(1, 1, "was killed by SIGKILL", "launcher"), (2,))
    choose(admission, left=(Departure(1, "gone"),))
    assert notified(admission.feed(ChildReported(51, 0, "was killed by SIGKILL")), MemberDied) == []
    assert "which it is not" in only(admission.feed(ChildReported(51, 1, "killed")), RefuseConnection).reason


def test_a_child_that_ended_well_is_no_death() -> None:
    assert formed().feed(ChildReported(51, 0, "ended", well=True)) == []


# ---------------------------------------------------------------- started again


def test_a_restarted_seed_knows_the_newest_membership_and_follows_on() -> None:
    admission = formed()
    admission.join(3)
    choose(admission, joined=waiting(admission))
    admission = resumed(admission)
    actions = admission.join(12, node=3)
    assert only(actions, CommitMembership).membership.epoch == 2
    assert only(actions, AdmitNode).rank == 2
    assert notified(actions, WaitingJoiners) == [(WaitingJoiners(), (12,))]
    choose(admission, left=(Departure(1, "gone"),), by=12)
    assert admission.order() == [2, 3]


def test_a_restarted_seed_that_is_behind_lets_newer_members_try_again() -> None:
    admission = resumed(formed())
    assert only(admission.join(9, epoch=3), DropConnection).connection == 9
    assert "not a member of epoch 1" in only(admission.join(10, epoch=1), RefuseConnection).reason


def test_a_restarted_seed_takes_reports_of_ranks_that_it_cannot_place() -> None:
    admission = formed()
    choose(admission, left=(Departure(2, "gone"),), by=1)
    admission = resumed(admission)
    admission.reserve(61, 1, node=51)
    assert notes(admission.feed(ChildReported(61, 0, "was killed by SIGKILL"))) == ["child died"]


# ---------------------------------------------------------------- nobody is left


def test_joiners_wait_as_long_as_a_member_is_left_and_no_longer() -> None:
    admission = formed()
    admission.join(3)
    assert not every(admission.feed(ConnectionEnded(1, "killed")), RefuseConnection)
    refusal = only(admission.feed(LeaveReceived(2, "done")), RefuseConnection)
    assert (refusal.connection, refusal.reason[:31]) == (3, "every member has left or died: ")
    assert only(admission.join(4), RefuseConnection).reason == refusal.reason
    assert every(admission.join(12, node=2), AdmitNode)  # a member that is back
    assert every(admission.join(5), AdmitNode)


def test_at_a_restarted_seed_joiners_wait_for_members_that_may_come_back() -> None:
    assert every(resumed(formed()).join(3), AdmitNode)


LAUNCHER = 51


def member(node: int, launcher: int = 0) -> Member:
    return Member(node, "a", key(node), {"tls": (f"10.0.0.1:{node}",)}, frozenset({"tls"}), launcher)


TWO = Membership("c", 1, (member(1, LAUNCHER), member(2)), (PinnedNode(LAUNCHER, key(LAUNCHER)),))


def a_register(most: int = 0, *, elastic: bool = True) -> MemberRegister:
    return MemberRegister(TWO, elastic=elastic, most=most)


def test_a_member_is_known_by_its_key() -> None:
    register = a_register()
    assert register.check_member(2, key(2)) == 1
    assert register.check_member(3, key(3)) is None
    with pytest.raises(Refusal, match="another key"):
        register.check_member(2, key(3))


def test_who_waits_is_listed_in_the_order_of_coming_once_it_can_be_dialed() -> None:
    register = a_register()
    for node in (9, 8, 7):
        register.admit(member(node))
    register.make_ready(7)
    register.make_ready(9)
    assert register.waiting == (member(9), member(7))
    assert register.admitted == {7, 8, 9}
    assert register.withdraw(9)
    assert not register.withdraw(8)
    assert register.waiting == (member(7),)
    assert register.admitted == {7, 8, 9}  # members that learned of it may choose it at this moment


def test_members_and_those_who_wait_are_never_more_than_allowed() -> None:
    register = a_register(most=3)
    register.check_room(1)
    register.admit(member(3))
    with pytest.raises(Refusal, match=r"2 members and 1 that wait .* no more than 3 .*NEXAR_ELASTIC_MAX_WORLD_SIZE"):
        register.admit(member(4))
    register.admit(member(3))  # the same once more takes no second place
    register.withdraw(3)
    register.admit(member(4))


def test_who_died_makes_room_at_once_and_takes_it_again_when_it_is_back() -> None:
    register = a_register(most=2)
    register.set_present(1, present=False)
    register.set_present(77, present=False)
    assert register.present == 1
    register.check_room(1)
    register.set_present(1, present=True)
    with pytest.raises(Refusal):
        register.check_room(1)


def test_a_cluster_that_is_not_elastic_has_room_for_nobody() -> None:
    with pytest.raises(Refusal, match="formed with 2 members and is not elastic"):
        a_register(elastic=False).admit(member(3))


def test_those_who_wait_find_room_in_one_message() -> None:
    register = a_register()
    addresses = {"tls": tuple(f"10.0.0.1:{number}/{'x' * 480}" for number in range(64))}
    for node in range(10, 40):
        register.admit(Member(node, "a", key(node), addresses))
    with pytest.raises(Refusal, match="exceed one message"):
        register.admit(Member(40, "a", key(40), {**addresses, "quic": addresses["tls"] * 4}))


def test_a_change_makes_joiners_members_and_remembers_who_left() -> None:
    register = a_register()
    register.admit(member(3))
    register.make_ready(3)
    register.set_present(1, present=False)
    register.follow(Change(2, left=(Departure(1, "was killed"),), joined=(member(3),)))
    assert [each.node for each in register.membership.members] == [2, 3]
    assert (register.membership.epoch, register.present, register.waiting) == (2, 2, ())
    assert register.why_former(1, 0) == ("was killed", 2)
    register.follow(Change(3, left=(Departure(2, "done", willing=True),)))
    assert register.why_former(2, 0) == ("left in epoch 3: done", 0)
    assert register.why_former(3, 0) is None
    with pytest.raises(MembershipError):
        register.follow(Change(9))


def test_a_new_member_whose_line_broke_is_absent() -> None:
    register = a_register()
    register.follow(Change(2, joined=(member(3),)))
    assert (register.membership.size, register.present) == (3, 2)


def test_who_says_that_it_was_a_member_and_is_none_is_notified() -> None:
    register = MemberRegister(Membership("c", 5, TWO.members))
    assert register.why_former(9, 3) == ("expelled: it is not a member of epoch 5", 5)
    assert register.why_former(9, 6) is None  # it may know more than this seed
    assert register.why_former(9, 0) is None


def test_launchers_speak_of_ranks_of_the_first_membership() -> None:
    register = a_register()
    register.follow(Change(2, left=(Departure(1, "gone"),)))
    assert register.child(LAUNCHER, 0) == 1
    assert register.child(LAUNCHER, 1) is None
    assert register.knows_children
    assert not MemberRegister(Membership("c", 2, TWO.members)).knows_children
