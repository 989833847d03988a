"""What the documents show works: snippets run, commands are typed, make targets exist, links lead somewhere."""

import re
import subprocess
import sys

import pytest
import yaml

from nexar.launch.detect import detect
from tests.architecture.sessions import Session, commands_of, why_not_run
from tests.architecture.snippets import DOCUMENTS, SHELL, snippets
from tests.architecture.sources import ROOT, shown
from tests.unit.launch.recorded import recorded

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
COMMANDS = snippets(*SHELL, "console")
ALWAYS_FOLLOWED = {"README.md", "first-cluster.md"}  # the others: make test-full
LAUNCHING = ROOT / "docs" / "howto" / "launch.md"


@pytest.mark.parametrize("snippet", [s for s in snippets("python") if not s.title], ids=str)
def test_a_python_snippet_runs_as_it_stands(snippet, tmp_path):
    """A preview of what does not exist yet is fenced as `text`, not as `python`."""
    command = [sys.executable, "-W", "error", "-c", snippet.text]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=50)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(path, id=shown(path), marks=[] if path.name in ALWAYS_FOLLOWED else [pytest.mark.full])
        for path in DOCUMENTS
        if commands_of(path)
    ],
)
def test_a_reader_who_types_what_a_document_says_sees_what_it_promises(document, tmp_path):
    Session(document, tmp_path).follow()


@pytest.mark.parametrize("snippet", [s for s in COMMANDS if why_not_run(s) is not None], ids=str)
def test_commands_that_are_not_run_here_are_at_least_commands(snippet):
    text = re.sub(r"^[\w-]+\$ ", "", snippet.text, flags=re.MULTILINE)
    parsed = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False, timeout=50)
    assert parsed.returncode == 0, parsed.stderr
    if not re.search(r"^make|^\.ci", text, re.MULTILINE):
        pytest.skip(f"parsed, and not run: {why_not_run(snippet)}")


def test_shell_snippets_name_targets_that_exist():
    commands = {str(snippet): re.sub(r"#.*", "", snippet.text) for snippet in COMMANDS}
    named = {where: re.findall(r"\bmake ((?:[a-z-]+(?: +|(?=\n)))+)", text + "\n") for where, text in commands.items()}
    assert [(where, line) for where, lines in named.items() for line in lines if set(line.split()) - TARGETS] == []


@pytest.mark.parametrize(
    ("launcher", "kind"),
    [("torchrun", "torch"), ("srun", "slurm"), ("mpirun", "openmpi"), ("mpiexec", "pmi")],
)
def test_a_launcher_that_is_documented_is_recognised_by_what_it_sets(launcher, kind):
    assert any(re.search(rf"^{launcher} ", s.text, re.MULTILINE) for s in snippets(*SHELL, document=LAUNCHING))
    start = detect(recorded({"mpirun": "openmpi", "mpiexec": "mpich"}.get(launcher, launcher)))
    assert start is not None
    assert start.kind == kind


def test_the_kubernetes_manifest_makes_pods_that_know_their_place():
    (manifest,) = snippets("yaml", document=LAUNCHING)
    service, job = yaml.safe_load_all(manifest.text)
    pod, name = job["spec"]["template"]["spec"], job["metadata"]["name"]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry.get("value", "from a secret") for entry in container["env"]}
    last = job["spec"]["completions"] - 1
    start = detect({**environment, "JOB_COMPLETION_INDEX": str(last)})
    assert start is not None
    assert (start.kind, start.rank, start.size) == ("kubernetes", last, job["spec"]["parallelism"])
    assert start.master_addr == f"{name}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}


def test_a_target_named_in_the_text_exists():
    named = {shown(path): set(re.findall(r"`make ([a-z-]+)[^`]*`", path.read_text())) for path in DOCUMENTS}
    assert {path: targets - TARGETS for path, targets in named.items() if targets - TARGETS} == {}


def test_a_link_to_a_file_leads_to_one():
    links = [(path, link) for path in DOCUMENTS for link in re.findall(r"\]\((?!\w+:)([^)#\s]+)", path.read_text())]
    assert [(shown(path), link) for path, link in links if not (path.parent / link).exists()] == []


def test_every_target_explains_itself():
    assert set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)) == TARGETS
