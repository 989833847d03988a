"""Joins processes that another program (torch) has brought together and that share a text store.

Rank 0 waits for a hello of every rank, opens a cluster or takes the one they were started for, and posts how the ranks
get their invitation, or why it failed.

Invariant: the store is not trusted. No secret is written there, and nothing read there makes a rank trust a key that it
would not trust otherwise, unless `ticket_in_store` allows it. So rank 0 posts, in this order of preference:

- that it uses the invitation in its environment: the others use their own;
- with a token: the seed's addresses, which the token authenticates;
- with all ranks on one host: the name of a file in the user's private folder;
- with `ticket_in_store` alone: the ticket.

The store may hold texts of an earlier attempt, so each hello has a new random number, which the answer repeats.
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
    error_text,
    list_ranks,
    printable,
    with_heading,
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


InvitationSource: TypeAlias = Literal["environment", "addresses", "file", "ticket"]
"""How the ranks get their invitation."""


class RendezvousRound(msgspec.Struct, frozen=True):
    """Posted by rank 0 when it begins."""

    number: str
    """Random; part of the keys of the hellos and of the answer."""
    size: int


class RendezvousHello(msgspec.Struct, frozen=True):
    """Rank 0 does not post its own."""

    number: str
    """Random; the answer repeats it."""
    size: int
    """How many ranks this one expects."""
    host: str
    folder: str
    """Identity of the user's private folder on that host; empty if a token makes it unnecessary."""


class RendezvousAnswer(msgspec.Struct, frozen=True):
    """Posted by rank 0 after all hellos."""

    heard: list[str]
    """The numbers of the hellos of ranks 1, 2, …"""
    way: InvitationSource | Literal["token_needed", "failed"]
    content: str = ""
    """Addresses joined by commas, a file name, a ticket, or the reason of a failure."""


Message = TypeVar("Message", RendezvousRound, RendezvousHello, RendezvousAnswer)


def encoded(message: RendezvousRound | RendezvousHello | RendezvousAnswer) -> str:
    """Text for the store."""
    return msgspec.json.encode(message).decode()


def decoded(text: str, kind: type[Message]) -> Message:
    """UsageError for any other text."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise UsageError(
            f"torch's store holds {text[:40]!r} where nexar expects its own data; use one version of nexar on all ranks"
        ) from error


def chosen_way(
    config: Config, hellos: Sequence[RendezvousHello], *, has_invitation: bool
) -> InvitationSource | Literal["token_needed"]:
    """How rank 0 invites the others. UsageError for unequal world sizes."""
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
    """By the ranks' own claims."""
    return len({hello.host for hello in hellos}) == 1


def share_a_folder(hellos: Sequence[RendezvousHello]) -> bool:
    """A false claim is harmless: that rank does not find the file."""
    return share_a_host(hellos) and len({hello.folder for hello in hellos}) == 1 and hellos[0].folder != ""


def accepted_way(answer: RendezvousAnswer, config: Config) -> InvitationSource:
    """UsageError if rank 0 failed, ConfigError if this rank's settings forbid it."""
    if answer.way == "failed":
        raise UsageError(with_heading("rank 0 could not open the cluster", printable(answer.content)))
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
    """There is no safe way to share the ticket."""
    return ConfigError(
        variable="NEXAR_CLUSTER_TOKEN",
        value="",
        because=reason,
        allowed="the cluster's secret, the same on all ranks",
        hint="make one with `python3 -c 'import secrets; print(secrets.token_hex(32))'`, or, if everybody who reaches "
        "torch's store may join, set NEXAR_TICKET_IN_STORE=1 on all ranks",
    )


def separation(hellos: Sequence[RendezvousHello]) -> str:
    """The reason for `token_needed`."""
    first = hellos[0]
    ranks = [rank for rank, hello in enumerate(hellos) if (hello.host, hello.folder) != (first.host, first.folder)]
    named = ", ".join(map(str, ranks[:_MOST_NAMED])) + (" …" if len(ranks) > _MOST_NAMED else "")
    what = "user and one temporary directory" if share_a_host(hellos) else "host"
    return f"rank 0 and rank {named} do not share one {what}"


_MOST_NAMED: Final = 4
"""How many ranks a message names."""


def unequal_sizes(opened_for: int, rank: Rank, expected: int) -> str:
    """Message for different world sizes."""
    return (
        f"rank 0 expects {opened_for} ranks, but rank {rank} expects {expected}; use the same world size on all ranks"
    )


_FIRST_INTERVAL: Final = 0.005
_LAST_INTERVAL: Final = 0.1  # also how long it takes to notice that a new attempt has begun
_NUMBER_BYTES: Final = 16
_OPERATION: Final = 'init_process_group("nexar")'
_GRACE: Final = 5.0

