"""After the commit: joiners wait, members choose, and the seed follows what was chosen."""

from nexar.cluster.change import Change, Departure
from nexar.cluster.decisions.admission import Admission
from nexar.cluster.decisions.admission_events import (
    Action,
    Admit,
    Applied,
    ChildDied,
    Commit,
    Drop,
    Gone,
    Left,
    Note,
    Ready,
    Refuse,
    Said,
)
from nexar.cluster.decisions.door_rules import DoorRules
from nexar.cluster.membership import Member, Membership, decode_member
from nexar.wire.joining import Current, Died, Waiting, Word
from nexar.wire.messages import Chosen, Ping, decode
from tests.unit.cluster.decisions.door import Door, a_door, application, ends, every, key, notes, only, told

LATE = "the cluster has formed with 2 members and is not elastic"


def formed(*, elastic: bool = True, most: int = 0) -> Door:
    """Members 1 and 2 on connections of these numbers; 1 was started by launcher 51."""
    door = a_door(2, elastic=elastic, most=most)
    door.reserve(51, 1)
    door.join(1, rank=0, launcher=51)
    door.join(2)
    return door


def resumed(door: Door, *, elastic: bool = True) -> Door:
    membership = door.machine.membership
    assert membership is not None
    return Door(Admission.resumed(Membership.decode(membership.encode()), rules=DoorRules(elastic=elastic)))


def waiting(door: Door) -> tuple[Member, ...]:
    """Who waits, as the members were told last."""
    message, _ = told(door.actions, Waiting)[-1]
    return tuple(map(decode_member, message.members))


def choose(
    door: Door, *, left: tuple[Departure, ...] = (), joined: tuple[Member, ...] = (), by: int = 2
) -> list[Action]:
    """A member tells what was chosen."""
    assert door.machine.membership is not None
    epoch = door.machine.membership.epoch
    chosen = Chosen((0, epoch, 0), Change(epoch + 1, left=left, joined=joined).encode())
    return door.tell(Said(by, chosen))


# ---------------------------------------------------------------- joining


def test_a_joiner_is_let_in_and_waits_and_all_are_told_when_it_can_be_dialed() -> None:
    door = formed()
    actions = door.join(3, rank=0)  # a rank means nothing any more
    assert only(actions, Admit).rank is None
    ((current, to),) = told(actions, Current)
    assert (Membership.decode(current.membership), to) == (door.machine.membership, (3,))
    ((message, to),) = told(actions, Waiting)
    assert [decode_member(each).node for each in message.members] == [3]
    assert to == (1, 2)
    assert door.order() == [1, 2]


def test_before_it_can_be_dialed_nobody_is_told() -> None:
    door = formed()
    door.join(3)
    applied = Applied(4, application(), True, key(4))
    assert told(door.greet(4) + door.tell(applied), Waiting) == []
    assert door.tell(Gone(4, "changed its mind")) == [Note("gone", "10.0.0.9:4", 4, None, "changed its mind")]
    assert [member.node for member in waiting(door)] == [3]


def test_a_joiner_that_goes_away_waits_no_more() -> None:
    for end in (Gone(3, "killed"), Left(3, "changed its mind")):
        door = formed()
        door.join(3)
        actions = door.tell(end)
        assert told(actions, Waiting) == [(Waiting(), (1, 2))]
        assert only(actions, Note).rank is None


def test_a_joiner_that_comes_back_on_another_line_waits_once() -> None:
    door = formed()
    door.join(3)
    actions = door.join(13, node=3)
    assert only(actions, Drop).connection == 3
    assert [member.node for member in waiting(door)] == [3]
    assert "another key" in only(door.join(14, node=3, fingerprint=b"x" * 32), Refuse).reason


def test_above_the_maximum_joiners_are_refused_with_that_reason() -> None:
    door = formed(most=3)
    door.join(3)
    assert "no more than 3 are allowed" in only(door.join(4), Refuse).reason
    door.tell(Gone(1, "killed"))  # who died makes room for who is started in its place
    assert every(door.join(5), Admit)


def test_a_cluster_that_is_not_elastic_refuses_them() -> None:
    assert only(formed(elastic=False).join(3), Refuse).reason == LATE


def test_a_known_node_does_not_join_as_somebody_else() -> None:
    door = formed()
    assert "not as a member" in only(door.join(3, node=51), Refuse).reason
    assert "has not joined" in only(door.tell(Ready(51)), Refuse).reason


def test_a_launcher_may_come_later_too_for_children_without_ranks() -> None:
    door = formed(most=4)
    actions = door.reserve(61, 2)
    assert (only(actions, Admit).first_rank, only(actions, Commit).connections) == (None, (61,))
    assert "no more than 4" in only(door.reserve(62, 3), Refuse).reason
    assert only(door.reserve(63, 2, node=61), Drop).connection == 61
    assert only(formed(elastic=False).reserve(61, 2), Refuse).reason == LATE


# ---------------------------------------------------------------- what was chosen


def test_a_chosen_joiner_is_told_that_it_is_in_and_everybody_what_was_chosen() -> None:
    door = formed()
    door.join(3)
    door.join(4)
    actions = choose(door, joined=waiting(door)[:1])
    commit = only(actions, Commit)
    assert [member.node for member in commit.membership.members] == door.order() == [1, 2, 3]
    assert (commit.connections, commit.present) == ((3,), {1, 2, 3})
    assert actions[0] is commit  # it is kept before anybody hears of it
    assert [to for _, to in told(actions, Current)] == [(4,)]
    assert [(len(message.members), to) for message, to in told(actions, Waiting)] == [(1, (1, 2, 3))]
    ((word, to),) = told(actions, Word)
    assert isinstance(decode(word.body), Chosen)
    assert set(to) >= {1}
    assert notes(actions) == ["moved on"]


