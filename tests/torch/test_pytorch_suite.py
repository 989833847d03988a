"""PyTorch's own tests of a backend pass: some of them each time, all of them (two and four ranks) in the full run."""

import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT
from tests.processes.scale import FULL

SAMPLE = ["all_reduce_sum_async", "all_to_all_single_unequal_split_full_group", "send_recv_any_source", "isend",
          "DistributedDataParallelCPU", "ddp_logging_data_cpu", "all_gather_into_stack_tensor"]  # fmt: skip


def run(*arguments: object, patience: float) -> str:
    command = [sys.executable, "-m", "tests.torch.pytorch_suite", *map(str, arguments)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=patience)
    shown = "\n".join(line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "nexar")))
    assert ran.returncode == 0, shown + ran.stderr[-2000:]
    return shown


@pytest.mark.timeout(200)
def test_some_of_them_pass_with_two_ranks():
    assert "'FAILED': 0" in run("--world", 2, "--only", ",".join(SAMPLE), patience=190)


@pytest.mark.skipif(not FULL, reason="takes minutes: NEXAR_FULL=1 runs it")
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("world", [2, 4])
def test_all_of_them_pass(world):
    assert "'FAILED': 0" in run("--world", world, patience=3900)
