"""Options that several commands share."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from nexar.cli.exit_codes import print_message
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
"""Settings that override every invitation in the environment."""

_POLL_INTERVAL = 0.05


def entry_options(
    ticket: str | None, ticket_file: Path | None, seed: str | None = None, *, file_timeout: float = 0.0
) -> dict[str, object]:
    """Return the setting of the given option, which overrides the environment. Waits at most `file_timeout` seconds for
    the file, because its seed may be starting. Raises UsageError.
    """
    given = [option for option in (ticket, ticket_file, seed) if option is not None]
    if len(given) > 1:
        raise UsageError("--ticket, --ticket-file and --seed exclude one another: give one of them")
    if ticket_file is not None:
        appears(ticket_file, file_timeout)
        ticket = _read_ticket(ticket_file)
    if ticket is not None:
        return {**NO_ENTRY, "ticket": ticket}
    return {} if seed is None else {**NO_ENTRY, "seed": seed}


def appears(path: Path, file_timeout: float) -> bool:
    """Wait at most `file_timeout` seconds for the file. Ticket files appear whole."""
    if path.exists() or file_timeout <= 0:
        return path.exists()
    print_message(
        f"waiting for the ticket in {path}, {file_timeout:g} s at most; the process that opens the cluster writes it"
    )
    deadline = time.monotonic() + file_timeout
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
    """Write the ticket to a file (0600); remove it after the block unless `keep` or it was replaced. Raises
    UsageError.
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
    with suppress(OSError, UsageError):  # gone, or replaced: then it must not be removed
        if read_secret_file(path) == content:
            path.unlink()


Elastic = Annotated[bool, typer.Option("--elastic", help="Admit nodes after the cluster has formed.")]
Least = Annotated[int | None, typer.Option("--min", help="With fewer members a checkpoint waits for more.")]
Most = Annotated[int | None, typer.Option("--max", help="Reject members above this number.")]


def elastic_settings(*, elastic: bool, least: int | None, most: int | None) -> dict[str, object]:
    """Return only the options that were given."""
    given = {
        "elastic_enabled": elastic or None,
        "elastic_min_world_size": least,
        "elastic_max_world_size": most,
    }
    return {name: value for name, value in given.items() if value is not None}


def check_elastic(config: Config, *, least: int | None, most: int | None) -> None:
    """Raise ConfigError for an option that has no effect."""
    for option, value in (("--min", least), ("--max", most)):
        if value is not None and not config.elastic_enabled:
            raise ConfigError(variable=option, value=value, allowed="only in an elastic cluster", hint="give --elastic")


def as_variables(given: Mapping[str, object]) -> dict[str, str]:
    """Return environment variables for children."""
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
_LOOPBACK = "127.0.0.1"


def page_address(text: str | None) -> tuple[str, int] | None:
    """Raises ConfigError if malformed."""
    if text is None:
        return None
    try:
        host, _, port = text.rpartition(":")
        return parse_address(f"{host or _LOOPBACK}:{port}")  # elsewhere `:80` means every interface
    except (UsageError, ValueError):
        raise ConfigError(variable="--page", value=text, allowed="HOST:PORT or a port; port 0: any") from None


@contextmanager
def shown_cluster(
    service: SeedService, address: tuple[str, int] | None, write_ticket: Path | None = None
) -> Iterator[None]:
    """Page and ticket file exist until the block ends. Raises UsageError."""
    with ExitStack() as stack:
        if write_ticket is not None:
            stack.enter_context(ticket_in(write_ticket, service.ticket))
        if address is not None:
            from nexar.observe.page import StatusWebPage  # noqa: PLC0415  # loaded only if a page is requested
            from nexar.security.invitation import parse_ticket  # noqa: PLC0415

            page = stack.enter_context(StatusWebPage(service.board, parse_ticket(service.ticket).secret, *address))
            print_message(f"the page of this cluster is at {page.url}")
            if not _is_loopback(address[0]):
                print_message("warning: the page is not encrypted; others on that network can read it and its address")
        yield


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_NO_SEED = (
    "no cluster was named: give --ticket or --ticket-file, or set NEXAR_TICKET; `nexar seed` prints a "
    "ticket, and `nexar run --write-ticket FILE` writes one"
)


_SEED_TIMEOUT: Final = 10.0
"""Seconds for a busy seed to answer."""
_LONGEST: Final = 1e9  # seconds, as in the settings


def observer_session(
    ticket: str | None, ticket_file: Path | None, seed: str | None, *, timeout: float | None
) -> ObserverSession:
    """Return a session, which the caller closes. Raises UsageError, ConfigError, JoinRefused, SeedUnreachable.

    `timeout` is for the file and the seed. None: a missing file or closed port fails at once; a listening seed has some
    seconds.
    """
    from nexar.cluster.seed_session import ObserverSession  # noqa: PLC0415  # wrong options are rejected without loading it

    if timeout is not None and not 0 <= timeout <= _LONGEST:  # rejects NaN too
        raise ConfigError(variable="--timeout", value=str(timeout), allowed=f"seconds, 0 to {_LONGEST:g}")
    if ticket_file is not None and not appears(ticket_file, timeout or 0.0):
        raise UsageError(
            f"no ticket in {ticket_file}: the run that wrote it has ended, or has not written it yet; "
            "start the run, or wait longer (--timeout)"
        )
    config = effective(entry_options(ticket, ticket_file, seed)).config
    try:
        return ObserverSession(_invitation(config), config, timeout=timeout or _SEED_TIMEOUT, hurry=timeout is None)
    except SeedUnreachable as gone:
        if gone.timeout is None:
            raise  # the seed answered
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
        f"the cluster{written} has ended, or its members continue without the seed: restart the seed (`nexar seed "
        "--state-dir` with the same directory), or give the ticket of a running cluster; if the seed runs, its port "
        "must be open for TCP and UDP"
    )


def _written(path: Path) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
    except OSError:  # removed since it was read
        return "an unknown time"
