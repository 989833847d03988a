"""The page of the commands: arguments, options and texts as they are written in the code."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from nexar.cli.main import app

_INTRODUCTION = """Each command says the same of itself with `--help`; `python -m nexar` is another way to call it. What
`nexar run` is to start, and all that follows, is passed on as it is: its own options come first. Settings that have no
option are [variables](configuration.md)."""


def commands(made: str) -> str:
    """The whole page. `made` says where it comes from."""
    whole: Any = typer.main.get_command(app)
    parts = ["# Commands", made, _INTRODUCTION, *_described("nexar", whole)]
    return "\n\n".join(parts) + "\n"


def _described(name: str, command: Any) -> Iterator[str]:
    """A command, then those below it."""
    below = getattr(command, "commands", {})
    yield f"## {name}"
    yield f"```text\n{_usage(name, command, below)}\n```"
    yield _text(command.help)
    rows = [_row(each) for each in command.params if not each.hidden]
    if rows:
        yield "\n".join(["| | Default | What for |", "|---|---|---|", *rows])
    for word, each in below.items():
        yield from _described(f"{name} {word}", each)


def _usage(name: str, command: Any, below: dict[str, Any]) -> str:
    if below:
        return f"{name} COMMAND"
    words = [_argument(each) for each in command.params if not _is_option(each)]
    options = ["[OPTIONS]"] if any(_is_option(each) for each in command.params) else []
    return " ".join([name, *options, *words])


def _argument(parameter: Any) -> str:
    word = f"{parameter.metavar or parameter.name.upper()}{'...' if parameter.nargs == -1 else ''}"
    return word if parameter.required else f"[{word}]"


def _row(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts] if _is_option(parameter) else [_argument(parameter)]
    shown = ", ".join(f"`{name}`" for name in names)
    default = parameter.default
    stated = isinstance(default, int | float | str | Path) and not isinstance(default, bool) and default != ""
    return f"| {shown} | {default if stated else '–'} | {_text(parameter.help).replace('|', chr(92) + '|')} |"


def _is_option(parameter: Any) -> bool:
    return any(name.startswith("-") for name in parameter.opts)


def _text(text: str | None) -> str:
    """As Markdown: angle brackets are no tags, a lone star is no emphasis. `\\b` is for terminals."""
    return re.sub(r"([<*])", r"\\\1", inspect.cleandoc((text or "").replace("\b", "")))
