"""What users do wrong, and what the error says: who, what, and what to do instead."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import nexar
from nexar.torch import communicator_of
from tests.torch.processes import EVENT_TIMEOUT, on_ranks

FROM_2_14 = torch.__version__ >= (2, 14)


def reported(call: Callable[[], Any]) -> str:
    """The error's name and its words; empty if there was none."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  # to be looked at
        return f"{type(error).__name__}: {error}"
    return ""


def disagreements(rank: int, group: dist.ProcessGroup) -> dict[str, Callable[[], Any]]:
    """Calls that differ between two ranks."""
    integers, maximum = torch.int32 if rank else torch.float32, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM
    return {
        "float32[4], sum on rank 0": lambda: dist.all_reduce(torch.ones(4 + rank), group=group),
        "of float32[2], sum on rank 0": lambda: dist.all_reduce(torch.ones(2, dtype=integers), group=group),
        "float32[3], sum on rank 0": lambda: dist.all_reduce(torch.ones(3), maximum, group=group),
        "broadcast of float32[4], root 0 on rank 0": lambda: (
            dist.all_reduce(torch.ones(4), group=group) if rank else dist.broadcast(torch.ones(4), 0, group=group)
        ),
        "broadcast of float32[5], root 0 on rank 0": lambda: dist.broadcast(torch.ones(5 + rank), 0, group=group),
    }


def test_ranks_that_disagree_are_notified_what_the_other_one_did(tmp_path):
    def task(rank, size):
        answers = {}
        for words in disagreements(rank, dist.group.WORLD):
            group = dist.new_group([0, 1])
            answers[words] = reported(disagreements(rank, group)[words])
            dist.destroy_process_group(group)
        dist.barrier()
        return answers

    _, second = on_ranks(tmp_path, 2, task)
    for words, answer in second.items():
        assert answer.startswith("CollectiveMismatch: ")
        assert words in answer


def refused() -> dict[str, Callable[[], Any]]:
    """What no rank gets through, and what its error says."""
    one, flags = torch.ones(1), torch.ones(4, dtype=torch.bool)
    return {
        "bit operations are for integers": lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.BAND),
        'or use op="sum" and divide': lambda: dist.all_reduce(flags, dist.ReduceOp.AVG),
        "all_gather: the output list has 1 entries for 2 ranks": lambda: dist.all_gather([one], one),
        "gather: gather_list has 3 entries for 2 ranks": lambda: dist.gather(one, [one] * 3, dst=dist.get_rank()),
        "scatter: scatter_list has 1 entries for 2 ranks": lambda: dist.scatter(one, [one], src=dist.get_rank()),
        "reduce_scatter: the input list has 3 entries for 2 ranks": lambda: dist.reduce_scatter(one, [one] * 3),
        "all_to_all: the output list has 1 entries for 2 ranks": lambda: dist.all_to_all([one], [one] * 2),
        "all_to_all: the input list has 3 entries for 2 ranks": lambda: dist.all_to_all([one] * 2, [one] * 3),
        "give tensor.to_dense()": lambda: dist.all_reduce(torch.eye(2).to_sparse()),
        "there is no rank 7": lambda: dist.broadcast(one, 7),
        "there is no rank 8": lambda: dist.send(one, 8),
        "-3 is not a tag": lambda: dist.send(one, 1 - dist.get_rank(), tag=-3),
        "axis 0 in 2 equal blocks": lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)),
        "[9] do not cut 4 rows for 2 ranks": lambda: dist.all_to_all_single(one, torch.ones(4), [1], [9]),
        "shape [8] that is to be filled has elements that share": lambda: dist.all_gather_single(
            torch.ones(1).expand(8), torch.ones(4)
        ),
        "shape [4] that is to be filled has elements that share": lambda: dist.recv(
            torch.ones(1).expand(4), 1 - dist.get_rank()
        ),
        "initialize the default process group twice": lambda: dist.init_process_group("nexar"),
    }


def test_what_cannot_be_done_is_refused_before_anything_has_happened(tmp_path):
    def task(rank, size):
        answers = {words: reported(call) for words, call in refused().items()}
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return answers, tensor.item()

    for answers, total in on_ranks(tmp_path, 2, task):
        for words, answer in answers.items():
            assert words in answer
        assert total == 2.0, "the group is none the worse"


def test_a_message_that_does_not_fit_its_tensor_is_kept_for_one_that_does(tmp_path):
    def task(rank, size):
        if rank:
            dist.send(torch.arange(9.0), 0)
            return "", []
        room = torch.zeros(9)
        short = reported(lambda: dist.recv(torch.zeros(4), 1))
        dist.recv(room, 1)
        return short, room.tolist()

    short, room = on_ranks(tmp_path, 2, task)[0]
    assert "the receive buffer is float32[4], but the message from rank 1" in short
    assert room == list(range(9))


def test_a_tensor_with_gaps_goes_wherever_one_without_goes(tmp_path):
    def task(rank, size):
        cut = torch.arange(12.0).reshape(3, 4)[:, ::2] + rank
        rooms = [torch.zeros(2, 3).t() for _ in range(size)]
        single = torch.zeros(6, 4)[:, ::2]
        dist.all_gather(rooms, cut)
        dist.all_gather_single(single, cut)
        dist.broadcast(cut, 0)
        return [room.tolist() for room in rooms], single.tolist(), cut.tolist()

    first = [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]
    second = [[value + 1 for value in row] for row in first]
    assert on_ranks(tmp_path, 2, task) == [([first, second], first + second, first)] * 2


