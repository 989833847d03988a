import subprocess
import sys


def test_starting_does_not_wait_for_what_it_does_not_need():
    program = "import sys, nexar.cli.main; print(*{m for m in ('rich', 'typer.rich_utils') if m in sys.modules})"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=50)
    assert ran.stdout.strip() == ""
