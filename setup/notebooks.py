"""Runs the documentation's notebooks in a Jupyter kernel, and compares their output with the stored output.

.venv-docs/bin/python setup/notebooks.py            fails if a cell raises or the output differs .venv-docs/bin/python
setup/notebooks.py --write    stores the output
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"


def shown(notebook: nbformat.NotebookNode) -> list[str]:
    """The output text of each cell. A kernel may send it in any number of pieces."""
    return ["".join(output.text for output in cell.get("outputs", ())) for cell in notebook.cells]


def execute(path: Path) -> nbformat.NotebookNode:
    """A copy with the output of a fresh kernel. Raises what a cell raises."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=60, kernel_name="python3", record_timing=False).execute()
    return notebook


def main() -> None:
    """Runs all notebooks."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        ran = execute(path)
        same = shown(ran) == shown(nbformat.read(path, as_version=4))
        if "--write" in sys.argv:
            ran.metadata = {"kernelspec": ran.metadata.kernelspec, "language_info": {"name": "python"}}
            nbformat.write(ran, path)
        elif not same:
            sys.exit(f"docs: {path.name} shows something else than what is stored: setup/notebooks.py --write")
        print(f"docs: {path.name} ran, {len(ran.cells)} cells")


if __name__ == "__main__":
    main()
