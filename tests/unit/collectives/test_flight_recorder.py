import gc
import logging
import os
import threading
from pathlib import Path

import pytest

from nexar.collectives import flight_recorder
from nexar.collectives.dump import Dump, decode
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.flight_recorder import KEPT, FlightRecorder, dump_all
from nexar.collectives.operations import OperationCode
from nexar.errors import Cancelled, CollectiveTimeout, MembershipChanged, NoQuorum, PeerLost
from tests.unit.collectives.told_world import World

BARRIER = Fingerprint(OperationCode.BARRIER)
LOST = PeerLost(rank=1, cause="it died")


@pytest.fixture(autouse=True)
def nothing_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """By other tests; and what one error after another leaves is no storm."""
    gc.collect()  # recorders of other tests' worlds
    monkeypatch.setattr(flight_recorder, "_STORM", 0.0)
    monkeypatch.setattr(flight_recorder, "_written", {})


def dumps_in(directory: Path) -> list[Dump]:
    return [decode(path.read_bytes()) for path in sorted(directory.glob("*.json"))]


def recorder(world: World, directory: Path | None, rank: int = 0) -> FlightRecorder:
    return FlightRecorder(world[rank], world[rank].journal, None if directory is None else str(directory))


def test_a_call_that_fails_leaves_a_dump_and_its_error_says_where(tmp_path: Path) -> None:
    world, place = World(2), tmp_path / "new" / "dumps"
    kept = recorder(world, place)
    journal = world[0].journal
    error = journal.end(journal.begin(BARRIER), LOST)
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


def test_the_change_that_follows_a_loss_is_the_same_mishap(tmp_path: Path) -> None:
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
    monkeypatch.setattr(flight_recorder, "_STORM", 1e9)
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
    monkeypatch.setattr(flight_recorder, "encode", full)
    kept.failed(PeerLost(rank=1, cause="it died"))
    assert list(tmp_path.iterdir()) == []


def test_what_is_closed_or_belongs_to_the_parent_process_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(2)
    closed, parents = recorder(world, tmp_path, 0), recorder(world, tmp_path, 1)
    world[0].journal.close()
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
