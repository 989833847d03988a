"""A seed whose members go on: joiners wait at it, what was chosen is followed, and a restart forgets nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nexar.cluster.membership import Change, Departure, Member, decode_member, decode_membership
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
from tests.cluster.joiners import JoinDialer, Line, join_dialer, wait_for_event

HERE = "127.0.0.1:0"


@pytest.fixture
def dialer() -> Iterator[JoinDialer]:
    with join_dialer("tls") as made:
        yield made


def open_seed(state: Path | None = None, size: int | None = 2, **settings: object) -> SeedService:
    return SeedService(HERE, size, state_dir=state, transports=("tls",), elastic_enabled=True, **settings)


def form(seed: SeedService, dialer: JoinDialer) -> tuple[Line, Line]:
    lines = dialer.dial(seed, 7), dialer.dial(seed, 8)
    for rank, line in enumerate(lines):
        line.join(rank=rank)
    for line in lines:
        line.receive_membership()
    return lines


def say(line: Line, message: control.Message) -> None:
    line.send(SeedPaxosMessage(control.encode(message)))


def chosen(epoch: int, *, left: tuple[Departure, ...] = (), joined: tuple[Member, ...] = ()) -> control.Chosen:
    return control.Chosen((0, epoch, 0), Change(epoch + 1, left=left, joined=joined).encode())


def receive_message(line: Line) -> control.Message | control.Unknown:
    return control.decode(line.receive(SeedPaxosMessage).body)


def test_a_joiner_waits_is_taken_and_is_a_member_after_a_restart(tmp_path: Path, dialer: JoinDialer) -> None:
    with open_seed(tmp_path) as seed:
        first, second = form(seed, dialer)
        joiner = dialer.dial(seed, 9)
        joiner.join()
        assert decode_membership(joiner.receive(Current).membership) == seed.membership
        (member,) = (decode_member(each) for each in first.receive(WaitingJoiners).members)
        assert (member.node, member.host) == (9, "here")
        message = chosen(1, joined=(member,))
        say(first, message)
        membership = joiner.receive_membership()
        assert [each.node for each in membership.members] == [7, 8, 9]
        wait_for_event(seed, "moved on", "epoch 2")
        assert seed.membership == membership
        second.receive(WaitingJoiners)
        assert second.receive(WaitingJoiners) == WaitingJoiners()
        assert receive_message(second) == message
        ticket = seed.ticket
    with open_seed(tmp_path, None) as seed:
        assert (seed.membership, seed.ticket) == (membership, ticket)
        back = dialer.dial(seed, 9)
        back.key = joiner.key
        back.join(epoch=2)
        assert back.receive_membership() == membership
        say(back, chosen(2, left=(Departure(7, "was killed"),)))  # it brings the seed up to date
        wait_for_event(seed, "moved on", "epoch 3")
        expelled = dialer.dial(seed, 7)
        expelled.key = first.key
        expelled.apply(epoch=1)
        refusal = expelled.receive(JoinRefusedMessage)
        assert (refusal.reason, refusal.expelled) == ("was killed", 3)


def test_the_seed_does_not_remove_who_answers_and_votes_for_the_removal_of_who_is_gone(dialer: JoinDialer) -> None:
    with open_seed() as seed:
        first, second = form(seed, dialer)
        instance, ballot = (0, 1, 0), control.BallotNumber(1, 7)
        value = Change(2, left=(Departure(8, "silent"),)).encode()
        say(first, control.Prepare(instance, ballot))
        assert isinstance(receive_message(first), control.Promise)
        say(first, control.Accept(instance, ballot, value))
        second.send(LivenessReply(second.receive(LivenessQuery).number))
        rejected = receive_message(first)
        assert isinstance(rejected, control.Rejected)
        assert rejected.reachable == (8,)
        second.carrier.abort("killed")
        died = first.receive(MemberDied)
        assert (died.node, died.epoch) == (8, 1)
        ballot = control.BallotNumber(2, 7)
        say(first, control.Prepare(instance, ballot))
        assert isinstance(receive_message(first), control.Promise)
        say(first, control.Accept(instance, ballot, value))
        assert isinstance(receive_message(first), control.Accepted)


def test_a_restarted_seed_keeps_the_promise_it_gave(tmp_path: Path, dialer: JoinDialer) -> None:
    with open_seed(tmp_path) as seed:
        first, second = form(seed, dialer)
        say(first, control.Prepare((0, 1, 0), control.BallotNumber(9, 7)))
        assert isinstance(receive_message(first), control.Promise)
    with open_seed(tmp_path) as seed:
        back = dialer.dial(seed, 8)
        back.key = second.key
        back.join()
        back.receive_membership()
        back.receive(WaitingJoiners)
        say(back, control.Prepare((0, 1, 0), control.BallotNumber(4, 8)))
        rejected = receive_message(back)
        assert isinstance(rejected, control.Rejected)
        assert rejected.promised == control.BallotNumber(9, 7)


def test_a_seed_that_may_grow_says_when_there_is_no_room(dialer: JoinDialer) -> None:
    with open_seed(elastic_max_world_size=3) as seed:
        first, second = form(seed, dialer)
        one, other = dialer.dial(seed, 9), dialer.dial(seed, 10)
        one.join()
        other.apply()
        refused = other.receive(JoinRefusedMessage)
        assert "no more than 3 are allowed" in refused.reason
        assert (refused.code, refused.nobody_left) == ("full", False)
        for member in (first, second):
            member.send(Leave("done"))
        one.receive(Current)
        refused = one.receive(JoinRefusedMessage)
        assert "every member has left" in refused.reason
        assert (refused.code, refused.nobody_left) == ("nobody_left", True)  # both: older nodes know no codes
        assert seed.wait_empty(20)
