"""Ranks that meet through torch's store: what it never holds, and attempts that follow one another."""

import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.ports import free_port
from tests.torch.processes import EVENT_TIMEOUT, on_ranks

TOKEN = "0123456789abcdef" * 4
LIMIT = timedelta(seconds=EVENT_TIMEOUT)


def test_a_second_attempt_in_the_same_store_meets_again(tmp_path):
    def task(rank, size):
        totals = []
        for _ in range(3):
            dist.init_process_group("nexar", init_method=f"file://{tmp_path}/kept", rank=rank, world_size=size)
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            totals.append(tensor.item())
            dist.destroy_process_group()
        return totals

    assert on_ranks(tmp_path, 2, task, initialise=False) == [[2.0] * 3] * 2


ATTEMPTS = """
import os, time
import torch, torch.distributed as dist

again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
if again and os.environ["RANK"] == "0":
    while not os.path.exists(os.environ["HERE"]):  # the other one reads the store first
        time.sleep(0.01)
elif again:
    open(os.environ["HERE"], "x").close()
dist.init_process_group("nexar")
tensor = torch.ones(1)
dist.all_reduce(tensor)
if not again:
    dist.barrier()
    os._exit(7)
print(f"again: {tensor.item()}", flush=True)  # one write: two ranks share the output
dist.destroy_process_group()
"""


def test_ranks_that_torchrun_starts_again_meet_although_the_store_is_kept(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ATTEMPTS)
    words = ["--nproc-per-node", "2", "--max-restarts", "1", "--master-port", str(free_port()), str(script)]
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        env={**os.environ, "HERE": str(tmp_path / "here")},
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("again: 2.0") == 2


@pytest.mark.parametrize("token", ["", TOKEN], ids=["on one host", "with a token"])
def test_the_store_never_holds_a_secret(tmp_path, token):
    def task(rank, size):
        os.environ["NEXAR_CLUSTER_TOKEN"] = token
        where = f"file://{tmp_path}/store"
        dist.init_process_group("nexar", init_method=where, rank=rank, world_size=size, timeout=LIMIT)
        return (tmp_path / "store").read_bytes()  # torch appends all that is ever written

    for written in on_ranks(tmp_path, 2, task, initialise=False):
        assert b"nexar/round" in written
        assert b"nexar1_" not in written, "a ticket"
        assert TOKEN.encode() not in written
