"""`nexar bench` with real processes: on this machine, on two hosts, and with systems that fail."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nexar.cli.bench.systems import ProcessStart, SystemFailed, SystemPlan, SystemRanks, opened_hosts
from nexar_tools.network_namespaces import permitted
from tests.unit.cli.bench.orders import ORDER

EVENT_TIMEOUT = 150.0
SHORT = ("-n", "5", "-w", "1", "--rounds", "1")
needs_namespaces = pytest.mark.skipif(permitted() is not None, reason=str(permitted()))


def bench(*arguments, cwd):
    return nexar("bench", *arguments, *SHORT, cwd=cwd)


def launched(ranks, *arguments, cwd):
    """What rank 0 shows, without the prefix that says so."""
    ran = nexar("run", "-n", str(ranks), "-m", "nexar", "bench", *arguments, *SHORT, cwd=cwd)
    ran.stdout = ran.stdout.replace("[rank 0] ", "")
    return ran


def nexar(*arguments, cwd):
    environment = {name: text for name, text in os.environ.items() if not name.startswith("NEXAR_")}
    return subprocess.run(
        [sys.executable, "-m", "nexar", *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=EVENT_TIMEOUT,
    )  # fmt: skip


def table(output):
    return [line.split() for line in output.splitlines() if line and not line.startswith("#")]


def test_a_table_has_a_line_for_each_size_and_nothing_is_wrong(tmp_path):
    ran = bench("p2p-latency", "--sizes", "8,1K,128K", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert [(line[0], line[-1]) for line in table(ran.stdout)] == [("8", "0"), ("1024", "0"), ("131072", "0")]


def test_json_has_what_the_table_has(tmp_path):
    ran = bench("barrier", "p2p-latency", "-e", "8", "--json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert [row["measure"] for row in found["rows"]] == ["barrier", "p2p-latency"]
    assert all(row["figures"]["nexar"]["time_us"] > 0 for row in found["rows"])


def test_ranks_of_another_launch_are_measured_together(tmp_path):
    ran = launched(3, "barrier", "p2p-latency", "-e", "8", "--json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["ranks"], found["where"], len(found["rows"])) == (3, "one host", 2)


def test_a_rank_of_another_launch_starts_no_ranks_of_its_own(tmp_path):
    ran = launched(1, "barrier", "--hosts", "2", cwd=tmp_path)
    assert ran.returncode == 2
    assert "outside" in ran.stderr


@pytest.mark.netns
@needs_namespaces
def test_two_hosts_are_made_and_removed(tmp_path):
    ran = bench("p2p-latency", "-e", "8", "--hosts", "2", "--mtu", "9000", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "MTU 9000" in ran.stdout
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=EVENT_TIMEOUT)
    assert "nexar-bench" not in listed.stdout


@pytest.mark.netns
@needs_namespaces
def test_hosts_reach_one_another_through_the_wire():
    with opened_hosts(2, 9000) as (first, second):
        ping = [*first.prefix, sys.executable, "-c", "import socket; print(socket.if_nameindex())"]
        seen = subprocess.run(ping, capture_output=True, text=True, check=True, timeout=EVENT_TIMEOUT).stdout
        assert first.interface in seen
        assert first.address != second.address


class TestSystems:
    """Ranks that are small programs."""

    GOOD = """
import sys
from nexar.cli.bench.measuring import serve
class System:
    rank, size, version = int(sys.argv[2]), 2, "7"
    def barrier(self): pass
    def bind(self, order, source, target):
        def call():
            if order.op == "max": sys.exit("I am dying")
            while order.op == "min": __import__("signal").pause()
        return call
serve(System(), sys.argv[1])
"""

    def runners(self, folder: Path, program=GOOD, ranks=2):
        path = str(folder / "x.socket")
        starts = tuple(ProcessStart((sys.executable, "-c", program, path, str(rank))) for rank in range(ranks))
        return SystemRanks(SystemPlan("x", starts, ""), 2, path=path, environment=os.environ, folder=folder)

    def test_ranks_answer_by_rank_and_report_their_version(self, tmp_path):
        with self.runners(tmp_path) as ranks:
            replies = ranks.ask(ORDER, EVENT_TIMEOUT)
            assert ranks.version == "7"
        assert [len(reply.nanoseconds) for reply in replies] == [3, 3]

    def test_a_rank_that_dies_is_named_with_its_last_output(self, tmp_path):
        with (
            self.runners(tmp_path) as ranks,
            pytest.raises(SystemFailed, match=r"(?s)x: rank 0 is gone.*I am dying"),
        ):
            ranks.ask(replace(ORDER, op="max"), EVENT_TIMEOUT)

    @pytest.mark.full
    def test_a_rank_that_does_not_answer_is_named(self, tmp_path):
        with self.runners(tmp_path) as ranks, pytest.raises(SystemFailed, match="rank 0 did not answer"):
            ranks.ask(replace(ORDER, op="min"), 0.2)

    def test_a_system_that_does_not_come_up_says_why(self, tmp_path):
        failing = self.runners(tmp_path, "raise SystemExit('no MPI here')")
        with pytest.raises(SystemFailed, match=r"(?s)ended with code 1.*no MPI here"), failing:
            pass

    def test_a_rank_that_leaves_before_it_says_who_it_is_is_reported(self, tmp_path):
        silent = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1]); print('oh')"
        with pytest.raises(SystemFailed, match="a rank disconnected without a hello"), self.runners(tmp_path, silent):
            pass

    def test_a_program_that_is_not_there_is_named(self, tmp_path):
        plan = SystemPlan("x", (ProcessStart(("/no/such/program",)),), "")
        absent = SystemRanks(plan, 2, path=str(tmp_path / "s"), environment=os.environ, folder=tmp_path)
        with pytest.raises(SystemFailed, match="/no/such/program cannot be started"), absent:
            pass
