"""`nexar seed`: opens a cluster, and serves it until every member has left."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from nexar.cli.cluster_options import (
    Elastic,
    Least,
    Most,
    PageAt,
    check_elastic,
    elastic_settings,
    page_address,
    shown_cluster,
    ticket_in,
)
from nexar.cli.exit_codes import GOOD, exit_code_of, print_message
from nexar.cli.progress_bar import counting
from nexar.config import Config
from nexar.environment import effective, inherited
from nexar.errors import ConfigError
from nexar.launch.plan import without_outer_launch

if TYPE_CHECKING:
    from nexar.cluster.decisions.admission_events import SeedEvent
    from nexar.cluster.seed import SeedService

_POLL_INTERVAL: Final = 0.5  # seconds until a signal is handled that another thread received
_LAUNCHERS_TIMEOUT: Final = 10.0  # seconds for the launchers to agree on the rank that failed


def seed(
    *,
    size: Annotated[int, typer.Option(help="Number of members of the cluster.")],
    listen: Annotated[str | None, typer.Option(help="HOST:PORT to listen on, UDP and TCP; port 0: any.")] = None,
    ticket_file: Annotated[
        Path | None, typer.Option(help="Write the ticket to a file (0600), not to stdout; removed at the end.")
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Keep the cluster's identity here across restarts.")] = None,
    elastic: Elastic = False,
    least: Least = None,
    most: Most = None,
    page: PageAt = None,
) -> None:
    """Let ranks join a cluster. Ends when every member has left; with --elastic, when it is stopped."""

    def action() -> int:
        from nexar.cluster.seed import SeedService  # noqa: PLC0415  # wrong options are rejected without loading it

        given = elastic_settings(elastic=elastic, least=least, most=most)
        config = effective(given, without_outer_launch(inherited())).config
        check_elastic(config, least=least, most=most)
        address = page_address(page)
        if size < 1:
            raise ConfigError(variable="--size", value=size, allowed="a whole number, 1 or more")
        with (
            SeedService(listen, size, config=config, state_dir=state_dir, on_event=_announce) as service,
            _publish_ticket(service, size, config, ticket_file, keep=state_dir is not None),
            shown_cluster(service, address),
        ):
            _wait_for_end(service, size, config)
        return GOOD

    raise typer.Exit(exit_code_of(action))


@contextmanager
def _publish_ticket(
    service: "SeedService", size: int, config: Config, ticket_file: Path | None, *, keep: bool
) -> Iterator[None]:
    """Report the address; write the ticket to the file or else to standard output, but not with a token. `keep`: the
    file outlives the seed, as the cluster does.
    """
    with nullcontext() if ticket_file is None else ticket_in(ticket_file, service.ticket, keep=keep):
        if ticket_file is None and config.cluster_token is None:
            print(service.ticket, flush=True)
        limit = f"{config.formation_timeout:g} s at most"
        print_message(f"the seed listens at {service.address} and waits for {size} members, {limit}")
        yield


def _announce(event: "SeedEvent") -> None:
    """Reports only launchers; ranks would be too many."""
    if event.kind == "reserved":
        print_message(f"a launcher at {event.address} has {event.reason}")


def _wait_for_end(service: "SeedService", size: int, config: Config) -> None:
    with counting("members", size, lambda: service.board().joined):
        service.wait_formed()  # the seed keeps the formation timeout, and notifies every joiner first
    print_message(f"the cluster has formed with {size} members")
    while config.elastic_enabled:  # nodes may join after all have left: it ends when it is stopped
        time.sleep(_POLL_INTERVAL)
    service.wait_empty()
    print_message("every member has left")
    service.wait_launchers(_LAUNCHERS_TIMEOUT)
