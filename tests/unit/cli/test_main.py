import subprocess
import sys

import pytest
from typer.testing import CliRunner

import nexar
from nexar.cli.main import app


def test_starting_does_not_wait_for_what_it_does_not_need():
    program = "import sys, nexar.cli.main; print(*{m for m in ('rich', 'typer.rich_utils') if m in sys.modules})"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=50)
    assert ran.stdout.strip() == ""


def test_the_version_can_be_asked_for():
    ran = CliRunner().invoke(app, ["--version"])
    assert (ran.exit_code, ran.stdout) == (0, f"nexar {nexar.__version__}\n")


@pytest.mark.parametrize("command", ["run", "seed", "config", "doctor", "bench"])
def test_every_command_explains_itself(command):
    ran = CliRunner().invoke(app, [command, "--help"])
    assert ran.exit_code == 0
    assert "Usage" in ran.stdout
