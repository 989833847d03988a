import os
from dataclasses import replace

from nexar.cluster.membership import Member
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.communicator.status import make_status_report
from nexar.links.operation import FINISHED
from nexar.types import AwaitedPeer
from nexar.wire.status import MAX_PEERS, decode_status_report, encode_status_report
from tests.unit.collectives.recorded_world import World

BARRIER = Fingerprint(OperationCode.BARRIER)


class FakeLink:
    failure: Exception | None = None
    schemes = ("quic", "shm")

    def __init__(self, traffic: int = 5) -> None:
        self.traffic = traffic

    def stats(self) -> dict[str, float]:
        names = ("bytes_sent", "bytes_received", "messages_sent", "messages_received")
        return dict.fromkeys(names, float(self.traffic))


class Waiting:
    """An operation that waits for rank 1."""

    done = False

    def awaited(self) -> AwaitedPeer:
        return AwaitedPeer(rank=1)


def test_it_says_what_the_node_does_has_done_and_waits_for() -> None:
    world = World(3)
    group, call_log = world[0], world[0].call_log
    members = group.membership.members
    call_log.end(call_log.begin(BARRIER))
    entry = call_log.begin(BARRIER)
    entry.awaits = (Waiting(), FINISHED)  # type: ignore[assignment]
    links = {members[1].node: FakeLink(7), members[2].node: FakeLink(1), 4242: FakeLink(1000)}
    found = make_status_report(group.membership, members[0].node, [call_log], links)
    assert found is not None
    assert (found.operation, found.waiting_for) == ("barrier #1 of ranks 0, 1, 2", (1,))
    assert found.finished == "barrier #0 of ranks 0, 1, 2"
    assert (found.rank, found.pid, found.calls, found.bytes_sent) == (0, os.getpid(), 1, 8)
    assert [(peer.rank, peer.carriers, peer.bytes_sent) for peer in found.peers] == [
        (1, "quic+shm", 7),
        (2, "quic+shm", 1),
    ]
    assert decode_status_report(encode_status_report(found)) == found
    call_log.end(entry)


def test_ranks_of_another_communicator_are_named_by_their_ranks_in_the_world() -> None:
    half = World(2)[0]  # ranks 2 and 3 of the world are 0 and 1 in it
    others = tuple(Member(node, "elsewhere", bytes(32), {}) for node in (7, 8))
    world = replace(half.membership, members=(*others, *half.membership.members))
    entry = half.call_log.begin(BARRIER)
    entry.awaits = (Waiting(),)  # type: ignore[assignment]
    entry.arrivals[half.membership.members[1].node] = entry.began + 1
    half.call_log.end(entry)
    entry = half.call_log.begin(BARRIER)
    entry.awaits = (Waiting(),)  # type: ignore[assignment]
    found = make_status_report(world, half.membership.members[0].node, [half.call_log], {})
    assert found is not None
    assert (found.rank, found.waiting_for) == (2, (3,))
    assert (found.operation, found.finished) == ("barrier #1 of ranks 2, 3", "barrier #0 of ranks 2, 3")
    assert [each.rank for each in found.late] == [3, 2]
    without = replace(world, members=world.members[:3])
    found = make_status_report(without, half.membership.members[0].node, [half.call_log], {})
    assert found is not None
    assert (found.waiting_for, [each.rank for each in found.late]) == ((), [2]), "who is gone has no rank"
    half.call_log.end(entry)


def test_calls_of_the_world_need_no_name_of_their_communicator() -> None:
    world = World(2)
    call_log = world[0].call_log
    call_log._about = (0, 1)  # type: ignore[misc]
    entry = call_log.begin(BARRIER)
    found = make_status_report(world[0].membership, world[0].membership.members[0].node, [call_log], {})
    assert found is not None
    assert found.operation == "barrier #0"
    call_log.end(entry)


def test_of_a_large_communicator_not_every_rank_is_named() -> None:
    world = World(5)
    entry = world[0].call_log.begin(BARRIER)
    found = make_status_report(world[0].membership, world[0].membership.members[0].node, [world[0].call_log], {})
    assert found is not None
    assert found.operation == "barrier #0 of 5 ranks"
    world[0].call_log.end(entry)


def test_a_link_that_is_lost_connects_nobody() -> None:
    world = World(2)
    link = FakeLink()
    link.failure = ConnectionError()
    members = world[0].membership.members
    found = make_status_report(world[0].membership, members[0].node, [], {members[1].node: link})
    assert found is not None
    assert found.peers[0].carriers == ""
    assert (found.operation, found.finished, found.late) == ("", "", ())


def test_who_is_no_member_any_more_has_nothing_to_say() -> None:
    assert make_status_report(World(2)[0].membership, 4242, [], {}) is None


def test_of_many_peers_the_busiest_are_reported() -> None:
    world = World(MAX_PEERS + 10)
    members = world[0].membership.members
    links = {member.node: FakeLink(rank) for rank, member in enumerate(members) if rank}
    found = make_status_report(world[0].membership, members[0].node, [], links)
    assert found is not None
    assert [peer.rank for peer in found.peers] == list(range(10, MAX_PEERS + 10))
