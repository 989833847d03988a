"""One generation of one communicator: who comes next, and what those who are gone left behind.

What becomes of a communicator: open until it is sealed, and everybody is notified after.

Members of a new generation: nobody goes on before all have come, and all know how far all had come.
"""

import threading
from typing import Any, cast

import pytest

from nexar.cluster.membership import WORLD, Change, Departure
from nexar.communicator.events import FailureEvent
from nexar.communicator.generation import Generation, GenerationOutcome
from nexar.errors import MembershipChanged, NexarError, NoQuorum, Revoked
from tests.unit.communicator.generations import Drive, generation, interruptions
from tests.unit.communicator.scripted import membership


def gone(*nodes: int) -> tuple[Departure, ...]:
    return tuple(Departure(node, f"cause of {node}") for node in nodes)


def silent(*nodes: int) -> tuple[Departure, ...]:
    return tuple(Departure(node, "it left", willing=True, quiet=True) for node in nodes)


PART = 7  # the id of a communicator that was split off


def nodes(of: object) -> list[int] | None:
    return None if of is None else [member.node for member in of.members]  # type: ignore[attr-defined]


# ---------------------------------------------------------------- who comes next


def test_the_world_goes_on_as_the_membership_of_the_last_change_that_is_not_quiet() -> None:
    world = generation([1, 2, 3])
    assert world.communicator == WORLD
    assert world.next_membership(membership([1, 2, 3], 1), []) is None
    changes = [Change(2, left=gone(2)), Change(3, joined=membership([4], 1).members), Change(4, renewed=(PART,))]
    assert world.next_membership(membership([1, 3, 4], 3), changes[:2]) == membership([1, 3, 4], 3)
    assert world.next_membership(membership([1, 3, 4], 4), changes) == membership([1, 3, 4], 3)


@pytest.mark.parametrize("communicator", [WORLD, PART])
def test_who_went_quietly_is_missed_only_when_something_else_gives_it_a_successor(communicator: int) -> None:
    """And so for all members, at whichever moment they look."""
    comm = generation([1, 2, 3, 4], communicator=communicator)
    quiet = [Change(2, left=silent(4)), Change(3, left=silent(9))]
    assert comm.next_membership(membership([1, 2, 3], 3), quiet) is None
    changes = [*quiet, Change(4, renewed=(communicator,)), Change(5, left=silent(3)), Change(6, left=gone(9))]
    for seen, world in ((3, [1, 2, 3]), (4, [1, 2])):
        following = comm.next_membership(membership(world, seen + 1), changes[:seen])
        assert (nodes(following), following and following.epoch) == ([1, 2, 3], 4)


def test_who_went_quietly_so_long_ago_that_it_is_forgotten_is_still_gone() -> None:
    part = generation([1, 2, 3, 4], communicator=PART)
    following = part.next_membership(membership([1, 3], 9), [Change(8, left=silent(2)), Change(9, renewed=(PART,))])
    assert nodes(following) == [1, 3]


def test_a_part_that_lost_nobody_goes_on_as_it_is() -> None:
    part = generation([1, 3], communicator=PART)
    assert part.next_membership(membership([1, 3, 4], 2), [Change(2, left=gone(2))]) is None


def test_a_part_that_lost_a_member_goes_on_without_it_in_the_old_order() -> None:
    part = generation([3, 1, 2], communicator=PART)
    following = part.next_membership(membership([2, 3], 2), [Change(2, left=gone(1))])
    assert (nodes(following), following and following.epoch) == ([3, 2], 2)


def test_of_several_changes_the_epoch_is_that_of_the_last_one_that_concerns_it() -> None:
    """So members that look at different moments come to the same answer."""
    part = generation([1, 2, 3], communicator=PART)
    changes = [
        Change(2, left=gone(4)),  # somebody else
        Change(3, left=gone(2)),
        Change(4, severed=((1, 5),)),  # a line of ours to somebody else
        Change(5, left=gone(6)),
    ]
    for seen in (changes[:2], changes[:3], changes):
        following = part.next_membership(membership([1, 3], 9), seen)
        assert (nodes(following), following and following.epoch) == ([1, 3], 3)


def test_several_losses_add_up_and_a_cut_between_who_is_gone_and_who_stays_is_no_further_step() -> None:
    part = generation([1, 2, 3, 4], communicator=PART)
    changes = [Change(2, left=gone(2)), Change(3, severed=((2, 3),)), Change(4, left=gone(4))]
    following = part.next_membership(membership([1, 3], 4), changes)
    assert (nodes(following), following and following.epoch) == ([1, 3], 4)
    following = part.next_membership(membership([1, 3, 4], 3), changes[:2])
    assert (nodes(following), following and following.epoch) == ([1, 3, 4], 2)


def test_a_cut_between_two_of_its_members_gives_it_a_successor_of_the_same_members() -> None:
    part = generation([1, 2, 3], communicator=PART)
    following = part.next_membership(membership([1, 2, 3, 4], 2), [Change(2, severed=((2, 3),))])
    assert (nodes(following), following and following.epoch) == ([1, 2, 3], 2)


