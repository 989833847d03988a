"""The same script under torchrun and `nexar run`, and what the hook costs those who do not use it."""

import os
import subprocess
import sys

from tests.architecture.sources import ROOT

DDP = ROOT / "examples" / "torch_ddp.py"
ELASTIC = ROOT / "examples" / "torch_elastic.py"
EVENT_TIMEOUT = 100.0


def shown(*command: object, **environment: str) -> str:
    """What it prints; it has to end well."""
    words = [sys.executable, *map(str, command)]
    run = subprocess.run(
        words, env={**os.environ, **environment}, capture_output=True, text=True, timeout=EVENT_TIMEOUT, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_the_example_runs_under_torchrun():
    text = shown("-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", "0", "--standalone", DDP)
    assert "step 60: 2 ranks" in text
    assert "the same model on all ranks: True" in text


def test_the_example_runs_under_nexar_run():
    text = shown("-m", "nexar", "run", "-n", 2, DDP)
    assert "step 60: 2 ranks" in text
    assert "the same model on all ranks: True" in text


def test_training_goes_on_when_a_rank_is_lost_and_when_one_is_gained():
    text = shown(ELASTIC)
    assert "step 20: continuing without {" in text
    assert "joined as rank 2 of 3" in text
    assert ": 3 ranks, loss" in text


def test_who_imports_torch_and_not_nexar_pays_less_than_a_few_milliseconds():
    program = (
        "import sys, time, torch, torch.distributed as dist; found = 'nexar' in dist.Backend.backend_list\n"
        "for name in ('nexar_torch_hook',): sys.modules.pop(name, None)\n"
        "del dist.Backend._plugins['NEXAR']\n"
        "began = time.perf_counter(); import nexar_torch_hook; nexar_torch_hook.register()\n"
        "print(found, 'nexar' in sys.modules, time.perf_counter() - began)"
    )
    found, imported, seconds = shown("-c", program).split()
    assert (found, imported) == ("True", "False")
    assert float(seconds) < 0.01  # half a millisecond on a machine that is not busy
