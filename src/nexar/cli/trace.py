"""`nexar trace`: analyses flight recorder dumps and merges traces."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nexar.cli.exit_codes import FAILED, GOOD, exit_code_of

trace = typer.Typer(name="trace", rich_markup_mode=None, no_args_is_help=True, help="Analyse what ranks were doing.")


@trace.callback()
def _trace() -> None:
    """Otherwise a single command would replace `trace` itself."""


@trace.command()
def analyze(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory with the dumps of all ranks.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read the dumps of all ranks and report which ranks diverged, and where.

    Exit status: 0 if none did, 1 if one did, 2 if there is nothing to read.
    """

    def action() -> int:
        from nexar.observe.dump_analysis import analyse, read_dumps  # noqa: PLC0415  # imports numpy

        found = read_dumps(directory)
        findings = analyse(found.dumps)
        facts = {
            "dumps": len(found.dumps),
            "ranks": sorted({dump.rank for dump in found.dumps}),
            "unreadable": found.unreadable,
            "findings": [asdict(finding) for finding in findings],
        }
        print(json.dumps(facts, indent=2) if as_json else _page(facts))
        return FAILED if findings else GOOD

    raise typer.Exit(exit_code_of(action))


@trace.command("merge")
def merge_parts(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="The NEXAR_TRACE_DIR of every host.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="File to write the trace to.")],
) -> None:
    """Merge the parts that the ranks wrote into one trace: for runs on several hosts, or by other launchers.

    Exit status: 0 if the trace was written, 1 if no rank has written a part.
    """

    def action() -> int:
        from nexar.cli.run import merge  # noqa: PLC0415

        return GOOD if merge(directories, output) else FAILED

    raise typer.Exit(exit_code_of(action))


def _page(facts: dict[str, object]) -> str:
    ranks, findings, unreadable = facts["ranks"], facts["findings"], facts["unreadable"]
    assert isinstance(ranks, list)
    assert isinstance(findings, list)
    assert isinstance(unreadable, dict)
    lines = [f"{facts['dumps']} dumps of {len(ranks)} ranks"]
    lines += [f"cannot read {name}: {reason}" for name, reason in unreadable.items()]
    lines += [_line(finding) for finding in findings] or ["no rank diverged: none is stuck in a call or missing"]
    return "\n".join(lines)


def _line(finding: dict[str, object]) -> str:
    communicator = finding["communicator"]
    where = f"communicator {communicator}: " if communicator else ""  # the first communicator needs no name
    return f"- {where}{finding['text']}"