def test_one_that_is_renewed_gets_a_successor_of_the_same_members() -> None:
    part = generation([1, 2], communicator=PART)
    assert nodes(part.next_membership(membership([1, 2], 2), [Change(2, renewed=(PART,))])) == [1, 2]
    assert part.next_membership(membership([1, 2], 2), [Change(2, renewed=(8,))]) is None


def test_what_was_chosen_before_it_was_made_does_not_concern_it() -> None:
    part = generation([1, 2], epoch=4, communicator=PART)
    changes = [Change(3, left=gone(9)), Change(4, severed=((1, 2),))]
    assert part.next_membership(membership([1, 2], 4), changes) is None


def test_why_members_are_gone_is_reported_by_their_ranks_in_it() -> None:
    part = generation([3, 1, 2], communicator=PART)
    changes = [Change(2, left=gone(2)), Change(3, left=gone(9, 3))]
    assert part.lost(changes) == {0: "cause of 3", 2: "cause of 2"}
    assert list(part.lost(changes)) == [0, 2]


# ---------------------------------------------------------------- its end


def test_an_interruption_ends_every_call_with_what_was_given_or_that_its_members_change() -> None:
    world = generation([1, 2])
    assert not world.interrupted
    world.interrupt()
    assert world.interrupted
    (raised,) = interruptions(world)
    assert isinstance(raised, Revoked)
    error = NexarError("a reason of its own")
    world.interrupt(error)
    assert interruptions(world)[1] is error


def test_a_successor_has_the_functions_and_the_listeners_of_the_one_before() -> None:
    received: list[object] = []
    came = threading.Event()

    def listen(event: object) -> None:
        received.append(event)
        came.set()

    old, new = generation([1, 2]), generation([1], epoch=2)
    subscription = old.failures.subscribe(listen)
    new.inherit(old)
    assert new.registry is old.registry
    event = FailureEvent(0, 1, "a cause", "stuck", 2)
    new.failures.publish(event)
    assert came.wait(20)
    assert received == [event]
    subscription.close()
    new.end()


def test_what_it_stands_on_is_freed_once() -> None:
    freed: list[str] = []
    world = generation([1, 2])
    made = Generation(world.context, lambda: freed.append("freed"))
    threads = [threading.Thread(target=made.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert freed == ["freed"]


def test_where_there_is_no_successor_nothing_more_is_reported_and_what_it_stands_on_is_free() -> None:
    world = generation([1, 2])
    received: list[object] = []
    world.memberships.subscribe(received.append)
    world.end()
    world.memberships.publish("too late")  # type: ignore[arg-type]
    assert received == []
    assert world.group.closed.is_set()  # type: ignore[attr-defined]


# ---------------------------------------------------------------- clearing away


def test_what_takes_its_time_to_end_keeps_nobody_waiting_but_who_closes_the_heir() -> None:
    old, heir = generation([1, 2, 3]), generation([1, 2], epoch=2)
    go, ended = threading.Event(), threading.Event()
    old.when_closed.append(lambda: go.wait(20) and ended.set())
    old.close_in_background(heir)
    assert not ended.is_set(), "it is not waited for here"
    closing = threading.Thread(target=heir.close)
    closing.start()
    go.set()
    closing.join(20)
    assert ended.is_set()


def test_when_the_heir_is_closed_already_it_is_closed_here() -> None:
    old, heir = generation([1, 2, 3]), generation([1, 2], epoch=2)
    heir.close()
    here: list[threading.Thread] = []
    old.when_closed.append(lambda: here.append(threading.current_thread()))
    old.close_in_background(heir)
    assert here == [threading.current_thread()]


def result() -> tuple[GenerationOutcome, Drive]:
    drive = Drive()
    return GenerationOutcome(cast(Any, drive)), drive


def test_while_it_is_open_nothing_is_raised() -> None:
    open_one, _ = result()
    open_one.check()
    open_one.cancel()  # who waits no longer changes nothing
    assert not open_one.done
    assert open_one.name == "the agreement on the next membership"
    assert open_one.awaited().missing == "its vote"


def test_once_sealed_every_call_raises_its_own_copy() -> None:
    sealed, drive = result()
    error = NoQuorum(alive=[0], needed=2)
    sealed.resolve(error)
    for _ in range(2):
        with pytest.raises(NoQuorum) as raised:
            sealed.check()
        assert raised.value is not error
        assert (raised.value.alive, raised.value.needed) == (error.alive, 2)
    assert drive.kicks  # who waits for it may sleep, and nothing else would wake it


def test_a_later_message_replaces_an_earlier_one() -> None:
    """Who has no quorum may still learn that the others went on."""
    sealed, _ = result()
    sealed.resolve(NoQuorum(alive=[0], needed=2))
    sealed.resolve(MembershipChanged(communicator="the next one", lost={1: "gone"}, joined=(), completed_by_all=None))
    with pytest.raises(MembershipChanged) as raised:
        sealed.check()
    assert raised.value.communicator == "the next one"


def test_who_waits_for_it_is_notified() -> None:
    awaited, _ = result()
    reported = threading.Event()
    with awaited.lock:
        awaited.when_done(reported.set)
    assert not reported.is_set()
    awaited.resolve(NoQuorum(alive=[0], needed=2))
    assert reported.is_set()
    with pytest.raises(NoQuorum):
        awaited.result()
