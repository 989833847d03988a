import os

import msgspec
import pytest

from nexar.collectives.dump import FORMAT, decode, describe, encode
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.collectives.ways import way_of
from nexar.errors import PeerLost
from tests.unit.collectives.told_world import NODES, Rank, World

ALL_REDUCE = Fingerprint(OperationCode.ALL_REDUCE, 11, 8, 0, 1, way_of("ring"))


class Flight:
    def __init__(self, rank: Rank) -> None:
        self.group = rank
        self.journal = rank.journal


def test_a_dump_tells_who_wrote_it_and_what_it_did() -> None:
    world = World(2)
    journal = world[0].journal
    journal.end(journal.begin(ALL_REDUCE))
    journal.end(journal.begin(ALL_REDUCE), PeerLost(rank=1, cause="x"))
    flying = journal.begin(Fingerprint(OperationCode.BARRIER))
    flying.moved()
    world[0].hears(1, 2, Fingerprint(OperationCode.BARRIER))
    dump = describe([Flight(world[0])], "somebody asked")
    assert (dump.reason, dump.cluster, dump.rank, dump.host) == ("somebody asked", "test", 0, "host-0")
    assert (dump.node, dump.pid, dump.epoch) == (f"{NODES:016x}", os.getpid(), 1)
    (seat,) = dump.communicators
    assert (seat.communicator, seat.generation, seat.rank, seat.size) == (3, 1, 0, 2)
    well, badly = seat.last_calls
    assert (well.sequence, well.what, well.outcome) == (0, "all_reduce of float32[8], sum, by ring", "")
    assert (badly.sequence, badly.operation, badly.outcome) == (1, "all_reduce", "PeerLost")
    assert well.ended_ago is not None
    assert badly.ended_ago is not None
    assert well.began_ago >= well.ended_ago >= badly.ended_ago >= 0
    (call,) = seat.in_flight
    assert (call.sequence, call.operation, call.step, call.ended_ago) == (2, "barrier", 1, None)
    assert call.moved_ago is not None
    (peer,) = seat.peers
    assert (peer.rank, peer.node, peer.host) == (1, f"{NODES + 1:016x}", "host-1")
    assert peer.heard_ago is not None
    assert dump.threads[0].at.startswith("test_dump.py:")


def test_a_dump_can_be_made_while_somebody_holds_the_nodes_lock() -> None:
    world = World(1)
    world[0].journal.begin(ALL_REDUCE)
    with world[0].lock:
        assert describe([Flight(world[0])], "stuck").communicators[0].in_flight


def test_what_is_written_can_be_read_by_us_and_by_people() -> None:
    world = World(2)
    for _ in range(3):
        world[0].journal.end(world[0].journal.begin(ALL_REDUCE))
    dump = describe([Flight(world[0])], "asked")
    data = encode(dump)
    assert decode(data) == dump
    lines = data.decode().splitlines()
    assert sum("all_reduce of float32[8]" in line for line in lines) == 3, "a line for each call"


@pytest.mark.parametrize("data", [b"", b"{}", b"[1, 2]", b"\xff\xfe", b'{"format": 1}'])
def test_what_is_no_dump_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no dump"):
        decode(data)


def test_a_dump_of_another_format_is_refused_by_its_number() -> None:
    dump = msgspec.structs.replace(describe([Flight(World(1)[0])], "asked"), format=FORMAT + 1)
    with pytest.raises(ValueError, match=f"its format is {FORMAT + 1}"):
        decode(encode(dump))