_used: set[Invitation] = (
    set()
)  # invitations of the environment that this process has used; written by the thread that joins
_Found = TypeVar("_Found")


class TextStore(Protocol):
    """A key-value store that the ranks share."""

    def put(self, key: str, text: str) -> None:
        """NexarError if the store is gone."""

    def find(self, key: str) -> str | None:
        """Never blocks. NexarError if the store is gone."""


def join_through_store(store: TextStore, rank: Rank, size: int, timeout: float, **settings: Any) -> Communicator:
    """Join with the other ranks of this store; all ranks call it.

    `timeout`: seconds for the hellos. Errors as for `init`; for missing ranks FormationTimeout at rank 0,
    OperationTimeout elsewhere; UsageError if rank 0 failed, ConfigError if a token is needed.
    """
    from nexar.launch.create import join_cluster  # noqa: PLC0415  # wrong settings are rejected without loading it

    config = choose_config(None, settings)
    take_ticket()
    launch_info = _started()
    install_dump_handler()
    report_at_exit()
    hello = _hello(size, config)
    with ExitStack() as opened:
        if rank:
            invitation = _follow(_await_answer(store, rank, hello, timeout), config, timeout)
        else:
            invitation = opened.enter_context(_open_cluster(store, hello, config, launch_info, timeout))
        launcher = UNKNOWN_NODE
        if invitation == _environment_invitation(config):
            _used.add(invitation)
            launcher = UNKNOWN_NODE if launch_info is None else launch_info.launcher
        local_rank = None if launch_info is None else launch_info.local_rank
        return join_cluster(config, invitation, rank=rank, launcher=launcher, size=size, local_rank=local_rank)


def _hello(size: int, config: Config) -> RendezvousHello:
    folder = "" if config.cluster_token is not None else folder_identity()
    host = host_id(Config())  # not NEXAR_HOST_ID: whether ranks share files and the loopback is a fact of the system
    return RendezvousHello(secrets.token_hex(_NUMBER_BYTES), size, host, folder)


# -- rank 0 --------------------------------------------------------------------------------------------------------


@contextmanager
def _open_cluster(
    store: TextStore, hello: RendezvousHello, config: Config, launch_info: LaunchInfo | None, timeout: float
) -> Iterator[Invitation]:
    number = secrets.token_hex(_NUMBER_BYTES)
    store.put(_ROUND, encoded(RendezvousRound(number, hello.size)))
    with ExitStack() as opened:
        try:
            hellos = [hello, *_hellos(store, number, hello.size, timeout)]
            way, content, invitation = _invite(hellos, config, launch_info, opened)
        except Exception as error:
            heard = [each.number for each in _readable(store, number, hello.size).values()]
            store.put(_answer_key(number), encoded(RendezvousAnswer(heard, "failed", error_text(error))))
            raise
        heard = [each.number for each in hellos[1:]]
        store.put(_answer_key(number), encoded(RendezvousAnswer(heard, way, content)))
        if invitation is None:
            raise token_needed(content)
        yield invitation


def _invite(
    hellos: Sequence[RendezvousHello], config: Config, launch_info: LaunchInfo | None, opened: ExitStack
) -> tuple[InvitationSource | Literal["token_needed"], str, Invitation | None]:
    """Way and content of the answer, and rank 0's invitation; None: a token is needed."""
    given = _unused_invitation(config, launch_info, len(hellos))
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


def _unused_invitation(config: Config, launch_info: LaunchInfo | None, size: int) -> Invitation | None:
    given = _environment_invitation(config)
    fits = launch_info is None or launch_info.size == size
    return given if fits and given not in _used else None


def _hellos(store: TextStore, number: str, size: int, timeout: float) -> Iterator[RendezvousHello]:
    """UsageError at once for another world size: missing ranks may not exist."""
    deadline = time.monotonic() + timeout
    for rank in range(1, size):
        text = _poll_until(partial(store.find, _hello_key(number, rank)), deadline)
        if text is None:
            _compare_sizes(_readable(store, number, size), size)
            raise _missing(store, number, size, timeout)
        hello = _hello_of(rank, text)
        _compare_sizes({rank: hello}, size)
        yield hello


def _compare_sizes(hellos: Mapping[Rank, RendezvousHello], size: int) -> None:
    for rank, hello in hellos.items():
        if hello.size != size:
            raise UsageError(unequal_sizes(size, rank, hello.size))


def _hello_of(rank: Rank, text: str) -> RendezvousHello:
    try:
        return decoded(text, RendezvousHello)
    except UsageError as error:
        raise UsageError(f"the hello of rank {rank} cannot be read\n{error}") from error


