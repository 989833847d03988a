"""Metrics and the trace of a real run."""

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from nexar.collectives.trace_writer import SUFFIX
from tests.ports import free_port
from tests.processes.launcher import EVENT_TIMEOUT
from tests.processes.nexar_command import Nexar

RANK = Path(__file__).with_name("watched_rank.py")


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text: str = answer.read().decode()
        return text


def await_calls(port: int) -> str:
    deadline = time.monotonic() + EVENT_TIMEOUT
    while True:
        try:
            text = scrape(port)
            if 'nexar_collective_calls_total{operation="all_reduce"' in text:
                return text
        except urllib.error.URLError:
            pass  # it has not begun
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_serves_metrics_and_leaves_a_trace_of_all_ranks_on_one_clock(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed: pip install 'nexar[metrics]'")
    enough, first = tmp_path / "enough", free_port(3)
    arguments = ("run", "-n", 3, "--trace", "out.json", RANK, enough)
    with Nexar(*arguments, cwd=tmp_path, NEXAR_METRICS_PORT=str(first)) as run:
        for rank in range(3):
            text = await_calls(first + rank)
            assert f'nexar_world_size{{rank="{rank}"}} 3.0' in text
            assert "nexar_waiting_for_seconds_total" in text
        enough.touch()
        assert run.end() == 0, run.stderr
    assert "calls of 3 ranks are in out.json" in run.stderr
    check_trace(json.loads((tmp_path / "out.json").read_text()))


def check_trace(trace: dict[str, Any]) -> None:
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} <= {"M", "X", "s", "f"}
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1", "rank 2"}
    calls = [event for event in events if event.get("cat") == "collective" and event["name"] == "all_reduce"]
    by_call: dict[int, list[dict[str, Any]]] = {}
    for event in calls:
        by_call.setdefault(event["args"]["sequence"], []).append(event)
    whole = [each for each in by_call.values() if len(each) == 3]
    assert len(whole) >= 5
    for each in whole:
        assert set(each[0]["args"]["arrivals_us"]) == {"rank 0", "rank 1", "rank 2"}
        last = max(event["ts"] for event in each)
        assert all(event["ts"] + event["dur"] >= last - 1 for event in each), "nobody ends before all have begun"
    assert any(event.get("cat") == "wait" and event["name"] == "waiting for rank 1" for event in events)
    begun, ended = ({event["id"] for event in events if event["ph"] == phase} for phase in "sf")
    assert ended
    assert ended <= begun


def test_parts_that_other_launchers_ranks_left_are_merged(tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    enough.touch()
    with Nexar("run", "-n", 2, RANK, enough, cwd=tmp_path, NEXAR_TRACE_DIR="parts") as run:
        assert run.end() == 0, run.stderr
    assert len(list((tmp_path / "parts").glob(f"*{SUFFIX}"))) == 2
    with Nexar("trace", "merge", "parts", "-o", "out.json", cwd=tmp_path) as merge:
        assert merge.end() == 0, merge.stderr
    assert json.loads((tmp_path / "out.json").read_text())["otherData"]["ranks"] == 2
    (tmp_path / "empty").mkdir()
    with Nexar("trace", "merge", "empty", "-o", "none.json", cwd=tmp_path) as nothing:
        assert nothing.end() == 1


def test_a_trace_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('started')")
    with Nexar("run", "--trace", "nowhere/out.json", "script.py", cwd=tmp_path) as run:
        assert run.end() == 2
    assert "--trace nowhere/out.json cannot be written" in run.stderr
    assert "started" not in run.stdout
