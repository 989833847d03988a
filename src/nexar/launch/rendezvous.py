"""What the ranks of one rendezvous write on its board, and what each makes of it. Pure.

The board (torch's store) is not trusted: whoever reaches it can read and write everything. Law: no secret is written
there, and nothing that a rank reads there makes it trust a key that it would not trust otherwise, unless the user has
allowed that by `ticket_in_store`. So rank 0 posts, in this order of preference,

- that it follows the invitation in its environment: the others follow their own;
- with a token: the seed's addresses, which the token proves;
- with all ranks on one host: the name of a file in the private folder of the user;
- with `ticket_in_store` alone: the ticket.

The board may also hold what an earlier attempt of the same job wrote. Each rank therefore puts a new random number
into its hello, and believes only an answer that repeats it: no earlier attempt can have known that number.

Joining where somebody else has brought the processes together, and gives them a board for texts.

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
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, TypeVar

import msgspec

from nexar.cluster.host import host_id
from nexar.config import Config
from nexar.config.settings import REDACTED
from nexar.environment import inherited, take_ticket
from nexar.errors import (
    ConfigError,
    FormationTimeout,
    OperationTimeout,
    UsageError,
    headed,
    list_ranks,
    printable,
    told,
)
from nexar.launch.detect import LaunchInfo, detect
from nexar.launch.entry import needed_token
from nexar.launch.exit_report import report_at_exit
from nexar.launch.init import choose_config, install_dump_handler
from nexar.launch.seed_process import SeedProcess, folder_identity, offered_ticket, wait_for_ticket
from nexar.security.invitation import Invitation, invitation_from_token, parse_ticket
from nexar.types import UNKNOWN_NODE, Rank, format_seconds

if TYPE_CHECKING:
    from nexar.communicator.communicator import Communicator


InvitationWay: TypeAlias = Literal["environment", "addresses", "file", "ticket"]
"""How the ranks get their invitation."""


class RendezvousRound(msgspec.Struct, frozen=True):
    """Rank 0 begins a rendezvous."""

    number: str
    """Random: hellos and answer are kept under it."""
    size: int
    """How many ranks rank 0 expects."""


class RendezvousHello(msgspec.Struct, frozen=True):
    """What a rank says of itself. Rank 0 makes one too, but does not post it."""

    number: str
    """Random: recognised in the answer."""
    size: int
    """How many ranks this one expects."""
    host: str
    folder: str
    """Identity of the user's private folder on that host; empty where a token makes it superfluous."""


class RendezvousAnswer(msgspec.Struct, frozen=True):
    """Rank 0's answer to all hellos."""

    heard: list[str]
    """The numbers of the hellos of ranks 1, 2, …"""
    way: InvitationWay | Literal["token_needed", "failed"]
    content: str = ""
    """Addresses joined by commas, a file's name, a ticket, or the reason of what went wrong."""


Message = TypeVar("Message", RendezvousRound, RendezvousHello, RendezvousAnswer)


def encoded(message: RendezvousRound | RendezvousHello | RendezvousAnswer) -> str:
    """As text for the board."""
    return msgspec.json.encode(message).decode()


