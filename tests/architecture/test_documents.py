"""What the documents show works: Python snippets run, make targets exist, links lead somewhere."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, files, shown

DOCUMENTS = files(".md")
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    document: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{shown(self.document)}:{self.line}"


def snippets(*languages: str) -> list[Snippet]:
    return [s for document in DOCUMENTS for s in _fenced(document) if s.language in languages]


def _fenced(document: Path) -> list[Snippet]:
    text = document.read_text()
    return [Snippet(document, text[: found.start()].count("\n") + 1, *found.groups()) for found in FENCE.finditer(text)]


@pytest.mark.parametrize("snippet", snippets("python"), ids=str)
def test_a_python_snippet_runs_as_it_stands(snippet, tmp_path):
    """A preview of what does not exist yet is fenced as `text`, not as `python`."""
    command = [sys.executable, "-W", "error", "-c", snippet.text]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=50)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("snippet", snippets("sh", "bash", "console", "shell"), ids=str)
def test_a_shell_snippet_names_targets_that_exist(snippet):
    named = set(re.findall(r"\bmake ((?:[a-z]+(?:\s|$))+)", re.sub(r"#.*", "", snippet.text)))
    assert {target for words in named for target in words.split()} <= TARGETS


@pytest.mark.parametrize("document", DOCUMENTS, ids=shown)
def test_a_target_named_in_the_text_exists(document):
    assert set(re.findall(r"`make ([a-z]+)[^`]*`", document.read_text())) <= TARGETS


@pytest.mark.parametrize("document", DOCUMENTS, ids=shown)
def test_a_link_to_a_file_leads_to_one(document):
    links = re.findall(r"\]\((?!\w+:)([^)#\s]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_every_target_explains_itself():
    assert set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)) == TARGETS
