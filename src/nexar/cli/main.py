"""The command `nexar`.

Help is plain text: rich is slow to import.
"""

import os
import sys
from typing import Annotated, Final

import typer

from nexar.cli.bench.command import bench
from nexar.cli.config import config
from nexar.cli.doctor.command import doctor
from nexar.cli.run import run
from nexar.cli.seed import seed
from nexar.cli.status import status, top
from nexar.cli.trace import trace

_STREAMS: Final = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""By descriptor: the name in `sys`, and the mode."""


def open_closed_streams() -> None:
    """Open the null device for standard streams closed at start. Otherwise the next opened file gets such a descriptor,
    and a rank would read a launcher's pipe as its standard input.
    """
    for descriptor, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            _open_null(descriptor)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def _open_null(descriptor: int) -> None:
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != descriptor:
        os.dup2(opened, descriptor)
        os.close(opened)
    os.set_inheritable(descriptor, True)


app = typer.Typer(
    name="nexar", rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False, no_args_is_help=True
)
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(seed)
app.command()(status)
app.command()(top)
app.command()(config)
app.command()(doctor)
app.command()(bench)
app.add_typer(trace)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version  # noqa: PLC0415 - slow to import, and seldom needed

        print(f"nexar {version('nexar')}")
        raise typer.Exit


@app.callback()
def _nexar(
    *,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Processes on one or many machines become one encrypted cluster."""


def main() -> None:
    """The console script."""
    open_closed_streams()
    app(prog_name="nexar")