def decoded(text: str, kind: type[Message]) -> Message:
    """UsageError for a text that is no such message."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise UsageError(
            f"torch's store holds {text[:40]!r} where nexar expects its own data; use one version of nexar on all ranks"
        ) from error


def chosen_way(
    config: Config, hellos: Sequence[RendezvousHello], *, has_invitation: bool
) -> InvitationWay | Literal["token_needed"]:
    """How rank 0, with this config, invites the others. `hellos` of all ranks, by rank; `has_invitation`: its
    environment names the cluster to join. UsageError for unequal world sizes.
    """
    for rank, hello in enumerate(hellos):
        if hello.size != len(hellos):
            raise UsageError(unequal_sizes(len(hellos), rank, hello.size))
    if has_invitation:
        return "environment"
    if config.cluster_token is not None:
        return "addresses"
    if share_a_folder(hellos):
        return "file"
    return "ticket" if config.ticket_in_store else "token_needed"


def share_a_host(hellos: Sequence[RendezvousHello]) -> bool:
    """Whether all ranks say that they run on one host."""
    return len({hello.host for hello in hellos}) == 1


def share_a_folder(hellos: Sequence[RendezvousHello]) -> bool:
    """Whether all ranks say that they reach one private folder. Nothing is lost if that is a lie: the ticket lies in a
    file of rank 0's host, and the ranks that are elsewhere do not find it.
    """
    return share_a_host(hellos) and len({hello.folder for hello in hellos}) == 1 and hellos[0].folder != ""


def accepted_way(answer: RendezvousAnswer, config: Config) -> InvitationWay:
    """How a rank with this config follows the answer.

    UsageError for what rank 0 could not do, ConfigError for a way that the settings of this rank do not allow.
    """
    if answer.way == "failed":
        raise UsageError(headed("rank 0 could not open the cluster", printable(answer.content)))
    if answer.way == "token_needed":
        raise token_needed(answer.content)
    if answer.way in ("file", "ticket") and config.cluster_token is not None:
        raise ConfigError(
            variable="NEXAR_CLUSTER_TOKEN",
            value=REDACTED,
            allowed="the same on all ranks, and rank 0 has none",
            hint="set it on rank 0 too",
        )
    if answer.way == "ticket" and not config.ticket_in_store:
        raise ConfigError(
            variable="NEXAR_TICKET_IN_STORE",
            value=False,
            allowed="1 on all ranks, to follow a ticket that is read from torch's store",
            hint="or set NEXAR_CLUSTER_TOKEN on all ranks: then no ticket is published",
        )
    return answer.way


def token_needed(reason: str) -> ConfigError:
    """The error for ranks that have no safe way to hand over the ticket."""
    return ConfigError(
        variable="NEXAR_CLUSTER_TOKEN",
        value="",
        because=reason,
        allowed="the cluster's secret, the same on all ranks",
        hint="make one with `python3 -c 'import secrets; print(secrets.token_hex(32))'`, or, if everybody who reaches "
        "torch's store may join, set NEXAR_TICKET_IN_STORE=1 on all ranks",
    )


def separation(hellos: Sequence[RendezvousHello]) -> str:
    """Which ranks do not share rank 0's host, or not its private folder: the reason for `token_needed`."""
    first = hellos[0]
    ranks = [rank for rank, hello in enumerate(hellos) if (hello.host, hello.folder) != (first.host, first.folder)]
    named = ", ".join(map(str, ranks[:_NAMED])) + (" …" if len(ranks) > _NAMED else "")
    what = "user and one temporary directory" if share_a_host(hellos) else "host"
    return f"rank 0 and rank {named} do not share one {what}"


_NAMED: Final = 4
"""How many ranks a message names."""


def unequal_sizes(opened_for: int, rank: Rank, told: int) -> str:
    """The message for a rank that expects another number of ranks than rank 0."""
    return f"rank 0 expects {opened_for} ranks, and rank {rank} was told that they are {told}; give all one world size"


_FIRST_INTERVAL: Final = 0.005
_LAST_INTERVAL: Final = 0.1  # also how long it takes to notice that an attempt follows on another one
_NUMBER_BYTES: Final = 16
_GRACE: Final = 5.0

_used: set[Invitation] = set()  # of the environment, that this process has followed; written by whoever joins
_Found = TypeVar("_Found")


class TextStore(Protocol):
    """Where the ranks leave texts for one another. It may hold texts of earlier attempts of the same job."""

    def put(self, key: str, text: str) -> None:
        """Write it, in place of what was there. NexarError if the board is gone."""

    def find(self, key: str) -> str | None:
        """What was written last; None: nothing. Never waits. NexarError if the board is gone."""


def join_through_store(board: TextStore, rank: Rank, size: int, timeout: float, **settings: Any) -> Communicator:
    """Join with those who have the same board; all call it. Returns when everybody is there; the caller closes.

    `timeout`: seconds that the ranks may take to come to the board. `settings` and errors are those of `init`; besides,
    FormationTimeout at rank 0 and OperationTimeout at the others tell who did not come to the board, UsageError tells
    the others why rank 0 could not open the cluster, and ConfigError that a token is needed.
    """
    from nexar.launch.create import join_cluster  # noqa: PLC0415  # wrong settings are refused without it

    config = choose_config(None, settings)
    take_ticket()
    start = _started()
    install_dump_handler()
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
        return join_cluster(config, invitation, rank=rank, launcher=launcher, size=size, local_rank=local_rank)


def _hello(size: int, config: Config) -> RendezvousHello:
    folder = "" if config.cluster_token is not None else folder_identity()
    host = host_id(Config())  # not NEXAR_HOST_ID: whether ranks reach one file and one loopback is a fact of the system
    return RendezvousHello(secrets.token_hex(_NUMBER_BYTES), size, host, folder)


