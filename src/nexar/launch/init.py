"""SIGUSR1 makes the flight recorder write what this process is doing.

`init()` and `connect()`: from the environment of this process, or from a ticket, to a communicator.
"""

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
from nexar.launch.entry import ByFile, ByRankZero, ByTicket, ByToken, Entry, choose_entry
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
    """From now on, unless SIGUSR1 means something already. Handlers are set in the main thread only: elsewhere nothing
    happens. To be called before a node is opened: that sees to it that a blocked call does not keep the signal waiting.
    """
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _dump_handler())


def _dump_handler() -> _Handler:
    """A launcher asks all its ranks: who has nothing to tell goes on."""
    return partial(_dump, os.getpid() if MARK_VARIABLE in inherited() else 0)


def _dump(launched: int, number: int, _frame: FrameType | None) -> None:
    """Where no communicator is open, also in a forked child, the signal does what it would do without us; but for the
    process that a launcher has `launched`.
    """
    from nexar.collectives.flight_recorder import dump_all  # noqa: PLC0415  # loaded by whoever has a communicator

    if not dump_all("SIGUSR1") and os.getpid() != launched:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


_log = logging.getLogger(__name__)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _with_short_traceback(join: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Errors come out without the way they took through our code: everything there is to know is in their message, and
    the traceback of an uncaught one ends with the caller's own line. Bugs of ours come whole.
    """

    @wraps(join)
    def joined(*arguments: _Arguments.args, **more: _Arguments.kwargs) -> _Result:
        try:
            return join(*arguments, **more)
        except InternalError:
            raise
        except NexarError as error:
            _log.debug("this is where it came from", exc_info=error)
            raise error.with_traceback(None) from None

    return joined


@_with_short_traceback
def init(config: Config | None = None, **settings: Any) -> Communicator:
    """Join the cluster this process was started for, and return when everybody is there.

    In a process started by `nexar run`, torchrun, srun, mpiexec or a Kubernetes indexed job, or with a ticket (or the
    seed's address and the token) in its environment. `settings` are fields of `Config` and win over `config`, which
    wins over the environment; a field of `config` that has its default counts as not given. ConfigError or UsageError
    with the remedy if nothing says how to come in; JoinRefused, SeedUnreachable or FormationTimeout if that fails. The
    caller closes the communicator; one that is still open at interpreter exit is closed then, within 5 s.
    """
    from nexar.cluster.wait_notice import tell_on_stderr  # noqa: PLC0415
    from nexar.launch.create import join_cluster, tells_for_host  # noqa: PLC0415  # wrong settings are refused without it

    chosen = choose_config(config, settings)
    take_ticket()
    start = detect(inherited())
    entry = choose_entry(start, chosen, os.getppid())
    rank, size = (None, None) if start is None else (start.rank, start.size)
    launcher = UNKNOWN_NODE if start is None else start.launcher
    install_dump_handler()
    report_at_exit()
    local_rank = None if start is None else start.local_rank
    with open_entry(entry, chosen, tell_on_stderr if tells_for_host(local_rank) else None) as invitation:
        return join_cluster(chosen, invitation, rank=rank, launcher=launcher, size=size, local_rank=local_rank)


@_with_short_traceback
def connect(ticket: str, config: Config | None = None, **settings: Any) -> Communicator:
    """Join the cluster of a ticket, whoever started this process; the seed gives the rank. Errors as for `init`."""
    from nexar.launch.create import join_cluster  # noqa: PLC0415  # a wrong ticket is refused without it

    invitation, chosen = parse_ticket(ticket), choose_config(config, settings)
    install_dump_handler()
    report_at_exit()
    return join_cluster(chosen, invitation)


def choose_config(config: Config | None, settings: dict[str, Any]) -> Config:
    """The settings in force: arguments before `config` before the environment. ConfigError, UsageError."""
    if config is not None and not isinstance(config, Config):
        raise UsageError(
            f"config is a nexar.Config, not a {type(config).__name__}; settings are given by name, "
            "a ticket to nexar.connect()"
        )
    given = {} if config is None else changed_settings(config)
    return effective({**given, **settings}).config


@contextmanager
def open_entry(entry: Entry, config: Config, tell: Callable[[str], None] | None = None) -> Iterator[Invitation]:
    """What the door means; kept open until the block ends, where this rank opened it. Errors as for `init`. `tell`
    shows the user what is waited for.
    """
    if isinstance(entry, ByTicket):
        yield parse_ticket(entry.ticket)
    elif isinstance(entry, ByToken):
        yield invitation_from_token(entry.token, [entry.address])
    elif isinstance(entry, ByRankZero):
        with _open_rank_zero(entry, config) as invitation:
            yield invitation
    elif entry.opens:
        with _open_ticket_file(entry, config) as invitation:
            yield invitation
    else:
        yield parse_ticket(wait_for_ticket(entry.name, config.formation_timeout, tell))


@contextmanager
def _open_rank_zero(entry: ByRankZero, config: Config) -> Iterator[Invitation]:
    invitation = invitation_from_token(entry.token, [format_address(entry.host, entry.port)])
    if not entry.opens:
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
