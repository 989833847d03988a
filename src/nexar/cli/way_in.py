"""The options that let a process into a cluster that exists: a ticket, a file with one, or the seed's address."""

from pathlib import Path
from typing import Annotated

import typer

from nexar.errors import UsageError
from nexar.security.storage import read_secret_file, write_secret_file

Ticket = Annotated[str | None, typer.Option(help="Join the cluster of this ticket.", show_default=False)]
TicketFile = Annotated[Path | None, typer.Option(help="Read the ticket from a file (0600).")]


def way_in(ticket: str | None, ticket_file: Path | None, seed: str | None = None) -> dict[str, object]:
    """The setting that one of the three options stands for. What was given here replaces what is in the environment.

    UsageError for two ways at once, and for a file that cannot be read.
    """
    given = [option for option in (ticket, ticket_file, seed) if option is not None]
    if len(given) > 1:
        raise UsageError("--ticket, --ticket-file and --seed are different ways in: give one of them")
    if ticket_file is not None:
        ticket = _read_ticket(ticket_file)
    if ticket is not None:
        return {"ticket": ticket, "seed": None}
    return {} if seed is None else {"seed": seed, "ticket": None}


def _read_ticket(path: Path) -> str:
    try:
        return read_secret_file(path).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text"
        raise UsageError(f"--ticket-file {path} cannot be read: {reason}") from error


def write_ticket(path: Path, ticket: str) -> None:
    """To a file that only its owner can read (0600). UsageError if that cannot be."""
    try:
        write_secret_file(path, f"{ticket}\n".encode())
    except OSError as error:
        raise UsageError(f"--ticket-file {path} cannot be written: {error.strerror}") from error
