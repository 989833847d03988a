import os

from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.communicator.bulletin import write_bulletin
from nexar.links.operation import FINISHED
from nexar.types import AwaitedPeer
from nexar.wire.bulletin import MAX_PEERS, decode_bulletin, encode_bulletin
from tests.unit.collectives.told_world import World

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
    group, journal = world[0], world[0].journal
    members = group.membership.members
    journal.end(journal.begin(BARRIER))
    entry = journal.begin(BARRIER)
    entry.awaits = (Waiting(), FINISHED)  # type: ignore[assignment]
    links = {members[1].node: FakeLink(7), members[2].node: FakeLink(1), 4242: FakeLink(1000)}
    found = write_bulletin(group.membership, members[0].node, [journal], links)
    assert found is not None
    assert (found.operation, found.finished, found.waiting_for) == ("barrier #1", "barrier #0", (1,))
    assert (found.rank, found.pid, found.calls, found.bytes_sent) == (0, os.getpid(), 1, 8)
    assert [(peer.rank, peer.carriers, peer.bytes_sent) for peer in found.peers] == [
        (1, "quic+shm", 7),
        (2, "quic+shm", 1),
    ]
    assert decode_bulletin(encode_bulletin(found)) == found
    journal.end(entry)


def test_a_link_that_is_lost_connects_nobody() -> None:
    world = World(2)
    link = FakeLink()
    link.failure = ConnectionError()
    members = world[0].membership.members
    found = write_bulletin(world[0].membership, members[0].node, [], {members[1].node: link})
    assert found is not None
    assert found.peers[0].carriers == ""
    assert (found.operation, found.finished, found.late) == ("", "", ())


def test_who_is_no_member_any_more_has_nothing_to_say() -> None:
    assert write_bulletin(World(2)[0].membership, 4242, [], {}) is None


def test_of_many_peers_the_busiest_are_told_of() -> None:
    world = World(MAX_PEERS + 10)
    members = world[0].membership.members
    links = {member.node: FakeLink(rank) for rank, member in enumerate(members) if rank}
    found = write_bulletin(world[0].membership, members[0].node, [], links)
    assert found is not None
    assert [peer.rank for peer in found.peers] == list(range(10, MAX_PEERS + 10))
