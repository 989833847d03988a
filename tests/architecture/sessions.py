"""Follows a document as its reader would: saves its files, types its commands, compares what comes out.

Machines are folders of this one, each with a host id of its own, so ranks of two of them share no memory and talk over
the network. What is put in place of the reader's world, and nothing else:

- `scp host-a:FILE .` is a copy from the other folder, once the file is there;
- `host-a:4000` and port 4000 are this machine and a port that is free.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.architecture.snippets import SHELL, Snippet, snippets
from tests.architecture.sources import ROOT
from tests.ports import free_port

EVENT_TIMEOUT = 50.0
NOT_RUN = {
    r"make|\.ci/run": "make sets up and runs everything else, these tests too",
    r"pip|maturin": "would change the environment that the tests run in",
    r"torchrun|nexar run [^\n]*\bddp\w*\.py": "torch is not installed here; `make test-torch` does it",
    r"srun|#SBATCH": "there is no Slurm here",
    r"mpiexec|mpirun": "there is no MPI here",
    r"kubectl": "there is no Kubernetes here",
}
"""Commands that these tests do not run, and why. Their blocks are still parsed."""

_PROMPT = re.compile(r"^([\w-]+)\$ (.*)$")
_SCP = """#!/bin/sh
from="../${1%%:*}/${1#*:}"
until [ -s "$from" ]; do sleep 0.05; done
exec cp -p "$from" "$2"
"""


def why_not_run(snippet: Snippet) -> str | None:
    """Why the commands of this block are not run; None if they are."""
    for words, reason in NOT_RUN.items():
        if re.search(rf"^(?:[\w-]+\$ )?(?:\w+=\S* )*(?:{words})\b", snippet.text, re.MULTILINE):
            return reason
    return None


def commands_of(document: Path) -> list[Snippet]:
    """The blocks of commands that are run."""
    return [s for s in snippets(*SHELL, "console", document=document) if why_not_run(s) is None]


class Session:
    """One reader with one document, in a folder of their own."""

    def __init__(self, document: Path, folder: Path) -> None:
        self._blocks = snippets(document=document)
        self._folder = folder
        self._port = free_port()
        consoles = [s for s in self._blocks if s.language == "console" and why_not_run(s) is None]
        self._machines = sorted({host for s in consoles for host, _ in _typed(s)})
        for machine in ("", *self._machines):
            (folder / machine).mkdir(exist_ok=True)
            for shared in ("examples", "tests"):
                (folder / machine / shared).symlink_to(ROOT / shared)
        tools = folder / "bin"
        tools.mkdir()
        (tools / "scp").write_text(_SCP)
        (tools / "scp").chmod(0o755)

    def follow(self) -> None:
        """Block by block. AssertionError says where it went wrong."""
        shown = ""
        for block in self._blocks:
            if block.language == "python" and block.title:
                self._save(block)
            elif block.title == "output":
                _compare(block, shown)
            elif block.language in (*SHELL, "console") and why_not_run(block) is None:
                shown = self._run(block)

    def _save(self, block: Snippet) -> None:
        for machine in ("", *self._machines):
            (self._folder / machine / block.title).write_text(block.text)

    def _run(self, block: Snippet) -> str:
        """Everything that was shown. On several machines at the same time."""
        typed = _typed(block) if block.language == "console" else [("", line) for line in block.text.splitlines()]
        machines = sorted({machine for machine, _ in typed})
        running = [self._start(machine, [line for host, line in typed if host == machine]) for machine in machines]
        try:
            ended = [(process.communicate(timeout=EVENT_TIMEOUT)[0], process.returncode) for process in running]
        finally:
            for process in running:
                _end(process)
        output = "".join(text for text, _ in ended)
        assert all(code == 0 for _, code in ended), f"{block} failed:\n{output}"
        return output

    def _start(self, machine: str, lines: list[str]) -> "subprocess.Popen[str]":
        script = "\n".join(self._as_typed(line) for line in lines)
        environment = {name: text for name, text in os.environ.items() if not name.startswith("NEXAR_")}
        search = [str(self._folder / "bin"), str(Path(sys.executable).parent), environment["PATH"]]
        own = {"PATH": ":".join(search), "NEXAR_HOST_ID": machine} if machine else {"PATH": ":".join(search)}
        return subprocess.Popen(
            [shutil.which("bash") or "bash", "-e", "-c", f"{script}\nwait"],
            cwd=self._folder / machine,
            env={**environment, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _as_typed(self, line: str) -> str:
        return re.sub(r"\bhost-\w+:4000\b", f"127.0.0.1:{self._port}", line).replace(":4000", f":{self._port}")


def _typed(block: Snippet) -> list[tuple[str, str]]:
    """Who types what."""
    lines = [line for line in block.text.splitlines() if line.strip()]
    found = [_PROMPT.match(line) for line in lines]
    assert all(found), f"{block}: each line of a console begins with the name of a machine and `$ `"
    return [(match[1], match[2]) for match in found if match]


def _compare(block: Snippet, shown: str) -> None:
    for line in block.text.splitlines():
        pattern = ".*".join(re.escape(part) for part in line.strip().split("…"))
        assert re.search(f"^\\s*{pattern}\\s*$", shown, re.MULTILINE), f"{block} promises {line!r}; shown was:\n{shown}"


def _end(process: "subprocess.Popen[str]") -> None:
    """With everything it has started; what a command left in the background too."""
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    if process.returncode is None:
        process.communicate()