def test_who_was_expelled_hears_what_was_chosen_and_then_why_its_line_ends() -> None:
    door = formed()
    actions = choose(door, left=(Departure(1, "silent\nfor long"),))
    words = [index for index, action in enumerate(actions) if told([action], Word)]
    refusal = only(actions, Refuse)
    assert refusal == Refuse(1, "expelled in epoch 2: silent for long", 2)
    assert words[-1] < actions.index(refusal)
    assert door.order() == [2]
    assert only(door.join(11, node=1), Refuse) == Refuse(11, refusal.reason, 2)
    assert only(door.join(12, node=1, epoch=1), Refuse).reason == "expelled in epoch 2: silent for long"


def test_a_member_that_raised_is_noted_as_gone_with_what_it_raised() -> None:
    """It may still be connected when the others have moved on. That is no refusal, and the launcher shows the rest."""
    door = formed()
    raised = "it raised an exception and left:\nTraceback (most recent call last):\n  …\nValueError: on purpose"
    noted = [(note.kind, note.reason) for note in every(choose(door, left=(Departure(1, raised),)), Note)]
    assert ("gone", "ValueError: on purpose") in noted


def test_who_left_by_its_own_will_is_not_refused() -> None:
    door = formed()
    actions = choose(door, left=(Departure(1, "done", willing=True),))
    assert ends(actions) == [1]
    assert not every(actions, Refuse)
    assert told(actions, Died) == []


def test_nobody_moves_on_twice_or_by_nonsense() -> None:
    door = formed()
    chosen = Chosen((0, 1, 0), Change(2, left=(Departure(1, "gone"),)).encode())
    assert every(door.tell(Said(2, chosen)), Commit)
    assert not every(door.tell(Said(2, chosen)), Commit)
    assert not every(door.tell(Said(2, Chosen((0, 2, 0), b"nonsense"))), Commit)
    assert door.tell(Said(2, Ping(1))) == []
    assert door.order() == [2]


def test_only_members_speak_like_members() -> None:
    door = formed()
    door.join(3)
    for stranger in (3, 51):
        assert "is none" in only(door.tell(Said(stranger, Chosen((0, 1, 0), b""))), Refuse).reason
    forming = a_door(2)
    forming.join(1)
    assert "none yet" in only(forming.tell(Said(1, Chosen((0, 1, 0), b""))), Refuse).reason


# ---------------------------------------------------------------- hints


def test_a_line_that_breaks_is_a_hint_for_the_other_members() -> None:
    door = formed()
    door.join(3)
    ((died, to),) = told(door.tell(Gone(1, "reset")), Died)
    assert (died, to) == (Died(1, 1, "its line to the seed broke: reset"), (2,))


def test_a_farewell_is_none() -> None:
    assert told(formed().tell(Left(1, "done")), Died) == []


def test_the_death_of_a_child_is_a_hint_also_when_ranks_have_moved() -> None:
    door = formed()
    ((died, to),) = told(door.tell(ChildDied(51, 0, "was killed by SIGKILL")), Died)
    assert (died, to) == (Died(1, 1, "was killed by SIGKILL"), (2,))
    choose(door, left=(Departure(1, "gone"),))
    assert told(door.tell(ChildDied(51, 0, "was killed by SIGKILL")), Died) == []
    assert "which it is not" in only(door.tell(ChildDied(51, 1, "killed")), Refuse).reason


def test_a_child_that_ended_well_is_no_death() -> None:
    assert formed().tell(ChildDied(51, 0, "ended", well=True)) == []


# ---------------------------------------------------------------- started again


def test_a_restarted_seed_knows_the_newest_membership_and_follows_on() -> None:
    door = formed()
    door.join(3)
    choose(door, joined=waiting(door))
    door = resumed(door)
    actions = door.join(12, node=3)
    assert only(actions, Commit).membership.epoch == 2
    assert only(actions, Admit).rank == 2
    assert told(actions, Waiting) == [(Waiting(), (12,))]
    choose(door, left=(Departure(1, "gone"),), by=12)
    assert door.order() == [2, 3]


def test_a_restarted_seed_that_is_behind_lets_newer_members_try_again() -> None:
    door = resumed(formed())
    assert only(door.join(9, epoch=3), Drop).connection == 9
    assert "no member of epoch 1" in only(door.join(10, epoch=1), Refuse).reason


def test_a_restarted_seed_takes_reports_of_ranks_that_it_cannot_place() -> None:
    door = formed()
    choose(door, left=(Departure(2, "gone"),), by=1)
    door = resumed(door)
    door.reserve(61, 1, node=51)
    assert notes(door.tell(ChildDied(61, 0, "was killed by SIGKILL"))) == ["child died"]


# ---------------------------------------------------------------- nobody is left


def test_joiners_wait_as_long_as_a_member_is_left_and_no_longer() -> None:
    door = formed()
    door.join(3)
    assert not every(door.tell(Gone(1, "killed")), Refuse)
    refusal = only(door.tell(Left(2, "done")), Refuse)
    assert (refusal.connection, refusal.reason[:31]) == (3, "every member has left or died: ")
    assert only(door.join(4), Refuse).reason == refusal.reason
    assert every(door.join(12, node=2), Admit)  # a member that is back
    assert every(door.join(5), Admit)


def test_at_a_restarted_seed_joiners_wait_for_members_that_may_come_back() -> None:
    assert every(resumed(formed()).join(3), Admit)
