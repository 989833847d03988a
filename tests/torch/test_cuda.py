"""CUDA tensors, where there is a GPU."""

import json
import os
import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT

pytestmark = [
    pytest.mark.skipif(not os.path.exists("/dev/nvidia0"), reason="there is no NVIDIA GPU here"),
]


def test_cuda_tensors_are_reduced_gathered_and_sent_and_ddp_learns_on_them():
    command = [sys.executable, "-m", "tests.torch.cuda_ranks"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=250)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert all(found["right"].values()), found["right"]
    assert found["ddp"] < 1e-5
