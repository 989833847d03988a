"""The options that let a process into a cluster that exists: a ticket, a file with one, or the seed's address.

Options that stand for settings: what several commands take, and how children are told.

What a command that opens a cluster shows of it to others: a page for browsers, and the ticket for who is to look.

What the commands share that look at a running cluster: the way to its seed.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from nexar.cli.exit_codes import fail_with
from nexar.config import Config, settings
from nexar.environment import effective
from nexar.errors import ConfigError, SeedUnreachable, UsageError
from nexar.launch.entry import needed_token
from nexar.security.storage import read_secret_file, write_secret_file
from nexar.transport.address import parse_address

if TYPE_CHECKING:
    from nexar.cluster.seed import SeedService
    from nexar.cluster.seed_session import ObserverSession
    from nexar.security.invitation import Invitation


Ticket = Annotated[str | None, typer.Option(help="Join the cluster of this ticket.", show_default=False)]
TicketFile = Annotated[Path | None, typer.Option(help="Read the ticket from a file (0600); waits until it is there.")]
NO_ENTRY: Final = {"ticket": None, "seed": None}
"""Settings that leave out every way in that the environment knows."""

_POLL_INTERVAL = 0.05


def entry_options(
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
        return {**NO_ENTRY, "ticket": ticket}
    return {} if seed is None else {**NO_ENTRY, "seed": seed}


def appears(path: Path, patience: float) -> bool:
    """Return when the file is there, or when it is time to say that it is not. Files with tickets appear whole."""
    if path.exists() or patience <= 0:
        return path.exists()
    fail_with(f"waiting for the ticket in {path}, {patience:g} s at most; whoever opens the cluster writes it")
    deadline = time.monotonic() + patience
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL)
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


Elastic = Annotated[bool, typer.Option("--elastic", help="Admit nodes after the cluster has formed.")]
Least = Annotated[int | None, typer.Option("--min", help="With fewer members a checkpoint waits for more.")]
Most = Annotated[int | None, typer.Option("--max", help="More members than this are refused.")]


def elastic_settings(*, elastic: bool, least: int | None, most: int | None) -> dict[str, object]:
    """The settings that the three options stand for; those that were not given are left out."""
    given = {
        "elastic_enabled": elastic or None,
        "elastic_min_world_size": least,
        "elastic_max_world_size": most,
    }
    return {name: value for name, value in given.items() if value is not None}


def check_elastic(config: Config, *, least: int | None, most: int | None) -> None:
    """ConfigError for an option that would mean nothing: a cluster that is not elastic has one size."""
    for option, value in (("--min", least), ("--max", most)):
        if value is not None and not config.elastic_enabled:
            raise ConfigError(variable=option, value=value, allowed="only in an elastic cluster", hint="give --elastic")


def as_variables(given: Mapping[str, object]) -> dict[str, str]:
    """The same settings as variables, for children."""
    names = {setting.name: setting.variable for setting in settings()}
    return {names[name]: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()}


PageAt = Annotated[
    str | None,
    typer.Option(
        "--page", metavar="[HOST:]PORT", help="Serve a page that shows the ranks; without HOST: to this host."
    ),
]
WriteTicket = Annotated[
    Path | None, typer.Option(help="Write the ticket to a file (0600), for nexar status and top; removed at the end.")
]
_HERE = "127.0.0.1"


def page_address(text: str | None) -> tuple[str, int] | None:
    """Where the option says that the page is to be. ConfigError."""
    if text is None:
        return None
    try:
        host, _, port = text.rpartition(":")
        return parse_address(f"{host or _HERE}:{port}")  # elsewhere `:80` is every interface
    except (UsageError, ValueError):
        raise ConfigError(variable="--page", value=text, allowed="HOST:PORT or a port; port 0: any") from None


@contextmanager
def shown_cluster(door: SeedService, place: tuple[str, int] | None, write_ticket: Path | None = None) -> Iterator[None]:
    """The page is there, and the ticket in its file, for as long as the block takes. UsageError."""
    with ExitStack() as stack:
        if write_ticket is not None:
            stack.enter_context(ticket_in(write_ticket, door.ticket))
        if place is not None:
            from nexar.observe.page import StatusWebPage  # noqa: PLC0415  # only who wants one pays for it
            from nexar.security.invitation import parse_ticket  # noqa: PLC0415

            page = stack.enter_context(StatusWebPage(door.board, parse_ticket(door.ticket).secret, *place))
            fail_with(f"the page of this cluster is at {page.url}")
            if not _is_here(place[0]):
                fail_with("warning: the page is not encrypted; who listens on that network sees it, and its address")
        yield


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_NO_SEED = (
    "nothing says which cluster to look at: give --ticket or --ticket-file, or set NEXAR_TICKET; `nexar seed` prints a "
    "ticket, and `nexar run --write-ticket FILE` writes one"
)


_USUAL: Final = 10.0
"""Seconds that a seed has which is there, and busy."""
_LONGEST: Final = 1e9  # seconds, as of settings


def observer_session(
    ticket: str | None, ticket_file: Path | None, seed: str | None, *, timeout: float | None
) -> ObserverSession:
    """A line to the seed of that cluster; the caller closes it. UsageError, ConfigError, JoinRefused, SeedUnreachable.

    `timeout`: so long the file and the seed are waited for. None: a seed that is there has some seconds to answer, but
    where there is no file, or nobody listens, that is said at once.
    """
    from nexar.cluster.seed_session import ObserverSession  # noqa: PLC0415  # after the options made sense

    if timeout is not None and not 0 <= timeout <= _LONGEST:  # nor what is no number: it is in no order
        raise ConfigError(variable="--timeout", value=str(timeout), allowed=f"seconds, 0 to {_LONGEST:g}")
    if ticket_file is not None and not appears(ticket_file, timeout or 0.0):
        raise UsageError(
            f"there is no ticket in {ticket_file}: the run that wrote it has ended and taken it away, or is yet to "
            "write it; start it, or wait for it longer (--timeout)"
        )
    config = effective(entry_options(ticket, ticket_file, seed)).config
    try:
        return ObserverSession(_invitation(config), config, timeout=timeout or _USUAL, hurry=timeout is None)
    except SeedUnreachable as gone:
        if gone.timeout is None:
            raise  # somebody answers there
        raise SeedUnreachable(
            addresses=gone.addresses,
            attempts=gone.attempts,
            cause=gone.cause,
            timeout=gone.timeout,
            remedy=_remedy(ticket_file),
        ) from gone


def _invitation(config: Config) -> Invitation:
    from nexar.security.invitation import invitation_from_token, parse_ticket  # noqa: PLC0415

    if config.ticket is not None:
        return parse_ticket(config.ticket)
    if config.seed is None:
        raise UsageError(_NO_SEED)
    return invitation_from_token(needed_token(config, "NEXAR_SEED"), [config.seed])


def _remedy(ticket_file: Path | None) -> str:
    written = "" if ticket_file is None else f" whose ticket was written to {ticket_file} at {_written(ticket_file)}"
    return (
        f"the cluster{written} has ended, or its members go on without the seed: start it again (`nexar seed "
        "--state-dir` with the directory of before), or give the ticket of one that runs; if it does run, its port "
        "must be open for TCP and UDP"
    )


def _written(path: Path) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
    except OSError:  # taken away since it was read
        return "a time that is gone with it"
