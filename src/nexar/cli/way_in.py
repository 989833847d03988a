"""The options that let a process into a cluster that exists: a ticket, a file with one, or the seed's address."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final

import typer

from nexar.cli.ending import complain
from nexar.errors import UsageError
from nexar.security.storage import read_secret_file, write_secret_file

Ticket = Annotated[str | None, typer.Option(help="Join the cluster of this ticket.", show_default=False)]
TicketFile = Annotated[Path | None, typer.Option(help="Read the ticket from a file (0600); waits until it is there.")]
NO_WAY_IN: Final = {"ticket": None, "seed": None}
"""Settings that leave out every way in that the environment knows."""

_LOOK_INTERVAL = 0.05


def way_in(
    ticket: str | None, ticket_file: Path | None, seed: str | None = None, *, patience: float = 0.0
) -> dict[str, object]:
    """The setting that one of the three options stands for. What was given here replaces what is in the environment.

    A file that is not there is waited for, at most `patience` seconds: its seed may have been started a moment ago, and
    one that does not answer yet is waited for too. UsageError for two ways at once, and for a file that cannot be read.
    """
    given = [option for option in (ticket, ticket_file, seed) if option is not None]
    if len(given) > 1:
        raise UsageError("--ticket, --ticket-file and --seed are different ways in: give one of them")
    if ticket_file is not None:
        appears(ticket_file, patience)
        ticket = _read_ticket(ticket_file)
    if ticket is not None:
        return {**NO_WAY_IN, "ticket": ticket}
    return {} if seed is None else {**NO_WAY_IN, "seed": seed}


def appears(path: Path, patience: float) -> bool:
    """Return when the file is there, or when it is time to say that it is not. Files with tickets appear whole."""
    if path.exists() or patience <= 0:
        return path.exists()
    complain(f"waiting for the ticket in {path}, {patience:g} s at most; whoever opens the cluster writes it")
    deadline = time.monotonic() + patience
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(_LOOK_INTERVAL)
    return path.exists()


def _read_ticket(path: Path) -> str:
    try:
        return read_secret_file(path).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text"
        remedy = "name the file that `nexar seed --ticket-file` or `nexar run --write-ticket` wrote, or a copy of it"
        raise UsageError(f"--ticket-file {path} cannot be read: {reason}; {remedy}") from error


@contextmanager
def ticket_in(path: Path, ticket: str, *, keep: bool = False) -> Iterator[None]:
    """The ticket is in a file that only its owner can read (0600) for as long as the block takes.

    Then it opens nothing any more, and who comes next must not take it for a new one; so it is removed, unless `keep`,
    or unless somebody else has put another one there. UsageError if it cannot be written.
    """
    content = f"{ticket}\n".encode()
    try:
        write_secret_file(path, content)
    except OSError as error:
        raise UsageError(f"--ticket-file {path} cannot be written: {error.strerror}") from error
    try:
        yield
    finally:
        if not keep:
            _remove(path, content)


def _remove(path: Path, content: bytes) -> None:
    with suppress(OSError, UsageError):  # gone, or no file of ours any more: then it is not ours to remove
        if read_secret_file(path) == content:
            path.unlink()
