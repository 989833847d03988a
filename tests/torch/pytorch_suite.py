"""PyTorch's own tests of a backend, as they come in the wheel: python -m tests.torch.pytorch_suite --world 2

`DistributedTest._DistTestBase` runs every collective, message and wrapper (DDP, join, averaging) in real processes.
Prints a line for each test, and then how many passed; `--backend gloo` shows what torch's own backend does on the same
machine. Processes are forked: torch is imported once, not once for each process of each test, and so is nexar.
"""

import argparse
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tests.torch.processes import load


def main() -> int:
    arguments = _arguments()
    load()
    folder = tempfile.mkdtemp(prefix="nexar-torch-")
    os.environ.update(BACKEND=arguments.backend, WORLD_SIZE=str(arguments.world), TEMP_DIR=folder)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = _names(arguments)
    results = {}
    for name in names:
        results[name] = _run(name, arguments.limit)
        print(*results[name], name, flush=True, sep="  ")  # noqa: T201
    _report(results, arguments)
    return any(result[0] in ("FAILED", "ERROR") for result in results.values())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="nexar")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--part", default="1/1", help="which part of the tests: 2/4 is the second quarter")
    parser.add_argument("--only", default="", help="tests whose names contain one of these, separated by commas")
    parser.add_argument("--json", default="", help="add the results to this file")
    parser.add_argument("--limit", type=int, default=100, help="seconds for one test")
    return parser.parse_args()


def _names(arguments: argparse.Namespace) -> list[str]:
    place, parts = (int(text) for text in arguments.part.split("/"))
    names = unittest.defaultTestLoader.getTestCaseNames(_case())
    wanted = [word for word in arguments.only.split(",") if word]
    chosen = [name for name in names if not wanted or any(word in name for word in wanted)]
    return chosen[place - 1 :: parts]


_NAMED = (
    ('BACKEND != "mpi", "Only MPI supports', 'BACKEND not in ("mpi", "nexar"), "Only MPI supports'),
    ('BACKEND != "mpi" and BACKEND != "nccl" and BACKEND', 'BACKEND not in ("mpi", "nccl", "nexar") and BACKEND'),
    ('BACKEND != "gloo", "Only gloo', 'BACKEND not in ("gloo", "nexar"), "Only gloo'),
    ('BACKEND != "gloo", "GLOO Batch', 'BACKEND not in ("gloo", "nexar"), "GLOO Batch'),
    ('BACKEND != "gloo" and BACKEND != "nccl"', 'BACKEND not in ("gloo", "nccl", "nexar")'),
    ('BACKEND != "nccl" and BACKEND != "gloo"', 'BACKEND not in ("gloo", "nccl", "nexar")'),
    ('BACKEND == "mpi" or BACKEND == "gloo"', 'BACKEND in ("mpi", "gloo", "nexar")'),
    ('is_available({"gloo"})', 'is_available({"gloo", "nexar"})'),
)
"""Where torch lets a test run for backends by their names: what it is about, nexar has too."""


def _module() -> Any:
    """torch's tests, with nexar among the backends that have what they are about."""
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):  # where torch lists the backends that have it
        DistTestCases.backend_feature[feature].add("nexar")
    name = "torch.testing._internal.distributed.distributed_test"
    specification = importlib.util.find_spec(name)
    assert specification is not None
    assert specification.origin is not None
    with open(specification.origin) as file:
        text = file.read()
    for theirs, ours in _NAMED:
        text = text.replace(theirs, ours)
    text = _reported_early(text)
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    exec(compile(text, specification.origin, "exec"), module.__dict__)  # of the wheel, which we know
    return module


def _reported_early(text: str) -> str:
    """What each process would find out after it has joined the others, and would skip then, is skipped before."""
    if not torch.cuda.is_available():
        text = re.sub(r"@skip_if_no_gpu\b", '@unittest.skip("it needs a GPU")', text)
        text = re.sub(r"@skip_if_lt_x_gpu\(.*\)", '@unittest.skip("it needs GPUs")', text)
    if int(os.environ["WORLD_SIZE"]) <= 2:
        return re.sub(r"@skip_if_small_worldsize\b", '@unittest.skip("it needs more than two ranks")', text)
    return re.sub(r"@skip_if_small_worldsize\b", "", text)  # torch wants eight of them, for groups of ranks 1 and 2


def _case() -> type[unittest.TestCase]:
    """Made when the environment says which backend: torch decides what to skip as it is imported."""
    global _made  # noqa: PLW0603
    if _made is None:
        tests = _module()

        class TestBackend(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
            def setUp(self) -> None:
                super().setUp()
                self._start_processes(torch.multiprocessing.get_context("fork").Process)

        TestBackend.__module__ = __name__
        globals()["TestBackend"] = TestBackend
        _made = TestBackend
    return _made


_made: type[unittest.TestCase] | None = None


_WORDS = (
    "test_monitored_barrier_gloo", "test_monitored_barrier_failure_order", "test_monitored_barrier_wait_all_ranks",
    "test_barrier_timeout",
)  # fmt: skip


def _run(name: str, limit: int) -> tuple[str, str, str]:
    """How it ended, how long it took, and why it was skipped or failed."""
    from torch.testing._internal import common_distributed

    common_distributed.TIMEOUT_DEFAULT = limit
    if name.startswith(_WORDS) and os.environ["BACKEND"] != "gloo":
        return "skipped", "0.0 s", "it compares the words of Gloo's errors"
    result = unittest.TestResult()
    began = time.monotonic()
    _case()(name).run(result)
    took = f"{time.monotonic() - began:5.1f} s"
    if result.skipped:
        return "skipped", took, result.skipped[0][1].splitlines()[0]
    faults = result.failures + result.errors
    if faults:
        lines = faults[0][1].strip().splitlines()
        reported = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        return "FAILED", took, (reported or lines)[-1][:300]
    return "passed", took, ""


_REASONS = {
    r"GPU|nccl": "need GPUs, or are of NCCL's alone",
    r"more than two ranks|world size of 4": "need more than two ranks",
    r"github\.com|torchvision": "are switched off by torch itself, or need torchvision",
    r"words of Gloo": "compare the words of Gloo's errors",
    r"sparse": "reduce sparse tensors",
}


def reasons(results: Mapping[str, Sequence[str]]) -> Counter[str]:
    """How many were skipped for which kind of reason; for one that nobody has thought of, its own words."""
    kinds: Counter[str] = Counter()
    for state, _, words in results.values():
        if state == "skipped":
            kinds[next((kind for sign, kind in _REASONS.items() if re.search(sign, words, re.IGNORECASE)), words)] += 1
    return kinds


def _report(results: dict[str, tuple[str, str, str]], arguments: argparse.Namespace) -> None:
    counts = {kind: sum(result[0] == kind for result in results.values()) for kind in ("passed", "skipped", "FAILED")}
    print(f"\n{arguments.backend}, world {arguments.world}: {counts}")  # noqa: T201
    for kind, count in reasons(results).most_common():
        print(f"{count:5} {kind}")  # noqa: T201
    if arguments.json:
        with open(arguments.json, "a") as file:
            file.write(json.dumps({"backend": arguments.backend, "world": arguments.world, "results": results}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
