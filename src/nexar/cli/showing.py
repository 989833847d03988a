"""What a command that opens a cluster shows of it to others: a page for browsers, and the ticket for who is to look."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nexar.cli.ending import complain
from nexar.cli.way_in import ticket_in
from nexar.errors import ConfigError, UsageError
from nexar.transport.address import parse_address

if TYPE_CHECKING:
    from nexar.cluster.seed import Seed

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


def page_place(text: str | None) -> tuple[str, int] | None:
    """Where the option says that the page is to be. ConfigError."""
    if text is None:
        return None
    try:
        host, _, port = text.rpartition(":")
        return parse_address(f"{host or _HERE}:{port}")  # elsewhere `:80` is every interface
    except (UsageError, ValueError):
        raise ConfigError(variable="--page", value=text, allowed="HOST:PORT or a port; port 0: any") from None


@contextmanager
def shown(door: Seed, place: tuple[str, int] | None, write_ticket: Path | None = None) -> Iterator[None]:
    """The page is there, and the ticket in its file, for as long as the block takes. UsageError."""
    with ExitStack() as stack:
        if write_ticket is not None:
            stack.enter_context(ticket_in(write_ticket, door.ticket))
        if place is not None:
            from nexar.observe.page import Page  # noqa: PLC0415  # only who wants one pays for it
            from nexar.security.join_ticket import parse_ticket  # noqa: PLC0415

            page = stack.enter_context(Page(door.board, parse_ticket(door.ticket).secret, *place))
            complain(f"the page of this cluster is at {page.url}")
            if not _is_here(place[0]):
                complain("warning: the page is not encrypted; who listens on that network sees it, and its address")
        yield


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
