"""`init()` and `connect()`: join a cluster from the environment of this process, or from a ticket."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

from nexar.config import Config
from nexar.environment import effective, inherited, take_ticket
from nexar.errors import InternalError, NexarError, UsageError
from nexar.launch.detect import detect
from nexar.launch.entry import ByFile, BySeedOfRankZero, ByTicket, ByToken, Entry, choose_entry
from nexar.launch.exit_report import report_at_exit
from nexar.launch.plan import MARK_VARIABLE
from nexar.launch.seed_process import SeedProcess, changed_settings, offered_ticket, wait_for_ticket
from nexar.security.invitation import Invitation, invitation_from_token, parse_ticket
from nexar.transport.address import format_address
from nexar.types import UNKNOWN_NODE

if TYPE_CHECKING:
    from nexar.communicator.communicator import Communicator


_Handler: TypeAlias = Callable[[int, FrameType | None], None]


def install_dump_handler() -> None:
    """Make SIGUSR1 dump the flight recorder, unless it has a handler or this is not the main thread. Call it before a
    node opens, so that a blocked call does not delay the signal.
    """
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _dump_handler())


def _dump_handler() -> _Handler:
    return partial(_dump, os.getpid() if MARK_VARIABLE in inherited() else 0)


def _dump(launched: int, number: int, _frame: FrameType | None) -> None:
    """Default action without a communicator, except in the process `launched`: a launcher signals all its ranks."""
    from nexar.collectives.flight_recorder import dump_all  # noqa: PLC0415  # already loaded if a communicator is open

    if not dump_all("SIGUSR1") and os.getpid() != launched:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


_log = logging.getLogger(__name__)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _with_short_traceback(join: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Drops nexar's frames, except from internal errors."""

    @wraps(join)
    def joined(*arguments: _Arguments.args, **more: _Arguments.kwargs) -> _Result:
        try:
            return join(*arguments, **more)
        except InternalError:
            raise
        except NexarError as error:
            _log.debug("traceback of the error", exc_info=error)
            raise error.with_traceback(None) from None

    return joined


@_with_short_traceback
def init(config: Config | None = None, **settings: Any) -> Communicator:
    """Join the cluster this process was started for; returns when all ranks have joined.

    The process was started by `nexar run`, torchrun, srun, mpiexec or a Kubernetes indexed job, or has a ticket (or
    the seed's address and the token) in its environment. `settings` are fields of `Config`; they override `config`,
    which overrides the environment. A default value in `config` counts as not given. Raises ConfigError or UsageError,
    with the remedy, if nothing tells how to join; JoinRefused, SeedUnreachable or FormationTimeout if joining fails.
    Close the communicator; an open one is closed at interpreter exit, within 5 s.
    """
    from nexar.cluster.wait_notice import tell_on_stderr  # noqa: PLC0415
    from nexar.launch.create import join_cluster, tells_for_host  # noqa: PLC0415  # wrong settings are rejected without loading it

    chosen = choose_config(config, settings)
    take_ticket()
    launch_info = detect(inherited())
    entry = choose_entry(launch_info, chosen, os.getppid())
    rank, size = (None, None) if launch_info is None else (launch_info.rank, launch_info.size)
    launcher = UNKNOWN_NODE if launch_info is None else launch_info.launcher
    install_dump_handler()
    report_at_exit()
    local_rank = None if launch_info is None else launch_info.local_rank
    with open_entry(entry, chosen, tell_on_stderr if tells_for_host(local_rank) else None) as invitation:
        return join_cluster(chosen, invitation, rank=rank, launcher=launcher, size=size, local_rank=local_rank)


@_with_short_traceback
def connect(ticket: str, config: Config | None = None, **settings: Any) -> Communicator:
    """Join the cluster of a ticket; the seed assigns the rank. Errors as for `init`."""
    from nexar.launch.create import join_cluster  # noqa: PLC0415  # a wrong ticket is rejected without loading it

    invitation, chosen = parse_ticket(ticket), choose_config(config, settings)
    install_dump_handler()
    report_at_exit()
    return join_cluster(chosen, invitation)


def choose_config(config: Config | None, settings: dict[str, Any]) -> Config:
    """Arguments override `config`, which overrides the environment. ConfigError, UsageError."""
    if config is not None and not isinstance(config, Config):
        raise UsageError(
            f"config must be a nexar.Config, not {type(config).__name__}; pass settings by name, "
            "and a ticket to nexar.connect()"
        )
    given = {} if config is None else changed_settings(config)
    return effective({**given, **settings}).config


@contextmanager
def open_entry(entry: Entry, config: Config, tell: Callable[[str], None] | None = None) -> Iterator[Invitation]:
    """A cluster opened here stays open until the block ends."""
    if isinstance(entry, ByTicket):
        yield parse_ticket(entry.ticket)
    elif isinstance(entry, ByToken):
        yield invitation_from_token(entry.token, [entry.address])
    elif isinstance(entry, BySeedOfRankZero):
        with _open_rank_zero(entry, config) as invitation:
            yield invitation
    elif entry.starts_seed:
        with _open_ticket_file(entry, config) as invitation:
            yield invitation
    else:
        yield parse_ticket(wait_for_ticket(entry.name, config.formation_timeout, tell))


@contextmanager
def _open_rank_zero(entry: BySeedOfRankZero, config: Config) -> Iterator[Invitation]:
    invitation = invitation_from_token(entry.token, [format_address(entry.host, entry.port)])
    if not entry.starts_seed:
        yield invitation
        return
    with SeedProcess(entry.size, f":{entry.port}", config, config.formation_timeout):
        yield invitation


@contextmanager
def _open_ticket_file(entry: ByFile, config: Config) -> Iterator[Invitation]:
    with (
        SeedProcess(entry.size, "127.0.0.1:0", config, config.formation_timeout) as seed,
        offered_ticket(entry.name, seed.ticket, seed.pid),
    ):
        yield parse_ticket(seed.ticket)
