"""A soak, for some seconds; and that it finds what is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from nexar_tools import environment
from nexar_tools.soak.campaign import Campaign, SoakFailure


@pytest.mark.full
def test_members_that_come_and_are_killed_for_some_seconds_do_nothing_wrong(tmp_path: Path) -> None:
    arguments = ["--minutes", "0.2", "--seed", "3", "--folder", str(tmp_path / "soak")]
    command = [sys.executable, "-m", "nexar_tools.soak", *arguments]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=190)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "soak for 0.2 minutes with --seed 3" in ran.stdout
    assert "all results were right, progress never stopped, nothing leaked" in ran.stdout


def test_a_member_that_ends_by_itself_is_found_and_shown(tmp_path: Path) -> None:
    broken = [sys.executable, "-c", "raise SystemExit('the sum is wrong')"]
    with pytest.raises(SoakFailure, match=r"member-\d ended and was not killed(.|\n)*the sum is wrong"):
        Campaign(tmp_path, 1, lambda _: None, member=broken).run(minutes=1)
