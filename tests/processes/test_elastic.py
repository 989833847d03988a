"""Clusters of real processes that grow and shrink, and lose members while they do."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.processes.launcher import EVENT_TIMEOUT, await_files
from tests.processes.nexar_command import Nexar, Python, await_ticket
from tests.processes.scale import MIB, measured, sized

RANK = Path(__file__).with_name("growing_rank.py")
ROOT = Path(__file__).parents[2]


class Scene:
    """A seed, and ranks that come and go. Nothing of it is left afterwards."""

    def __init__(self, folder: Path, running: ExitStack) -> None:
        self.folder = folder
        self._running = running
        self._ticket = ""
        self._variables = {"NEXAR_ELASTIC_ENABLED": "true", "PYTHONPATH": str(ROOT)}

    def open(self, size: int, *arguments: object, **variables: str) -> None:
        path = self.folder / "ticket"
        self._variables |= variables
        command = ("seed", "--size", size, "--elastic", "--listen", "127.0.0.1:0", "--ticket-file", path, *arguments)
        seed = self._running.enter_context(Nexar(*command, cwd=self.folder, **self._variables))
        self._ticket = await_ticket(path, seed)

    def start(self, role: str, *arguments: object, number: int = 1, **variables: str) -> list[Python]:
        given = {**self._variables, "NEXAR_TICKET": self._ticket, **variables}
        return [
            self._running.enter_context(Python(RANK, role, *arguments, cwd=self.folder, **given)) for _ in range(number)
        ]

    def await_size(self, size: int) -> None:
        """Wait until each rank of a communicator so large has said that it has it."""
        for rank in range(size):
            await_files(self.folder, f"size{size}.rank{rank}.*", 1)

    def stop(self) -> None:
        (self.folder / "stop").touch()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as running:
        yield Scene(tmp_path, running)


def reported(rank: Python) -> list[dict[str, Any]]:
    """What a rank has said; it ends well."""
    assert rank.end() == 0, rank.stderr
    return [json.loads(line) for line in rank.stdout.splitlines()]


def with_fact(rank: Python, fact: str) -> list[dict[str, Any]]:
    return [line for line in reported_once(rank) if fact in line]


def reported_once(rank: Python) -> list[dict[str, Any]]:
    return reported(rank) if not rank.stdout else [json.loads(line) for line in rank.stdout.splitlines()]


# ---------------------------------------------------------------- as it is wanted


SPARSE = ["k_regular:2", "k_regular:4", "hypercube"]


@pytest.mark.full
@pytest.mark.parametrize("topology", ["full_mesh", *sized(SPARSE[:1], SPARSE)])
def test_two_become_five_then_three_then_six_and_joiners_have_the_state_bit_by_bit(
    topology: str, scene: Scene, record_property: Any
) -> None:
    """Of the five, ranks 0 and 3 leave. See Life for what a joiner checks."""
    count = sized(MIB, 200 * 10**6) // 8
    scene.open(2, NEXAR_TOPOLOGY=topology)
    ranks = scene.start("tide", count, number=2)
    scene.await_size(2)
    ranks += scene.start("tide", count, number=3)
    scene.await_size(5)
    await_files(scene.folder, "ebb.*", 3)
    ranks += scene.start("tide", count, number=3)
    ended = [line for rank in ranks for line in with_fact(rank, "end")]
    assert sorted(line["end"] for line in ended) == list(range(6))
    assert len({line["step"] for line in ended}) == 1
    left = [sorted(line["left"]) for rank in ranks for line in with_fact(rank, "left") if line["left"]]
    assert sorted(left) == [["0"], *[["0", "3"]] * 3, ["3"]]  # a rank that leaves is notified of its own departure
    took = [line["took"] for rank in ranks for line in with_fact(rank, "took") if line["joined"]]
    measured(record_property, state_bytes=8 * count, longest_checkpoint_s=round(max(took), 3), checkpoints=len(took))


def test_more_than_form_the_cluster_may_come_at_once_and_all_are_let_in(scene: Scene) -> None:
    scene.open(2, "--max", 4)
    ranks = scene.start("member", 4, number=4)
    scene.await_size(4)
    scene.stop()
    assert sorted(line["end"] for rank in ranks for line in with_fact(rank, "end")) == [0, 1, 2, 3]


def test_a_rank_that_is_asked_to_go_goes_and_learns_why(scene: Scene) -> None:
    scene.open(3)
    ranks = scene.start("removing", number=3)
    left = [line["left"] for rank in ranks for line in with_fact(rank, "left")]
    why = "rank 0 asked it to leave: it is too warm there"
    assert len(left) == 3
    assert {cause for each in left for cause in each.values()} == {why}
    assert sorted(line["size"] for rank in ranks for line in with_fact(rank, "end")) == [2, 2]


def test_who_would_leave_too_few_goes_when_another_has_come(scene: Scene) -> None:
    scene.open(2, "--min", 2, NEXAR_ELASTIC_MIN_WORLD_SIZE="2")
    ranks = scene.start("put_off", number=2)
    await_said(ranks, "stayed")
    ranks += scene.start("put_off")
    changes = [line for rank in ranks for line in with_fact(rank, "left")]
    assert {str(line["left"]) for line in changes} == {"{'1': 'it wanted to leave'}"}
    assert [line["size"] for rank in ranks for line in with_fact(rank, "end")] == [2, 2]


def test_who_comes_above_the_maximum_is_refused_and_notified(scene: Scene) -> None:
    scene.open(2, "--max", 2)
    ranks = scene.start("member", 2, number=2)
    scene.await_size(2)
    (late,) = scene.start("member", 2)
    assert late.end() != 0
    assert "no more than 2 are allowed" in late.stderr
    scene.stop()
    assert [line["size"] for rank in ranks for line in with_fact(rank, "end")] == [2, 2]


# ---------------------------------------------------------------- as it is not wanted


@pytest.mark.full
@pytest.mark.parametrize("moment", ["offered", "taken"])
@pytest.mark.parametrize("transports", ["shm,quic,tls", "tls"])
def test_a_joiner_that_dies_during_the_transfer_is_left_out_and_the_next_comes_in(
    scene: Scene, moment: str, transports: str
) -> None:
    scene.open(2, NEXAR_TRANSPORTS=transports)
    ranks = scene.start("member", 3, 200_000, number=2)
    scene.await_size(2)
    (doomed,) = scene.start("doomed", moment)
    assert doomed.end() == -signal.SIGKILL
    ranks += scene.start("member", 3, 200_000)
    scene.await_size(3)
    scene.stop()
    ended = [line for rank in ranks for line in with_fact(rank, "end")]
    assert [line["size"] for line in ended] == [3, 3, 3]


@pytest.mark.full
@pytest.mark.parametrize("moment", ["asked", "sent"])
def test_a_giver_that_dies_during_the_transfer_is_replaced_at_the_next_checkpoint(scene: Scene, moment: str) -> None:
    scene.open(3)
    (victim,) = scene.start("giver", moment, RANK="0", WORLD_SIZE="3")
    ranks = [scene.start("member", 3, 200_000, RANK=str(rank), WORLD_SIZE="3")[0] for rank in (1, 2)]
    scene.await_size(3)
    ranks += scene.start("member", 3, 200_000)
    assert victim.end() == -signal.SIGKILL
    scene.stop()
    assert [line["size"] for rank in ranks for line in with_fact(rank, "end")] == [3, 3, 3]
    assert any(line["lost"] == [0] for rank in ranks[:2] for line in with_fact(rank, "lost"))
    (joined,) = with_fact(ranks[2], "seconds")
    assert joined["joined"] == 2


def test_a_state_that_cannot_be_had_is_reported_to_all_and_the_joiner_comes_later(scene: Scene) -> None:
    scene.open(2)
    ranks = scene.start("raising", number=2)
    scene.await_size(2)
    ranks += scene.start("raising")
    received = sorted(line["received"] for rank in ranks for line in with_fact(rank, "received"))
    assert len(received) == 2
    assert received[0].startswith("Cancelled: ")
    assert "state() raised KeyError: 'the model'" in received[0]
    assert received[1] == "KeyError: 'the model'"
    assert [line["size"] for rank in ranks for line in with_fact(rank, "end")] == [3, 3, 3]


def test_all_are_notified_when_joiners_do_not_come_in_time(scene: Scene) -> None:
    scene.open(2)
    ranks = scene.start("waiting", number=2)
    late = [line["late"] for rank in ranks for line in with_fact(rank, "late")]
    assert len(late) == 2
    assert all("joiners: 2 are needed, 0 wait" in each for each in late)


@pytest.mark.full
@pytest.mark.timeout(sized(300, 600))
def test_ranks_that_die_anywhere_in_a_checkpoint_do_not_stop_the_others(scene: Scene, record_property: Any) -> None:
    """Three members; in each round one comes in and one dies in the checkpoint that was to let it in."""
    rounds = sized(4, 20)
    scene.open(3)
    ranks = scene.start("random_death", number=3)
    scene.await_size(3)
    for number in range(1, rounds + 1):
        (scene.folder / "doom").touch()
        ranks += scene.start("random_death")
        await_files(scene.folder, "doomed.*", number)
        await_gone_round(scene, ranks, number)
    scene.stop()
    dead = [rank for rank in ranks if rank.end() == -signal.SIGKILL]
    assert len(dead) == rounds
    ended = [line for rank in ranks if rank not in dead for line in with_fact(rank, "end")]
    assert [line["size"] for line in ended] == [3, 3, 3]
    measured(record_property, rounds=rounds)


# ---------------------------------------------------------------- by a launcher


def test_a_rank_that_kills_itself_is_started_again_and_the_run_ends_well(tmp_path: Path) -> None:
    """With a minimum of two, the one that is left waits for the other at the checkpoint."""
    script = tmp_path / "again.py"
    script.write_text(
        "import os, signal\n"
        "import nexar\n"
        "comm = nexar.init()\n"
        "step, settled = (0, False) if comm.state is None else (comm.state, False)\n"
        "while step < 60:\n"
        "    try:\n"
        "        if not settled:\n"
        "            step, settled = int(comm.all_reduce(step, op='max')), True\n"
        "        if comm.state is None and comm.rank == 1 and step == 20:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        assert comm.all_reduce(1) == comm.size\n"
        "        step += 1\n"
        "        change = comm.checkpoint(state=lambda: step)\n"
        "        if change is not None:\n"
        "            comm, settled = change.communicator, False\n"
        "    except nexar.MembershipChanged as change:\n"
        "        comm, settled = change.communicator, False\n"
        "print('end', comm.rank, comm.size, comm.epoch, step)\n"
        "comm.close()\n"
    )
    with Nexar("run", "-n", 2, "--elastic", "--min", 2, "--max", 4, "--max-restarts", 3, script, cwd=tmp_path) as run:
        assert run.end() == 0, run.stderr
    assert sorted(line.partition("] ")[2] for line in run.stdout.splitlines()) == ["end 0 2 3 60", "end 1 2 3 60"]
    assert "started again, restart 1 of 3" in run.stderr


# ---------------------------------------------------------------- waiting


def await_said(ranks: list[Python], fact: str) -> None:
    """Wait until each has said something of it."""
    for rank in ranks:
        assert rank.process.stdout is not None
        line = rank.process.stdout.readline()
        assert fact in line, line


def await_gone_round(scene: Scene, ranks: list[Python], number: int) -> None:
    """Wait until so many have died, and three are together again."""
    deadline = time.monotonic() + EVENT_TIMEOUT
    while sum(rank.process.poll() is not None for rank in ranks) < number or not together(scene, ranks):
        assert time.monotonic() < deadline, f"round {number}"
        time.sleep(0.01)


def together(scene: Scene, ranks: list[Python]) -> bool:
    """Whether those that live are three of one epoch."""
    places = [scene.folder / f"now.{rank.process.pid}" for rank in ranks if rank.process.poll() is None]
    found = {tuple(json.loads(place.read_text())) for place in places if place.exists()}
    return all(place.exists() for place in places) and [size for size, _ in found] == [3]
