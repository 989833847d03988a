"""Writes the reference pages that are made from the code: `python -m tests.architecture.reference`."""

import inspect
from pathlib import Path

from nexar import errors
from nexar.config import Setting, settings
from tests.architecture.algorithms import algorithms
from tests.architecture.api import api
from tests.architecture.command_line import commands
from tests.architecture.sources import ROOT
from tests.architecture.wire_format import wire_format

FOLDER = ROOT / "docs" / "reference"
_MADE = "<!-- Made from the code by `python -m tests.architecture.reference`; a test compares. -->"

_SETTINGS = f"""# Settings

{_MADE}

Each is a variable of the environment; a field of `nexar.Config` and an argument of `nexar.init()`; or a line of the
TOML file that `NEXAR_CONFIG` names. Outside the environment its name has no `NEXAR_` and no `_SECS` and is in lower
case: `NEXAR_COLLECTIVE_TIMEOUT_SECS=5` is `nexar.init(collective_timeout=5)`, and `collective_timeout = 5` in the file.
Arguments win over variables, and these over the file. `nexar config` shows what is in force and where it came from.
"""
_ERRORS = f"""# Errors

{_MADE}

All are `nexar.NexarError`, and reached as `nexar.NAME`. The message says who, what and the remedy; the same facts are
attributes.
"""


def pages() -> dict[Path, str]:
    """Each page, and what it has to hold."""
    return {
        FOLDER / "algorithms.md": algorithms((FOLDER / "algorithms.md").read_text()),
        FOLDER / "api.md": api(_MADE),
        FOLDER / "cli.md": commands(_MADE),
        FOLDER / "configuration.md": configuration(),
        FOLDER / "errors.md": error_tree(),
        FOLDER / "wire-format.md": wire_format(_MADE),
    }


def configuration() -> str:
    """Every setting."""
    rows = [f"| `{s.variable}` | {_shown(s)} | {_cell(s.kind.allowed)} | {_cell(_doc(s))} |" for s in settings()]
    return "\n".join([_SETTINGS, "| Variable | Default | Allowed | What for |", "|---|---|---|---|", *rows, ""])


def error_tree() -> str:
    """Every error, below the one it is a kind of."""
    return "\n".join([_ERRORS, *_branch(errors.NexarError, 0), ""])


def _branch(kind: type, depth: int) -> list[str]:
    facts = [name for name in inspect.get_annotations(kind) if not name.startswith("_")]
    attributes = f" ({', '.join(f'`{name}`' for name in facts)})" if facts else ""
    first = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    lines = [f"{'  ' * depth}- **{kind.__name__}**{attributes}: {first}"]
    ours = [below for below in kind.__subclasses__() if below.__module__.startswith("nexar.errors")]
    for below in sorted(ours, key=lambda each: each.__name__):
        lines += _branch(below, depth + 1)
    return lines


def _doc(setting: Setting) -> str:
    return f"{setting.doc} Must be the same on every rank." if setting.same_on_all_ranks else setting.doc


def _shown(setting: Setting) -> str:
    default = setting.default
    if default is None:
        return "–"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int | float):
        return f"{default:.10g} {setting.unit}".rstrip()
    return ",".join(default) if isinstance(default, tuple) else str(default)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)
