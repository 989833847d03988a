"""A seed whose members go on: joiners wait at it, what was chosen is followed, and a restart forgets nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nexar.cluster.membership import Change, Departure, Member, Membership, decode_member
from nexar.cluster.seed import SeedService
from nexar.wire import control
from nexar.wire.join import (
    Current,
    JoinRefusedMessage,
    Leave,
    LivenessQuery,
    LivenessReply,
    MemberDied,
    SeedPaxosMessage,
    WaitingJoiners,
)
from tests.cluster.joiners import Knocker, Line, knocking, wait_for_event

HERE = "127.0.0.1:0"


@pytest.fixture
def knocker() -> Iterator[Knocker]:
    with knocking("tls") as made:
        yield made


def open_seed(state: Path | None = None, size: int | None = 2, **settings: object) -> SeedService:
    return SeedService(HERE, size, state_dir=state, transports=("tls",), elastic_enabled=True, **settings)


def form(seed: SeedService, knocker: Knocker) -> tuple[Line, Line]:
    lines = knocker.knock(seed, 7), knocker.knock(seed, 8)
    for rank, line in enumerate(lines):
        line.join(rank=rank)
    for line in lines:
        line.hear_membership()
    return lines


def say(line: Line, word: control.Message) -> None:
    line.send(SeedPaxosMessage(control.encode(word)))


def chosen(epoch: int, *, left: tuple[Departure, ...] = (), joined: tuple[Member, ...] = ()) -> control.Chosen:
    return control.Chosen((0, epoch, 0), Change(epoch + 1, left=left, joined=joined).encode())


def hear_word(line: Line) -> control.Message | control.Unknown:
    return control.decode(line.hear(SeedPaxosMessage).body)


def test_a_joiner_waits_is_taken_and_is_a_member_after_a_restart(tmp_path: Path, knocker: Knocker) -> None:
    with open_seed(tmp_path) as seed:
        first, second = form(seed, knocker)
        joiner = knocker.knock(seed, 9)
        joiner.join()
        assert Membership.decode(joiner.hear(Current).membership) == seed.membership
        (member,) = (decode_member(each) for each in first.hear(WaitingJoiners).members)
        assert (member.node, member.host) == (9, "here")
        word = chosen(1, joined=(member,))
        say(first, word)
        membership = joiner.hear_membership()
        assert [each.node for each in membership.members] == [7, 8, 9]
        wait_for_event(seed, "moved on", "epoch 2")
        assert seed.membership == membership
        second.hear(WaitingJoiners)
        assert second.hear(WaitingJoiners) == WaitingJoiners()
        assert hear_word(second) == word
        ticket = seed.ticket
    with open_seed(tmp_path, None) as seed:
        assert (seed.membership, seed.ticket) == (membership, ticket)
        back = knocker.knock(seed, 9)
        back.key = joiner.key
        back.join(epoch=2)
        assert back.hear_membership() == membership
        say(back, chosen(2, left=(Departure(7, "was killed"),)))  # it brings the seed up to date
        wait_for_event(seed, "moved on", "epoch 3")
        expelled = knocker.knock(seed, 7)
        expelled.key = first.key
        expelled.apply(epoch=1)
        assert expelled.hear(JoinRefusedMessage).reason == "expelled in epoch 3: was killed"


def test_the_seed_does_not_remove_who_answers_and_votes_for_the_removal_of_who_is_gone(knocker: Knocker) -> None:
    with open_seed() as seed:
        first, second = form(seed, knocker)
        instance, ballot = (0, 1, 0), control.BallotNumber(1, 7)
        value = Change(2, left=(Departure(8, "silent"),)).encode()
        say(first, control.Prepare(instance, ballot))
        assert isinstance(hear_word(first), control.Promise)
        say(first, control.Accept(instance, ballot, value))
        second.send(LivenessReply(second.hear(LivenessQuery).number))
        rejected = hear_word(first)
        assert isinstance(rejected, control.Rejected)
        assert rejected.reachable == (8,)
        second.carrier.abort("killed")
        died = first.hear(MemberDied)
        assert (died.node, died.epoch) == (8, 1)
        ballot = control.BallotNumber(2, 7)
        say(first, control.Prepare(instance, ballot))
        assert isinstance(hear_word(first), control.Promise)
        say(first, control.Accept(instance, ballot, value))
        assert isinstance(hear_word(first), control.Accepted)


def test_a_restarted_seed_keeps_the_promise_it_gave(tmp_path: Path, knocker: Knocker) -> None:
    with open_seed(tmp_path) as seed:
        first, second = form(seed, knocker)
        say(first, control.Prepare((0, 1, 0), control.BallotNumber(9, 7)))
        assert isinstance(hear_word(first), control.Promise)
    with open_seed(tmp_path) as seed:
        back = knocker.knock(seed, 8)
        back.key = second.key
        back.join()
        back.hear_membership()
        back.hear(WaitingJoiners)
        say(back, control.Prepare((0, 1, 0), control.BallotNumber(4, 8)))
        rejected = hear_word(back)
        assert isinstance(rejected, control.Rejected)
        assert rejected.promised == control.BallotNumber(9, 7)


def test_a_seed_that_may_grow_says_when_there_is_no_room(knocker: Knocker) -> None:
    with open_seed(elastic_max_world_size=3) as seed:
        first, second = form(seed, knocker)
        one, other = knocker.knock(seed, 9), knocker.knock(seed, 10)
        one.join()
        other.apply()
        assert "no more than 3 are allowed" in other.hear(JoinRefusedMessage).reason
        for member in (first, second):
            member.send(Leave("done"))
        one.hear(Current)
        assert "every member has left" in one.hear(JoinRefusedMessage).reason
        assert seed.wait_empty(20)
