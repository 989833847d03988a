"""Joining where somebody else has brought the processes together, and gives them a board for texts.

Rank 0 waits until every rank has said hello on the board and decides how the ranks get their invitation:
`rendezvous_messages` says why each way is safe. Then it opens the cluster, or names the one that the processes were
started for, and answers. If it cannot do that, its answer says why, and the others raise at once.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

from nexar.cluster.host_id import host_id
from nexar.config import Config
from nexar.environment import inherited, take_ticket
from nexar.errors import ConfigError, FormationTimeout, OperationTimeout, UsageError
from nexar.errors.base import list_ranks, told
from nexar.launch.detect import detect
from nexar.launch.door import needed_token
from nexar.launch.dump_signal import listen
from nexar.launch.exit_report import report_at_exit
from nexar.launch.handover import folder_identity, offered, take
from nexar.launch.init import choose_config
from nexar.launch.rendezvous_messages import (
    Answer,
    Hello,
    Round,
    Way,
    accepted_way,
    chosen_way,
    decoded,
    encoded,
    separation,
    share_a_host,
    token_needed,
    unequal_sizes,
)
from nexar.launch.seed_process import SeedProcess
from nexar.launch.start import Start
from nexar.security.invitation import Invitation, invitation_from_token
from nexar.security.join_ticket import parse_ticket
from nexar.types import UNKNOWN_NODE, Rank, format_seconds

if TYPE_CHECKING:
    from nexar.communicator.communicator import Communicator

_FIRST_INTERVAL: Final = 0.005
_LAST_INTERVAL: Final = 0.1  # also how long it takes to notice that an attempt follows on another one
_NUMBER_BYTES: Final = 16
_GRACE: Final = 5.0

_used: set[Invitation] = set()  # of the environment, that this process has followed; written by whoever joins
_Found = TypeVar("_Found")


class Board(Protocol):
    """Where the ranks leave texts for one another. It may hold texts of earlier attempts of the same job."""

    def put(self, key: str, text: str) -> None:
        """Write it, in place of what was there. NexarError if the board is gone."""

    def find(self, key: str) -> str | None:
        """What was written last; None: nothing. Never waits. NexarError if the board is gone."""


def meet(board: Board, rank: Rank, size: int, timeout: float, **settings: Any) -> Communicator:
    """Join with those who have the same board; all call it. Returns when everybody is there; the caller closes.

    `timeout`: seconds that the ranks may take to come to the board. `settings` and errors are those of `init`; besides,
    FormationTimeout at rank 0 and OperationTimeout at the others tell who did not come to the board, UsageError tells
    the others why rank 0 could not open the cluster, and ConfigError that a token is needed.
    """
    from nexar.launch.joining import join  # noqa: PLC0415  # wrong settings are refused without it

    config = choose_config(None, settings)
    take_ticket()
    start = _started()
    listen()
    report_at_exit()
    hello = _hello(size, config)
    with ExitStack() as opened:
        if rank:
            invitation = _follow(_answered(board, rank, hello, timeout), config, timeout)
        else:
            invitation = opened.enter_context(_opened(board, hello, config, start, timeout))
        launcher = UNKNOWN_NODE
        if invitation == _of_environment(config):
            _used.add(invitation)
            launcher = UNKNOWN_NODE if start is None else start.launcher
        local_rank = None if start is None else start.local_rank
        return join(config, invitation, rank=rank, launcher=launcher, size=size, local_rank=local_rank)


def _hello(size: int, config: Config) -> Hello:
    folder = "" if config.cluster_token is not None else folder_identity()
    host = host_id(Config())  # not NEXAR_HOST_ID: whether ranks reach one file and one loopback is a fact of the system
    return Hello(secrets.token_hex(_NUMBER_BYTES), size, host, folder)


# -- rank 0 --------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(board: Board, hello: Hello, config: Config, start: Start | None, timeout: float) -> Iterator[Invitation]:
    """What rank 0 itself follows. What it opened for that stays open until the block ends."""
    number = secrets.token_hex(_NUMBER_BYTES)
    board.put(_ROUND, encoded(Round(number, hello.size)))
    with ExitStack() as opened:
        try:
            hellos = [hello, *_hellos(board, number, hello.size, timeout)]
            way, content, invitation = _invite(hellos, config, start, opened)
        except Exception as error:
            heard = [each.number for each in _readable(board, number, hello.size).values()]
            board.put(_answer_key(number), encoded(Answer(heard, "failed", told(error))))
            raise
        heard = [each.number for each in hellos[1:]]
        board.put(_answer_key(number), encoded(Answer(heard, way, content)))
        if invitation is None:
            raise token_needed(content)
        yield invitation


def _invite(
    hellos: Sequence[Hello], config: Config, start: Start | None, opened: ExitStack
) -> tuple[Way | Literal["token_needed"], str, Invitation | None]:
    """The way and the content of the answer, and the invitation for rank 0 itself; None: a token is needed."""
    given = _given(config, start, len(hellos))
    way = chosen_way(config, hellos, has_invitation=given is not None)
    if way == "token_needed":
        return way, separation(hellos), None
    if given is not None:
        return way, ",".join(given.addresses), given
    listen_on = "127.0.0.1:0" if share_a_host(hellos) else ":0"
    seed = opened.enter_context(SeedProcess(len(hellos), listen_on, config, config.formation_timeout))
    invitation = parse_ticket(seed.ticket)
    if way == "file":
        name = secrets.token_hex(_NUMBER_BYTES)
        opened.enter_context(offered(name, seed.ticket, seed.pid))
        return way, name, invitation
    return way, seed.ticket if way == "ticket" else ",".join(invitation.addresses), invitation


def _given(config: Config, start: Start | None, size: int) -> Invitation | None:
    """To the cluster this process was started for, once. Later, and for another number of ranks, rank 0 opens one."""
    given = _of_environment(config)
    fits = start is None or start.size == size
    return given if fits and given not in _used else None


def _hellos(board: Board, number: str, size: int, timeout: float) -> Iterator[Hello]:
    """Of ranks 1, 2, …, in this order. UsageError names a rank that expects another number of ranks, at once: the ranks
    that are missing may not exist.
    """
    deadline = time.monotonic() + timeout
    for rank in range(1, size):
        text = _awaited(partial(board.find, _hello_key(number, rank)), deadline)
        if text is None:
            _compare_sizes(_readable(board, number, size), size)
            raise _missing(board, number, size, timeout)
        hello = _hello_of(rank, text)
        _compare_sizes({rank: hello}, size)
        yield hello


def _compare_sizes(hellos: Mapping[Rank, Hello], size: int) -> None:
    for rank, hello in hellos.items():
        if hello.size != size:
            raise UsageError(unequal_sizes(size, rank, hello.size))


def _hello_of(rank: Rank, text: str) -> Hello:
    """UsageError names the rank whose hello cannot be read."""
    try:
        return decoded(text, Hello)
    except UsageError as error:
        raise UsageError(f"the hello of rank {rank} cannot be read\n{error}") from error


def _missing(board: Board, number: str, size: int, timeout: float) -> FormationTimeout:
    """Names the ranks that did not come."""
    came = [rank for rank in range(size) if not rank or board.find(_hello_key(number, rank))]
    missing = list_ranks([rank for rank in range(size) if rank not in came])
    reason = f"{missing} did not come to torch's store within {format_seconds(timeout)}"
    joined = [f"rank {rank}" for rank in came]
    return FormationTimeout(joined=joined, expected=size, refused={}, timeout=timeout, reason=reason)


def _readable(board: Board, number: str, size: int) -> dict[Rank, Hello]:
    """The hellos that are on the board now, of all ranks that can hear an answer."""
    found: dict[Rank, Hello] = {}
    for rank in range(1, size):
        text = board.find(_hello_key(number, rank))
        with suppress(UsageError):  # whoever wrote that waits for no answer of this version
            if text is not None:
                found[rank] = decoded(text, Hello)
    return found


# -- the others ----------------------------------------------------------------------------------------------------


def _answered(board: Board, rank: Rank, hello: Hello, timeout: float, grace: float = _GRACE) -> Answer:
    """Rank 0's answer to this hello, which is said again in every round that rank 0 begins. `grace`: seconds that an
    answer may come later than `timeout`, if rank 0 is there: it may have begun later, and names who is missing.
    """
    said: Round | None = None

    def look() -> Answer | None:
        nonlocal said
        text = board.find(_ROUND)
        if text is None:
            return None
        current = decoded(text, Round)
        if current != said:
            board.put(_hello_key(current.number, rank), encoded(hello))
            said = current
        found = board.find(_answer_key(current.number))
        answer = None if found is None else decoded(found, Answer)
        return answer if answer is not None and hello.number in answer.heard else None

    deadline = time.monotonic() + timeout
    answer = _awaited(look, deadline)
    # A round with an answer is an earlier one.
    rank_0_came = said is not None and board.find(_answer_key(said.number)) is None
    if answer is None and rank_0_came:
        answer = _awaited(look, deadline + grace)
    if answer is not None:
        return answer
    if said is not None and said.size != hello.size:
        raise UsageError(unequal_sizes(said.size, rank, hello.size))
    waiting_for = "the process of rank 0, which opens the cluster and says so in torch's store"
    if said is not None and rank_0_came:
        waiting_for = (
            f"rank 0, which waits until all {said.size} ranks have come to torch's store; its error names them"
        )
    raise OperationTimeout(operation='init_process_group("nexar")', waiting_for=waiting_for, timeout=timeout)


def _follow(answer: Answer, config: Config, timeout: float) -> Invitation:
    """The invitation that the answer leads to. ConfigError, UsageError as `accepted_way`."""
    way = accepted_way(answer, config)
    if way == "ticket":
        return parse_ticket(answer.content)
    if way == "file":
        return parse_ticket(take(_file_name(answer.content), timeout))
    if way == "environment" and (given := _of_environment(config)) is not None:
        return given
    if way == "environment" and config.cluster_token is None:
        allowed = "the ticket that rank 0 joins with, the same on all ranks"
        raise ConfigError(variable="NEXAR_TICKET", value="", allowed=allowed, hint="or unset it on rank 0")
    return invitation_from_token(needed_token(config, "rank 0, which has it"), answer.content.split(","))


def _file_name(content: str) -> str:
    """UsageError for what `_invite` would not make: the board must not lead out of the private folder."""
    if not re.fullmatch(rf"[0-9a-f]{{{2 * _NUMBER_BYTES}}}", content):
        raise UsageError("the answer in torch's store names no file of rank 0; somebody else has written there")
    return content


# -- both ----------------------------------------------------------------------------------------------------------


_ROUND: Final = "nexar/round"


def _hello_key(number: str, rank: Rank) -> str:
    return f"nexar/{number}/{rank}"


def _answer_key(number: str) -> str:
    return f"nexar/{number}/answer"


def _awaited(look: Callable[[], _Found | None], deadline: float) -> _Found | None:
    """What `look` returns once that is not None; None at the deadline. The board is polled: no store can tell of a new
    round and of an answer at once, and a wait inside a store cannot be interrupted by Ctrl-C.
    """
    interval = _FIRST_INTERVAL
    while (found := look()) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(interval, left))
        interval = min(2 * interval, _LAST_INTERVAL)
    return found


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
