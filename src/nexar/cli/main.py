"""The command `nexar`.

Help is plain text: rich is slow to import, and a launcher should have started its children by then.
"""

import typer

from nexar.cli.config import config
from nexar.cli.doctor.command import doctor
from nexar.cli.run import run
from nexar.cli.seed import seed

app = typer.Typer(
    name="nexar", rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False, no_args_is_help=True
)
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(seed)
app.command()(config)
app.command()(doctor)


@app.callback()
def _nexar() -> None:
    """Processes on one or many machines become one encrypted cluster."""


def main() -> None:
    """The console script."""
    app(prog_name="nexar")
