"""The notebooks run, cell by cell, and show what is stored in them. (`make docs` runs them in Jupyter's own kernel.)"""

import ast
import asyncio
import inspect
import json
from typing import Any

import pytest

from tests.architecture.sources import ROOT, files, shown

NOTEBOOKS = files(".ipynb", below=ROOT / "docs")


def cells(path):
    """The cells of code: what is in them, and what stands below each."""
    found = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    return [
        ("".join(cell["source"]), "".join(line for output in cell["outputs"] for line in output["text"]))
        for cell in found
    ]


async def run(path, capsys):
    """As a kernel does: one namespace, one event loop that runs all the time, and `await` in any cell."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, (source, stored) in enumerate(cells(path)):
        code = compile(source, f"{path.name}[{number}]", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        given = eval(code, names)  # noqa: S307 - the repository's own
        if inspect.iscoroutine(given):
            await given
        assert capsys.readouterr().out == stored, source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=shown)
def test_a_notebook_shows_what_is_stored_in_it(path, capsys):
    asyncio.run(run(path, capsys))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=shown)
def test_a_notebook_was_run_from_its_beginning(path):
    stored = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in stored] == list(range(1, len(stored) + 1))
