"""`init()` and `connect()`: from the environment of this process, or from a ticket, to a communicator."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from nexar.config import Config
from nexar.environment import effective, inherited, take_ticket
from nexar.errors import InternalError, NexarError, UsageError
from nexar.launch.detect import detect
from nexar.launch.door import ByFile, ByMeeting, ByTicket, ByToken, Door, choose_door
from nexar.launch.dump_signal import listen
from nexar.launch.exit_report import report_at_exit
from nexar.launch.handover import offered, take
from nexar.launch.seed_process import SeedProcess
from nexar.launch.seed_terms import changed_settings
from nexar.security.invitation import Invitation, invitation_from_token
from nexar.security.join_ticket import parse_ticket
from nexar.transport.address import format_address
from nexar.types import UNKNOWN_NODE

if TYPE_CHECKING:
    from nexar.communicator.communicator import Communicator

_log = logging.getLogger(__name__)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _plainly(join: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
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


@_plainly
def init(config: Config | None = None, **settings: Any) -> Communicator:
    """Join the cluster this process was started for, and return when everybody is there.

    In a process started by `nexar run`, torchrun, srun, mpiexec or a Kubernetes indexed job, or with a ticket (or the
    seed's address and the token) in its environment. `settings` are fields of `Config` and win over `config`, which
    wins over the environment; a field of `config` that has its default counts as not given. ConfigError or UsageError
    with the remedy if nothing says how to come in; JoinRefused, SeedUnreachable or FormationTimeout if that fails. The
    caller closes the communicator; one that is still open at interpreter exit is closed then, within 5 s.
    """
    from nexar.cluster.wait_notice import tell_on_stderr  # noqa: PLC0415
    from nexar.launch.joining import join, tells_for_host  # noqa: PLC0415  # wrong settings are refused without it

    chosen = choose_config(config, settings)
    take_ticket()
    start = detect(inherited())
    door = choose_door(start, chosen, os.getppid())
    rank, size = (None, None) if start is None else (start.rank, start.size)
    launcher = UNKNOWN_NODE if start is None else start.launcher
    listen()
    report_at_exit()
    local_rank = None if start is None else start.local_rank
    with opened(door, chosen, tell_on_stderr if tells_for_host(local_rank) else None) as invitation:
        return join(chosen, invitation, rank=rank, launcher=launcher, size=size, local_rank=local_rank)


@_plainly
def connect(ticket: str, config: Config | None = None, **settings: Any) -> Communicator:
    """Join the cluster of a ticket, whoever started this process; the seed gives the rank. Errors as for `init`."""
    from nexar.launch.joining import join  # noqa: PLC0415  # a wrong ticket is refused without it

    invitation, chosen = parse_ticket(ticket), choose_config(config, settings)
    listen()
    report_at_exit()
    return join(chosen, invitation)


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
def opened(door: Door, config: Config, tell: Callable[[str], None] | None = None) -> Iterator[Invitation]:
    """What the door means; kept open until the block ends, where this rank opened it. Errors as for `init`. `tell`
    shows the user what is waited for.
    """
    if isinstance(door, ByTicket):
        yield parse_ticket(door.ticket)
    elif isinstance(door, ByToken):
        yield invitation_from_token(door.token, [door.address])
    elif isinstance(door, ByMeeting):
        with _meeting(door, config) as invitation:
            yield invitation
    elif door.opens:
        with _shared(door, config) as invitation:
            yield invitation
    else:
        yield parse_ticket(take(door.name, config.formation_timeout, tell))


@contextmanager
def _meeting(door: ByMeeting, config: Config) -> Iterator[Invitation]:
    invitation = invitation_from_token(door.token, [format_address(door.host, door.port)])
    if not door.opens:
        yield invitation
        return
    with SeedProcess(door.size, f":{door.port}", config, config.formation_timeout):
        yield invitation


@contextmanager
def _shared(door: ByFile, config: Config) -> Iterator[Invitation]:
    with (
        SeedProcess(door.size, "127.0.0.1:0", config, config.formation_timeout) as seed,
        offered(door.name, seed.ticket, seed.pid),
    ):
        yield parse_ticket(seed.ticket)
