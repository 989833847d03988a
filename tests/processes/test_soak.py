"""A soak, for some seconds; and that it finds what is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from nexar_tools import environment
from nexar_tools.soak.campaign import Campaign, SoakFailure


def run_soak(folder: Path, *arguments: str) -> str:
    """What it printed, which says that nothing was wrong."""
    command = [sys.executable, "-m", "nexar_tools.soak", *arguments, "--folder", str(folder / "soak")]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=270)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "all results were right, progress never stopped, nothing leaked" in ran.stdout
    return ran.stdout


@pytest.mark.full
def test_members_that_come_and_are_killed_for_some_seconds_do_nothing_wrong(tmp_path: Path) -> None:
    printed = run_soak(tmp_path, "--minutes", "0.2", "--seed", "3", "--hosts", "1")
    assert "soak for 0.2 minutes with --seed 3" in printed
    assert "at the end: the seed" in printed


@pytest.mark.full
@pytest.mark.netns
def test_lost_packets_and_hosts_that_are_cut_off_make_nothing_wrong(tmp_path: Path) -> None:
    printed = run_soak(tmp_path, "--minutes", "0.6", "--seed", "5", "--partition-minutes", "0.2", "--loss", "1")
    assert "longest time without a round of any member" in printed


def test_a_member_that_ends_by_itself_is_found_and_shown(tmp_path: Path) -> None:
    broken = [sys.executable, "-c", "raise SystemExit('the sum is wrong')"]
    with pytest.raises(SoakFailure, match=r"member-\d ended and was not killed(.|\n)*the sum is wrong"):
        Campaign(tmp_path, 1, lambda _: None, member=broken).run(minutes=1)
