import gc
import logging
import os
import threading
from pathlib import Path

import msgspec
import pytest

from nexar.collectives import flight_recorder
from nexar.collectives.fingerprint import Fingerprint, code_of_algorithm
from nexar.collectives.flight_recorder import (
    FORMAT,
    KEPT,
    Dump,
    FlightRecorder,
    decode_dump,
    dump_all,
    encode_dump,
    make_dump,
    thread_stacks,
)
from nexar.collectives.operations import OperationCode
from nexar.errors import Cancelled, CollectiveTimeout, MembershipChanged, NoQuorum, PeerLost
from tests.unit.collectives.recorded_world import NODES, Rank, World

ALL_REDUCE = Fingerprint(OperationCode.ALL_REDUCE, 11, 8, 0, 1, code_of_algorithm("ring"))


class Flight:
    def __init__(self, rank: Rank) -> None:
        self.group = rank
        self.call_log = rank.call_log


def test_a_dump_reports_who_wrote_it_and_what_it_did() -> None:
    world = World(2)
    call_log = world[0].call_log
    call_log.end(call_log.begin(ALL_REDUCE))
    call_log.end(call_log.begin(ALL_REDUCE), PeerLost(rank=1, cause="x"))
    flying = call_log.begin(Fingerprint(OperationCode.BARRIER))
    flying.moved()
    world[0].receives(1, 2, Fingerprint(OperationCode.BARRIER))
    dump = make_dump([Flight(world[0])], "somebody asked")
    assert (dump.reason, dump.cluster, dump.rank, dump.host) == ("somebody asked", "test", 0, "host-0")
    assert (dump.node, dump.pid, dump.epoch) == (f"{NODES:016x}", os.getpid(), 1)
    (communicator_state,) = dump.communicators
    assert (
        communicator_state.communicator,
        communicator_state.generation,
        communicator_state.rank,
        communicator_state.size,
    ) == (3, 1, 0, 2)
    well, badly = communicator_state.last_calls
    assert (well.sequence, well.what, well.outcome) == (0, "all_reduce of float32[8], sum, by ring", "")
    assert (badly.sequence, badly.operation, badly.outcome) == (1, "all_reduce", "PeerLost")
    assert well.ended_ago is not None
    assert badly.ended_ago is not None
    assert well.began_ago >= well.ended_ago >= badly.ended_ago >= 0
    (call,) = communicator_state.in_flight
    assert (call.sequence, call.operation, call.step, call.ended_ago) == (2, "barrier", 1, None)
    assert call.moved_ago is not None
    (peer,) = communicator_state.peers
    assert (peer.rank, peer.node, peer.host) == (1, f"{NODES + 1:016x}", "host-1")
    assert peer.heard_ago is not None
    assert dump.threads[0].at.startswith("test_flight_recorder.py:")


def test_a_dump_can_be_made_while_somebody_holds_the_nodes_lock() -> None:
    world = World(1)
    world[0].call_log.begin(ALL_REDUCE)
    with world[0].lock:
        assert make_dump([Flight(world[0])], "stuck").communicators[0].in_flight


def test_what_is_written_can_be_read_by_us_and_by_people() -> None:
    world = World(2)
    for _ in range(3):
        world[0].call_log.end(world[0].call_log.begin(ALL_REDUCE))
    dump = make_dump([Flight(world[0])], "asked")
    data = encode_dump(dump)
    assert decode_dump(data) == dump
    lines = data.decode().splitlines()
    assert sum("all_reduce of float32[8]" in line for line in lines) == 3, "a line for each call"


@pytest.mark.parametrize("data", [b"", b"{}", b"[1, 2]", b"\xff\xfe", b'{"format": 1}'])
def test_what_is_no_dump_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a flight recorder dump"):
        decode_dump(data)


def test_a_dump_of_another_format_is_refused_by_its_number() -> None:
    dump = msgspec.structs.replace(make_dump([Flight(World(1)[0])], "asked"), format=FORMAT + 1)
    with pytest.raises(ValueError, match=f"its format is {FORMAT + 1}"):
        decode_dump(encode_dump(dump))


BARRIER = Fingerprint(OperationCode.BARRIER)
LOST = PeerLost(rank=1, cause="it died")


@pytest.fixture(autouse=True)
def nothing_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """By other tests; and what one error after another leaves is no storm."""
    gc.collect()  # recorders of other tests' worlds
    monkeypatch.setattr(flight_recorder, "_MIN_INTERVAL", 0.0)
    monkeypatch.setattr(flight_recorder, "_written", {})


def dumps_in(directory: Path) -> list[Dump]:
    return [decode_dump(path.read_bytes()) for path in sorted(directory.glob("*.json"))]


def recorder(world: World, directory: Path | None, rank: int = 0) -> FlightRecorder:
    return FlightRecorder(world[rank], world[rank].call_log, None if directory is None else str(directory))


def test_a_call_that_fails_leaves_a_dump_and_its_error_says_where(tmp_path: Path) -> None:
    world, place = World(2), tmp_path / "new" / "dumps"
    kept = recorder(world, place)
    call_log = world[0].call_log
    error = call_log.end(call_log.begin(BARRIER), LOST)
    (dump,) = dumps_in(place)
    assert dump.reason.startswith("PeerLost: lost rank 1")
    (path,) = place.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert any(str(path) in note for note in getattr(error, "__notes__", []))
    assert kept.is_open