def test_a_forked_child_is_asked_to_make_a_group_of_its_own_and_disturbs_nobody(tmp_path):
    def task(rank, size):
        dist.barrier()
        here, there = os.pipe()
        child = os.fork()
        if not child:
            words = [
                reported(lambda: dist.all_reduce(torch.ones(1))),
                reported(lambda: dist.barrier(async_op=True).wait()),
            ]
            dist.destroy_process_group()
            os.write(there, "\n".join(words).encode())
            os._exit(0)
        os.waitpid(child, 0)
        words = os.read(here, 65_536).decode().splitlines()
        os.close(here)
        os.close(there)
        dist.barrier()
        return words

    for words in on_ranks(tmp_path, 2, task):
        assert len(words) == 2
        assert all("forked child" in each for each in words)


def test_ctrl_c_ends_the_wait_and_the_others_learn_who_gave_up(tmp_path):
    note = tmp_path / "interrupted"

    def task(rank, size):
        group = dist.new_group([0, 1])
        if rank:
            pid = torch.zeros(1, dtype=torch.int64)
            dist.recv(pid, 0)
            seen = communicator_of(group)
            _await(lambda: "all_reduce" in seen.health()[0].doing)  # one that came between two calls is the user's
            os.kill(int(pid), signal.SIGINT)
            _await(note.exists)
            return reported(lambda: dist.all_reduce(torch.ones(1), group=group))
        try:
            dist.send(torch.tensor([os.getpid()]), 1)
            dist.all_reduce(torch.ones(1), group=group)  # the other one does not come before this has ended
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            note.touch()
            return "interrupted"
        return ""

    first, second = on_ranks(tmp_path, 2, task)
    assert first == "interrupted"
    assert "rank 0" in second


def _await(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_wait_with_a_limit_of_its_own_says_who_is_missing_and_may_be_repeated(tmp_path):
    def task(rank, size):
        tensor = torch.ones(1)
        if rank:
            dist.recv(torch.zeros(1), 0)
            dist.all_reduce(tensor)
            return "", tensor.item()
        work = dist.all_reduce(tensor, async_op=True)
        early = reported(lambda: work.wait(timedelta(seconds=0.3)))
        dist.send(torch.zeros(1), 1)
        work.wait()
        return early, tensor.item()

    (early, total), _ = on_ranks(tmp_path, 2, task)
    assert early.startswith("OperationTimeout: all_reduce #0 did not finish in 300 ms, waiting for rank 1")
    assert total == 2.0


@pytest.mark.skipif(not FROM_2_14, reason="before torch 2.14 backends written in Python have no such barrier")
def test_a_monitored_barrier_names_those_that_are_missing(tmp_path):
    def task(rank, size):
        dist.monitored_barrier()
        group = dist.new_group(list(range(size)))
        if rank == 2:
            dist.barrier()
            return ""
        found = reported(lambda: dist.monitored_barrier(group, timeout=timedelta(seconds=0.5)))
        dist.barrier()
        return found

    for answer in on_ranks(tmp_path, 3, task)[:2]:
        assert answer.startswith("CollectiveTimeout: barrier #0 did not finish in 500 ms, waiting for rank 2")
        assert "rank 1" not in answer


def test_a_process_group_without_its_rank_0_says_so(tmp_path):
    def task(rank, size):
        where, limit = f"file://{tmp_path}/alone", timedelta(seconds=0.5)
        return reported(
            lambda: dist.init_process_group("nexar", init_method=where, rank=1, world_size=2, timeout=limit)
        ), dist.is_initialized()

    (answer, initialised), = on_ranks(tmp_path, 1, task, initialise=False)  # fmt: skip
    assert answer.startswith('OperationTimeout: init_process_group("nexar") did not finish in 500 ms')
    assert "rank 0, which opens the cluster" in answer
    assert not initialised


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)], ids=str)
def test_both_ranks_are_notified_at_once_of_unequal_world_sizes(tmp_path, sizes):
    def task(rank, size):
        where, limit = f"file://{tmp_path}/unequal", timedelta(seconds=EVENT_TIMEOUT)
        began = time.monotonic()
        answer = reported(
            lambda: dist.init_process_group(
                "nexar", init_method=where, rank=rank, world_size=sizes[rank], timeout=limit
            )
        )
        return answer, time.monotonic() - began

    for answer, seconds in on_ranks(tmp_path, 2, task, initialise=False):
        assert f"rank 0 expects {sizes[0]} ranks, but rank 1 expects {sizes[1]}" in answer
        assert seconds < EVENT_TIMEOUT / 2


SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("nexar")
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("a very bad batch")
dist.all_reduce(torch.ones(1))
"""


def test_under_torchrun_the_others_show_the_traceback_of_a_rank_that_raised(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    patient = ["--monitor-interval", "5"]  # seconds: torchrun ends the others when it sees that one has failed
    words = [*patient, "--nproc-per-node", "2", "--standalone", str(script)]
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert run.returncode == 1
    theirs = [line for line in run.stderr.splitlines() if line.startswith("[rank0]:")]
    assert any("MembershipChanged" in line and "lost: rank 1: it raised an exception" in line for line in theirs)
    assert any("| ValueError: a very bad batch" in line for line in theirs)


def spawned(rank: int, folder: str) -> None:
    dist.init_process_group("nexar", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    Path(folder, str(rank)).write_text(str(tensor.item()))
    if rank:
        raise ValueError("a very bad batch")  # and nothing is destroyed
    with pytest.raises(nexar.MembershipChanged, match="a very bad batch"):
        dist.all_reduce(tensor)
    dist.destroy_process_group()


def test_spawned_ranks_meet_and_one_that_raises_ends_all(tmp_path):
    with pytest.raises(mp.ProcessRaisedException, match="a very bad batch"):
        mp.spawn(spawned, (str(tmp_path),), 2)
    assert [(tmp_path / name).read_text() for name in "01"] == ["2.0", "2.0"]