# -- rank 0 --------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(
    board: TextStore, hello: RendezvousHello, config: Config, start: LaunchInfo | None, timeout: float
) -> Iterator[Invitation]:
    """What rank 0 itself follows. What it opened for that stays open until the block ends."""
    number = secrets.token_hex(_NUMBER_BYTES)
    board.put(_ROUND, encoded(RendezvousRound(number, hello.size)))
    with ExitStack() as opened:
        try:
            hellos = [hello, *_hellos(board, number, hello.size, timeout)]
            way, content, invitation = _invite(hellos, config, start, opened)
        except Exception as error:
            heard = [each.number for each in _readable(board, number, hello.size).values()]
            board.put(_answer_key(number), encoded(RendezvousAnswer(heard, "failed", told(error))))
            raise
        heard = [each.number for each in hellos[1:]]
        board.put(_answer_key(number), encoded(RendezvousAnswer(heard, way, content)))
        if invitation is None:
            raise token_needed(content)
        yield invitation


def _invite(
    hellos: Sequence[RendezvousHello], config: Config, start: LaunchInfo | None, opened: ExitStack
) -> tuple[InvitationWay | Literal["token_needed"], str, Invitation | None]:
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
        opened.enter_context(offered_ticket(name, seed.ticket, seed.pid))
        return way, name, invitation
    return way, seed.ticket if way == "ticket" else ",".join(invitation.addresses), invitation


def _given(config: Config, start: LaunchInfo | None, size: int) -> Invitation | None:
    """To the cluster this process was started for, once. Later, and for another number of ranks, rank 0 opens one."""
    given = _of_environment(config)
    fits = start is None or start.size == size
    return given if fits and given not in _used else None


def _hellos(board: TextStore, number: str, size: int, timeout: float) -> Iterator[RendezvousHello]:
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


def _compare_sizes(hellos: Mapping[Rank, RendezvousHello], size: int) -> None:
    for rank, hello in hellos.items():
        if hello.size != size:
            raise UsageError(unequal_sizes(size, rank, hello.size))


def _hello_of(rank: Rank, text: str) -> RendezvousHello:
    """UsageError names the rank whose hello cannot be read."""
    try:
        return decoded(text, RendezvousHello)
    except UsageError as error:
        raise UsageError(f"the hello of rank {rank} cannot be read\n{error}") from error


def _missing(board: TextStore, number: str, size: int, timeout: float) -> FormationTimeout:
    """Names the ranks that did not come."""
    came = [rank for rank in range(size) if not rank or board.find(_hello_key(number, rank))]
    missing = list_ranks([rank for rank in range(size) if rank not in came])
    reason = f"{missing} did not come to torch's store within {format_seconds(timeout)}"
    joined = [f"rank {rank}" for rank in came]
    return FormationTimeout(joined=joined, expected=size, refused={}, timeout=timeout, reason=reason)


def _readable(board: TextStore, number: str, size: int) -> dict[Rank, RendezvousHello]:
    """The hellos that are on the board now, of all ranks that can hear an answer."""
    found: dict[Rank, RendezvousHello] = {}
    for rank in range(1, size):
        text = board.find(_hello_key(number, rank))
        with suppress(UsageError):  # whoever wrote that waits for no answer of this version
            if text is not None:
                found[rank] = decoded(text, RendezvousHello)
    return found


# -- the others ----------------------------------------------------------------------------------------------------


def _answered(
    board: TextStore, rank: Rank, hello: RendezvousHello, timeout: float, grace: float = _GRACE
) -> RendezvousAnswer:
    """Rank 0's answer to this hello, which is said again in every round that rank 0 begins. `grace`: seconds that an
    answer may come later than `timeout`, if rank 0 is there: it may have begun later, and names who is missing.
    """
    said: RendezvousRound | None = None

    def look() -> RendezvousAnswer | None:
        nonlocal said
        text = board.find(_ROUND)
        if text is None:
            return None
        current = decoded(text, RendezvousRound)
        if current != said:
            board.put(_hello_key(current.number, rank), encoded(hello))
            said = current
        found = board.find(_answer_key(current.number))
        answer = None if found is None else decoded(found, RendezvousAnswer)
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


def _follow(answer: RendezvousAnswer, config: Config, timeout: float) -> Invitation:
    """The invitation that the answer leads to. ConfigError, UsageError as `accepted_way`."""
    way = accepted_way(answer, config)
    if way == "ticket":
        return parse_ticket(answer.content)
    if way == "file":
        return parse_ticket(wait_for_ticket(_file_name(answer.content), timeout))
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


def _started() -> LaunchInfo | None:
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
