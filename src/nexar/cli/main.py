"""The command `nexar`.

Help is plain text: rich is slow to import, and a launcher should have started its children by then.
"""

from typing import Annotated

import typer

from nexar.cli.bench.command import bench
from nexar.cli.config import config
from nexar.cli.doctor.command import doctor
from nexar.cli.run import run
from nexar.cli.seed import seed
from nexar.cli.standard_streams import open_closed_streams
from nexar.cli.status import status
from nexar.cli.top import top
from nexar.cli.trace import trace

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
        from importlib.metadata import version  # noqa: PLC0415 - slow to import, and seldom asked for

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
