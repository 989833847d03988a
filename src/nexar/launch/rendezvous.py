"""Joining where somebody else has brought the processes together already, and lets them leave texts for one another.

Rank 0 opens the cluster, or names the one that this process was started for, and posts what the others need: a ticket,
or, where all know the token, only the seed's addresses, so that no secret leaves the process. It says for how many: who
was told another number says so at once. What rank 0 could not do it posts too: the others raise then instead of waiting
for their deadline.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from nexar.config import Config
from nexar.environment import inherited
from nexar.errors import ConfigError, NexarError, UsageError
from nexar.launch.detect import detect
from nexar.launch.door import needed_token
from nexar.launch.dump_signal import listen
from nexar.launch.init import choose_config
from nexar.launch.seed_process import SeedProcess
from nexar.launch.start import Start
from nexar.security.invitation import Invitation, invitation_from_token
from nexar.security.join_ticket import parse_ticket
from nexar.types import UNKNOWN_NODE, Rank

if TYPE_CHECKING:
    from nexar.communicator.communicator import Communicator

_TICKET: Final = "ticket"
_ADDRESSES: Final = "addresses"
_FAILED: Final = "failed"

_used: set[Invitation] = set()  # of the environment, that this process has followed; written by whoever joins


class Board(Protocol):
    """Where the ranks leave texts for one another. Of this rendezvous alone: nobody has posted there before."""

    def post(self, text: str) -> None:
        """Rank 0's, once."""

    def read(self) -> str:
        """What rank 0 posted; waits for it, and raises a NexarError if that is in vain."""


def meet(board: Board, rank: Rank, size: int, **settings: Any) -> Communicator:
    """Join with those who have the same board; all call it. Returns when everybody is there; the caller closes.

    `settings` are as for `init`, whose errors it raises; UsageError tells the other ranks why rank 0 could not open.
    """
    from nexar.launch.joining import join  # noqa: PLC0415  # wrong settings are refused without it

    config = choose_config(None, settings)
    start = _started()
    listen()
    with _invited(board, rank, size, config, start) as invitation:
        launcher = UNKNOWN_NODE
        if invitation == _of_environment(config):
            _used.add(invitation)
            launcher = UNKNOWN_NODE if start is None else start.launcher
        local_rank = None if start is None else start.local_rank
        return join(config, invitation, rank=rank, launcher=launcher, size=size, local_rank=local_rank)


@contextmanager
def _invited(board: Board, rank: Rank, size: int, config: Config, start: Start | None) -> Iterator[Invitation]:
    if rank:
        yield understood(board.read(), config, size)
        return
    try:
        with _opened(board, size, config, start) as invitation:
            yield invitation
    except NexarError as error:
        board.post(f"{_FAILED} {error}")  # whoever has read the first post does not look again
        raise


@contextmanager
def _opened(board: Board, size: int, config: Config, start: Start | None) -> Iterator[Invitation]:
    """The cluster this process was started for, once; then, and otherwise, one of its own."""
    fits = start is None or start.size == size
    given = _of_environment(config)
    if given is not None and given not in _used and fits:
        board.post(_said(given, config, config.ticket, size))
        yield given
        return
    here = start is not None and start.on_one_host and fits
    with SeedProcess(size, "127.0.0.1:0" if here else ":0", config, config.formation_timeout) as seed:
        invitation = parse_ticket(seed.ticket)
        board.post(_said(invitation, config, seed.ticket, size))
        yield invitation


def _started() -> Start | None:
    """Half a set of a launcher's marks is no mistake here: rank and size are known from elsewhere."""
    try:
        return detect(inherited())
    except ConfigError:
        return None


def _of_environment(config: Config) -> Invitation | None:
    """To the cluster this process was started for."""
    if config.ticket is not None:
        return parse_ticket(config.ticket)
    if config.seed is not None:
        return invitation_from_token(needed_token(config, "NEXAR_SEED"), [config.seed])
    return None


def _said(invitation: Invitation, config: Config, ticket: str | None, size: int) -> str:
    if ticket is None or config.cluster_token is not None:
        return f"{_ADDRESSES} {size} {','.join(invitation.addresses)}"
    return f"{_TICKET} {size} {ticket}"


def understood(text: str, config: Config, size: int) -> Invitation:
    """What rank 0 has posted. UsageError if it failed, speaks another language, or opened for another number of ranks;
    ConfigError without its token.
    """
    kind, _, rest = text.partition(" ")
    if kind == _FAILED:
        raise UsageError(f"rank 0 could not open the cluster: {rest}")
    opened_for, _, content = rest.partition(" ")
    if kind not in (_TICKET, _ADDRESSES) or not opened_for.isdecimal():
        raise UsageError("rank 0 has posted what no version of nexar posts that this process knows; use one everywhere")
    if int(opened_for) != size:
        raise UsageError(
            f"rank 0 has opened a cluster for {opened_for} ranks, and this process was told that they are {size}; give "
            "all of them one world size"
        )
    if kind == _TICKET:
        return parse_ticket(content)
    return invitation_from_token(needed_token(config, "rank 0, which has it"), content.split(","))