def test_each_kind_of_error_leaves_one_for_each_communicator(tmp_path: Path) -> None:
    kept = recorder(World(2), tmp_path)
    for _ in range(5):
        kept.failed(PeerLost(rank=1, cause="it died"))
        kept.failed(NoQuorum(alive=[0], needed=2))
        kept.failed(Cancelled())
        kept.failed(KeyboardInterrupt())
    assert [dump.reason.partition(":")[0] for dump in dumps_in(tmp_path)] == ["PeerLost", "NoQuorum"]


def test_the_change_that_follows_a_loss_has_the_same_abort_reason(tmp_path: Path) -> None:
    change = MembershipChanged(communicator=None, lost={1: "it died"}, joined=(), completed_by_all=None)
    first, second = recorder(World(2), tmp_path), recorder(World(2), tmp_path)
    first.failed(PeerLost(rank=1, cause="it died"))
    first.failed(change)
    assert len(dumps_in(tmp_path)) == 1
    second.failed(change)
    assert len(dumps_in(tmp_path)) == 2


def test_a_storm_of_errors_on_many_communicators_of_a_node_leaves_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_recorder, "_MIN_INTERVAL", 1e9)
    monkeypatch.setattr(flight_recorder, "_last", {})
    recorders = [recorder(World(2), tmp_path) for _ in range(5)]  # all of node 100
    for each in recorders:
        each.failed(PeerLost(rank=1, cause="it died"))
    (dump,) = dumps_in(tmp_path)
    assert len(dump.communicators) == 5


def test_without_a_directory_nothing_is_written_unless_somebody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kept = recorder(World(2), None)
    kept.failed(PeerLost(rank=1, cause="it died"))
    assert not list(tmp_path.iterdir())
    assert dump_all("SIGUSR1") == 1
    (dump,) = dumps_in(tmp_path / "nexar-dumps")
    assert dump.reason == "SIGUSR1"


def test_every_node_of_a_process_writes_its_own(tmp_path: Path) -> None:
    world = World(3)
    recorders = [recorder(world, tmp_path, rank) for rank in range(3)]
    assert dump_all("asked") == len(recorders)
    assert sorted(dump.rank for dump in dumps_in(tmp_path)) == [0, 1, 2]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    kept = recorder(World(1), tmp_path)
    for number in range(KEPT + 3):
        dump_all(f"asked {number}")
    found = [dump.reason for dump in dumps_in(tmp_path)]
    assert found == [f"asked {number}" for number in range(3, KEPT + 3)]
    assert kept.is_open


def test_what_cannot_be_written_is_logged_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    kept = recorder(World(2), blocked)
    error = PeerLost(rank=1, cause="it died")
    with caplog.at_level(logging.WARNING):
        kept.failed(error)
    assert "could not write" in caplog.text
    assert not hasattr(error, "__notes__")


def test_a_write_that_breaks_off_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> bytes:
        raise OSError("no space left")

    kept = recorder(World(2), tmp_path)
    monkeypatch.setattr(flight_recorder, "encode_dump", full)
    kept.failed(PeerLost(rank=1, cause="it died"))
    assert list(tmp_path.iterdir()) == []


def test_what_is_closed_or_belongs_to_the_parent_process_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(2)
    closed, parents = recorder(world, tmp_path, 0), recorder(world, tmp_path, 1)
    world[0].call_log.close()
    assert not closed.is_open
    assert parents.is_open
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert dump_all("asked") == 0
    parents.failed(CollectiveTimeout(operation="barrier", sequence=0, waiting_for="", timeout=1.0))
    assert list(tmp_path.iterdir()) == []


def test_a_failure_finds_its_box_while_others_are_made(tmp_path: Path) -> None:
    world, done = World(2), threading.Event()

    def make() -> None:
        while not done.is_set():
            made = [recorder(world, None) for _ in range(50)]
            made.clear()

    makers = threading.Thread(target=make)
    makers.start()
    kept = recorder(world, tmp_path)
    try:
        for _ in range(200):
            assert kept in flight_recorder._open_recorders()
    finally:
        done.set()
        makers.join()


def wait_here(ready: threading.Event, go: threading.Event) -> None:
    ready.set()
    go.wait()


def test_every_thread_says_which_line_of_the_users_it_is_in() -> None:
    ready, go = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_here, args=(ready, go), name="the one that waits")
    thread.start()
    ready.wait()
    try:
        found = {stack.thread: stack for stack in thread_stacks()}
    finally:
        go.set()
        thread.join()
    waiting = found["the one that waits"]
    line = wait_here.__code__.co_firstlineno + 2
    assert waiting.at == f"test_flight_recorder.py:{line}", "not that of the library it waits in"
    assert not waiting.main
    assert any(frame.endswith(f"test_flight_recorder.py:{line} in wait_here: go.wait()") for frame in waiting.frames)
    assert "threading.py" in waiting.frames[-1]


def test_the_main_thread_comes_first() -> None:
    first, *others = thread_stacks()
    assert first.main
    assert not any(stack.main for stack in others)
    assert first.at.startswith("test_flight_recorder.py:")
