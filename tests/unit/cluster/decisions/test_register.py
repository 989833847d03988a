"""Who is in, who waits, who may not come back."""

import pytest

from nexar.cluster.change import Change, Departure
from nexar.cluster.decisions.refusals import Refusal
from nexar.cluster.decisions.register import Register
from nexar.cluster.membership import Attendant, Member, Membership, MembershipError
from tests.unit.cluster.decisions.door import key

LAUNCHER = 51


def member(node: int, launcher: int = 0) -> Member:
    return Member(node, "a", key(node), {"tls": (f"10.0.0.1:{node}",)}, frozenset({"tls"}), launcher)


TWO = Membership("c", 1, (member(1, LAUNCHER), member(2)), (Attendant(LAUNCHER, key(LAUNCHER)),))


def a_register(most: int = 0, *, elastic: bool = True) -> Register:
    return Register(TWO, elastic=elastic, most=most)


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
    assert register.admitted == {7, 8, 9}  # members that heard of it may choose it at this moment


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
    with pytest.raises(Refusal, match="fill a message"):
        register.admit(Member(40, "a", key(40), {**addresses, "quic": addresses["tls"] * 4}))


def test_a_change_makes_joiners_members_and_remembers_who_left() -> None:
    register = a_register()
    register.admit(member(3))
    register.make_ready(3)
    register.set_present(1, present=False)
    register.follow(Change(2, left=(Departure(1, "was killed"),), joined=(member(3),)))
    assert [each.node for each in register.membership.members] == [2, 3]
    assert (register.membership.epoch, register.present, register.waiting) == (2, 2, ())
    assert register.why_former(1, 0) == ("expelled in epoch 2: was killed", 2)
    register.follow(Change(3, left=(Departure(2, "done", willing=True),)))
    assert register.why_former(2, 0) == ("left in epoch 3: done", 0)
    assert register.why_former(3, 0) is None
    with pytest.raises(MembershipError):
        register.follow(Change(9))


def test_a_new_member_whose_line_broke_is_absent() -> None:
    register = a_register()
    register.follow(Change(2, joined=(member(3),)))
    assert (register.membership.size, register.present) == (3, 2)


def test_who_says_that_it_was_a_member_and_is_none_is_told_so() -> None:
    register = Register(Membership("c", 5, TWO.members))
    assert register.why_former(9, 3) == ("expelled: it is no member of epoch 5 any more", 5)
    assert register.why_former(9, 6) is None  # it may know more than this seed
    assert register.why_former(9, 0) is None


def test_launchers_speak_of_ranks_of_the_first_membership() -> None:
    register = a_register()
    register.follow(Change(2, left=(Departure(1, "gone"),)))
    assert register.child(LAUNCHER, 0) == 1
    assert register.child(LAUNCHER, 1) is None
    assert register.knows_children
    assert not Register(Membership("c", 2, TWO.members)).knows_children
