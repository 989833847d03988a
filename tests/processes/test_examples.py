"""The examples do what they say. (Those that the tutorials use are run with these, as the documents are.)"""

import os
import re
import signal
import time

import pytest

from nexar_tools.transports import why_unavailable
from tests.architecture.sources import ROOT
from tests.processes.nexar_command import Nexar, Python

pytestmark = pytest.mark.full  # each starts a cluster, and some train a network

EXAMPLES = ROOT / "examples"
EVENT_TIMEOUT = 100.0


def run_ranks(folder, name, count=4):
    """What the ranks of an example have shown; it has to end well."""
    with Nexar("run", "-n", count, EXAMPLES / f"{name}.py", cwd=folder) as run:
        assert run.end(EVENT_TIMEOUT) == 0, run.stdout + run.stderr
    return run.stdout


def run_alone(folder, name):
    """The same for an example that starts its ranks itself."""
    with Python(EXAMPLES / f"{name}.py", cwd=folder) as run:
        assert run.end(EVENT_TIMEOUT) == 0, run.stdout + run.stderr
    return run.stdout


def await_text(path, pattern):
    """Wait until a file says this; what the first group of the pattern matched."""
    deadline = time.monotonic() + EVENT_TIMEOUT
    while not (path.exists() and (found := re.search(pattern, path.read_text(), re.MULTILINE))):
        assert time.monotonic() < deadline, f"{path.name} never says {pattern}"
        time.sleep(0.01)
    return found[1]


def losses(text):
    """Of each step that was shown: how many ranks there were, and the loss."""
    return [(int(size), float(loss)) for size, loss in re.findall(r"step \d+: (\d) ranks, loss ([\d.]+)", text)]


@pytest.mark.netns
def test_two_hosts_add_up_an_array_and_each_rank_sends_half_of_it_to_the_other(tmp_path):
    shown = run_alone(tmp_path, "two_hosts")
    assert "each a network namespace" in shown
    for rank in range(4):
        together = [0, 1] if rank < 2 else [2, 3]
        assert f"[rank {rank}] on host {1 + rank // 2} of 2, with ranks {together}" in shown
    assert "share that each rank sent to the other host: 50%, 50%, 50%, 50%" in shown


def test_two_hosts_are_two_names_where_namespaces_are_not_permitted(tmp_path):
    (search := tmp_path / "bin").mkdir()
    (search / "ip").write_text("#!/bin/sh\necho no >&2; exit 1")  # found first, and permits nothing
    (search / "ip").chmod(0o755)
    with Python(EXAMPLES / "two_hosts.py", cwd=tmp_path, PATH=str(search)) as run:
        assert run.end(EVENT_TIMEOUT) == 0, run.stderr
    assert "two hosts by host id only" in run.stdout
    assert "share that each rank sent to the other host: 50%, 50%, 50%, 50%" in run.stdout


def test_a_network_learns_on_when_a_rank_that_trains_it_is_killed(tmp_path):
    logs = tmp_path / "logs"
    example = EXAMPLES / "data_parallel_numpy.py"
    with Nexar(
        "run", "-n", 4, "--on-failure", "continue", "--log-dir", logs, example, "--steps", 800, cwd=tmp_path
    ) as run:
        victim = int(await_text(logs / "rank_2.stdout.log", r"I am process (\d+)"))
        await_text(logs / "rank_0.stdout.log", r"(step 0): 4 ranks")
        os.kill(victim, signal.SIGKILL)
        assert run.end(EVENT_TIMEOUT) == 0, run.stderr
    assert "rank 2 was killed by SIGKILL and is lost" in run.stderr
    shown = (logs / "rank_0.stdout.log").read_text()
    (first, before), *_, (last, after) = losses(shown)
    assert (first, last) == (4, 3)
    assert after < before / 5
    assert "done: 3 ranks have the same network" in shown


def test_workers_learn_through_calls_of_a_parameter_server(tmp_path):
    shown = run_ranks(tmp_path, "parameter_server")
    assert re.search(r"\[rank 0\] 450 gradients of 3 workers, on average [\d.]+ versions old", shown)


def test_a_pipeline_of_three_layers_learns_what_one_process_learns(tmp_path):
    shown = run_ranks(tmp_path, "pipeline", 3)
    before, after = re.search(r"\[rank 2\] the loss fell from ([\d.]+) to ([\d.]+)", shown).groups()
    assert float(after) < float(before) / 2
    assert "[rank 0] 3 ranks with one layer each: the same weights as in one process" in shown


def test_training_goes_on_while_a_rank_comes_and_the_oldest_goes(tmp_path):
    shown = run_alone(tmp_path, "elastic_training")
    assert [size for size, _ in losses(shown)] == [2, 3, 2]
    assert sorted(losses(shown), key=lambda each: -each[1]) == losses(shown), "the loss does not fall all the time"
    assert "joined as rank 2 of 3 after step 20" in shown
    assert "leaving after step 40" in shown
    assert "same model on all 2 ranks: True" in shown


def test_arrays_cross_every_transport_that_is_here(tmp_path):
    shown = run_alone(tmp_path, "transports")
    for scheme in ("quic", "tls", "tcp", "shm", "memory"):
        if why_unavailable("tls" if scheme == "tcp" else scheme) is None:
            assert re.search(rf"│ {scheme} .*✔ 5 dtypes", shown), scheme
