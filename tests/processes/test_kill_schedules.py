"""Some kill schedules; and that they find what is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from nexar_tools import environment
from tests.processes.scale import sized

COUNT = sized(5, 250)


def run_schedules(folder: Path, hosts: int) -> str:
    arguments = ["--count", str(COUNT), "--seed", "11", "--hosts", str(hosts), "--folder", str(folder), "--verbose"]
    command = [sys.executable, "-m", "nexar_tools.kill_schedules", *arguments]
    ran = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=False, timeout=sized(280, 3600)
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.full
@pytest.mark.timeout(sized(300, 3700))
def test_survivors_on_one_host_agree_and_go_on(tmp_path: Path) -> None:
    assert "disagreements 0, hangs 0, errors 0" in run_schedules(tmp_path, 1)


@pytest.mark.full
@pytest.mark.netns
@pytest.mark.timeout(sized(300, 3700))
def test_survivors_on_two_hosts_agree_and_go_on(tmp_path: Path) -> None:
    assert "disagreements 0, hangs 0, errors 0" in run_schedules(tmp_path, 2)