def _missing(store: TextStore, number: str, size: int, timeout: float) -> FormationTimeout:
    present = [rank for rank in range(size) if not rank or store.find(_hello_key(number, rank))]
    missing = list_ranks([rank for rank in range(size) if rank not in present])
    reason = f"{missing} did not come to torch's store within {format_seconds(timeout)}"
    joined = [f"rank {rank}" for rank in present]
    return FormationTimeout(joined=joined, expected=size, refused={}, timeout=timeout, reason=reason)


def _readable(store: TextStore, number: str, size: int) -> dict[Rank, RendezvousHello]:
    found: dict[Rank, RendezvousHello] = {}
    for rank in range(1, size):
        text = store.find(_hello_key(number, rank))
        with suppress(UsageError):  # another version of nexar wrote it, and cannot read this version's answer
            if text is not None:
                found[rank] = decoded(text, RendezvousHello)
    return found


# -- other ranks
# ---------------------------------------------------------------------------------------------------------


def _await_answer(
    store: TextStore, rank: Rank, hello: RendezvousHello, timeout: float, grace: float = _GRACE
) -> RendezvousAnswer:
    """Posts the hello again in every round. `grace`: more seconds for the answer if rank 0 has come: it names the
    missing ranks.
    """
    posted: RendezvousRound | None = None

    def find_answer() -> RendezvousAnswer | None:
        nonlocal posted
        text = store.find(_ROUND)
        if text is None:
            return None
        current = decoded(text, RendezvousRound)
        if current != posted:
            store.put(_hello_key(current.number, rank), encoded(hello))
            posted = current
        found = store.find(_answer_key(current.number))
        answer = None if found is None else decoded(found, RendezvousAnswer)
        return answer if answer is not None and hello.number in answer.heard else None

    deadline = time.monotonic() + timeout
    answer = _poll_until(find_answer, deadline)
    # A round that has an answer without this hello belongs to an earlier attempt.
    rank_0_present = posted is not None and store.find(_answer_key(posted.number)) is None
    if answer is None and rank_0_present:
        answer = _poll_until(find_answer, deadline + grace)
    if answer is not None:
        return answer
    if posted is not None and posted.size != hello.size:
        raise UsageError(unequal_sizes(posted.size, rank, hello.size))
    waiting_for = "the process of rank 0, which opens the cluster and says so in torch's store"
    if posted is not None and rank_0_present:
        waiting_for = (
            f"rank 0, which waits until all {posted.size} ranks have come to torch's store; its error names them"
        )
    raise OperationTimeout(operation=_OPERATION, waiting_for=waiting_for, timeout=timeout)


def _follow(answer: RendezvousAnswer, config: Config, timeout: float) -> Invitation:
    way = accepted_way(answer, config)
    if way == "ticket":
        return parse_ticket(answer.content)
    if way == "file":
        return parse_ticket(wait_for_ticket(_file_name(answer.content), timeout, operation=_OPERATION))
    if way == "environment" and (given := _environment_invitation(config)) is not None:
        return given
    if way == "environment" and config.cluster_token is None:
        allowed = "the ticket that rank 0 joins with, the same on all ranks"
        raise ConfigError(variable="NEXAR_TICKET", value="", allowed=allowed, hint="or unset it on rank 0")
    return invitation_from_token(needed_token(config, "rank 0, which has it"), answer.content.split(","))


def _file_name(content: str) -> str:
    """A text in the store must not lead out of the private folder."""
    if not re.fullmatch(rf"[0-9a-f]{{{2 * _NUMBER_BYTES}}}", content):
        raise UsageError("the answer in torch's store names no file of rank 0; another program has written there")
    return content


# -- both ----------------------------------------------------------------------------------------------------------


_ROUND: Final = "nexar/round"


def _hello_key(number: str, rank: Rank) -> str:
    return f"nexar/{number}/{rank}"


def _answer_key(number: str) -> str:
    return f"nexar/{number}/answer"


def _poll_until(find: Callable[[], _Found | None], deadline: float) -> _Found | None:
    """None at the deadline. No store can wait for a round and an answer at once, or be interrupted by Ctrl-C."""
    interval = _FIRST_INTERVAL
    while (found := find()) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(interval, left))
        interval = min(2 * interval, _LAST_INTERVAL)
    return found


def _started() -> LaunchInfo | None:
    """Incomplete launcher variables are no error here: the caller knows rank and size."""
    try:
        return detect(inherited())
    except ConfigError:
        return None


def _environment_invitation(config: Config) -> Invitation | None:
    if config.ticket is not None:
        return parse_ticket(config.ticket)
    if config.seed is not None:
        return invitation_from_token(needed_token(config, "NEXAR_SEED"), [config.seed])
    return None
