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
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias, TypeVar

import msgspec

from nexar.config import Config
from nexar.config.config import REDACTED
from nexar.errors import ConfigError, UsageError
from nexar.errors.base import headed, printable
from nexar.types import Rank

Way: TypeAlias = Literal["environment", "addresses", "file", "ticket"]
"""How the ranks get their invitation."""


class Round(msgspec.Struct, frozen=True):
    """Rank 0 begins a rendezvous."""

    number: str
    """Random: hellos and answer are kept under it."""
    size: int
    """How many ranks rank 0 expects."""


class Hello(msgspec.Struct, frozen=True):
    """What a rank says of itself. Rank 0 makes one too, but does not post it."""

    number: str
    """Random: recognised in the answer."""
    size: int
    """How many ranks this one expects."""
    host: str
    folder: str
    """Identity of the user's private folder on that host; empty where a token makes it superfluous."""


class Answer(msgspec.Struct, frozen=True):
    """Rank 0's answer to all hellos."""

    heard: list[str]
    """The numbers of the hellos of ranks 1, 2, …"""
    way: Way | Literal["token_needed", "failed"]
    content: str = ""
    """Addresses joined by commas, a file's name, a ticket, or the reason of what went wrong."""


Message = TypeVar("Message", Round, Hello, Answer)


def encoded(message: Round | Hello | Answer) -> str:
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


def chosen_way(config: Config, hellos: Sequence[Hello], *, has_invitation: bool) -> Way | Literal["token_needed"]:
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


def share_a_host(hellos: Sequence[Hello]) -> bool:
    """Whether all ranks say that they run on one host."""
    return len({hello.host for hello in hellos}) == 1


def share_a_folder(hellos: Sequence[Hello]) -> bool:
    """Whether all ranks say that they reach one private folder. Nothing is lost if that is a lie: the ticket lies in a
    file of rank 0's host, and the ranks that are elsewhere do not find it.
    """
    return share_a_host(hellos) and len({hello.folder for hello in hellos}) == 1 and hellos[0].folder != ""


def accepted_way(answer: Answer, config: Config) -> Way:
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


def separation(hellos: Sequence[Hello]) -> str:
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
