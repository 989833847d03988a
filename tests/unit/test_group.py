import math
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.errors import LinkClosed, OperationTimeout, Revoked, UsageError
from nexar.group import Group, deadline_after
from nexar.links.sending import MessageHeader
from nexar.types import ANY_SOURCE, ANY_TAG
from nexar.wire.frame import Space
from tests.ranks import EVENT_TIMEOUT

TAGGED = MessageHeader(space=Space.TAGGED, tag=1)


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    with local_communicators(2, Config()) as world:
        yield [communicator._group for communicator in world]


def receive(group: Group, source: int, into: memoryview | None = None) -> bytes:
    asked = group.post_receive(source, into, space=Space.TAGGED, tag=1)
    group.wait((asked,), deadline_after(EVENT_TIMEOUT))
    assert asked.into is not None
    return bytes(asked.into)


def test_a_group_knows_ranks_and_nodes(groups: list[Group]) -> None:
    for rank, group in enumerate(groups):
        assert (group.rank, group.size) == (rank, 2)
        assert [group.rank_of(member.node) for member in group.membership.members] == [0, 1]


def test_bytes_travel_by_rank(groups: list[Group]) -> None:
    sent = groups[0].post_send(1, memoryview(b"hello"), deadline_after(EVENT_TIMEOUT), about=TAGGED)
    groups[0].wait((sent,), deadline_after(EVENT_TIMEOUT))
    assert receive(groups[1], 0) == b"hello"


def test_sending_to_oneself_works_before_and_after_the_receive_is_posted(groups: list[Group]) -> None:
    group = groups[0]
    asked = group.post_receive(ANY_SOURCE, None, space=Space.TAGGED, tag=ANY_TAG)
    assert group.post_send(0, memoryview(b"one"), deadline_after(EVENT_TIMEOUT), about=TAGGED).done
    group.wait((asked,), deadline_after(EVENT_TIMEOUT))
    assert bytes(asked.into or b"") == b"one"
    group.post_send(0, memoryview(b"two"), deadline_after(EVENT_TIMEOUT), about=TAGGED)
    into = memoryview(bytearray(3))
    assert receive(group, 0, into) == bytes(into) == b"two"


def test_what_one_sends_to_oneself_is_copied(groups: list[Group]) -> None:
    data = bytearray(200_000)
    groups[0].post_send(0, memoryview(data), deadline_after(EVENT_TIMEOUT), about=TAGGED)
    data[:] = b"x" * len(data)
    assert receive(groups[0], 0) == bytes(200_000)


def test_what_an_old_generation_still_sends_is_never_taken_for_the_next_ones(groups: list[Group]) -> None:
    """Who is in the middle of a call may come to its next message after others have begun the next generation."""
    later = [
        Group(old.node, old.mesh, replace(old.membership, epoch=2), old.communicator, generation=2) for old in groups
    ]
    for size in (5, 1_000_000):
        with pytest.raises(Revoked, match="generation 2 has begun"):
            groups[0].post_send(1, memoryview(bytes(size)), deadline_after(EVENT_TIMEOUT), about=TAGGED)
    sent = later[0].post_send(1, memoryview(b"hello"), deadline_after(EVENT_TIMEOUT), about=TAGGED)
    later[0].wait((sent,), deadline_after(EVENT_TIMEOUT))
    assert receive(later[1], 0) == b"hello"
    for group in later:
        group.close()
    with pytest.raises(Revoked, match="generation 2 has begun"):  # though none is open now
        groups[0].post_send(1, memoryview(b"late"), deadline_after(EVENT_TIMEOUT), about=TAGGED)


@pytest.mark.parametrize("rank", [-1, 2, 1.0, "0", None])
def test_a_rank_that_does_not_exist_is_refused(groups: list[Group], rank: object) -> None:
    with pytest.raises(UsageError, match="ranks 0 to 1"):
        groups[0].check(rank)


def test_a_closed_group_raises_for_what_waits_and_what_comes(groups: list[Group]) -> None:
    group = groups[0]
    asked = group.post_receive(1, None, space=Space.TAGGED, tag=1)
    group.close()
    group.close()
    with pytest.raises(LinkClosed, match="the communicator of rank 0 was closed"):
        group.wait((asked,), deadline_after(EVENT_TIMEOUT))
    for dest in (0, 1):
        with pytest.raises((LinkClosed, UsageError)):
            group.post_send(dest, memoryview(b"late"), deadline_after(EVENT_TIMEOUT), about=TAGGED)
    with pytest.raises((LinkClosed, UsageError)):
        group.wait((group.post_receive(1, None, space=Space.TAGGED, tag=1),), deadline_after(EVENT_TIMEOUT))


def test_a_receive_from_a_rank_names_it_before_its_first_message(groups: list[Group]) -> None:
    asked = groups[0].post_receive(1, None, space=Space.TAGGED, tag=1)
    with pytest.raises(OperationTimeout) as raised:
        groups[0].wait((asked,), deadline_after(0.02))
    assert [peer.rank for peer in raised.value.waiting_for] == [1]


def test_an_infinite_timeout_is_a_time_that_can_be_waited_for() -> None:
    assert time.monotonic() + 1e6 < deadline_after(math.inf) < 1e12
