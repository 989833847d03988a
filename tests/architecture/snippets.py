"""The fenced blocks of the documents, and what each is for.

```python              runs by itself
```python hello.py     is a file, which the commands of the document use
```sh, ```bash         commands on one machine
```console             commands on several: each line begins with the machine's name and `$`
```text output         what the commands before it show, line by line; `…` stands for anything
```text                is read by people only
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.sources import files, shown

DOCUMENTS = files(".md")
SHELL = ("sh", "bash", "shell")
_FENCE = re.compile(r"^```(\w*) ?([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    document: Path
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{shown(self.document)}:{self.line}"


def snippets(*languages: str, document: Path | None = None) -> list[Snippet]:
    """All of these languages, or all there are; of one document or of every one."""
    chosen = DOCUMENTS if document is None else [document]
    return [s for path in chosen for s in _fenced(path) if s.language in languages or not languages]


def _fenced(document: Path) -> list[Snippet]:
    text = document.read_text()
    return [
        Snippet(document, text[: found.start()].count("\n") + 1, *found.groups()) for found in _FENCE.finditer(text)
    ]
