"""How the ranks of a communicator are, as one of them sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

from nexar.cluster.decisions.failure_detector import Known
from nexar.cluster.decisions.refusals import brief
from nexar.cluster.membership import Member, Membership
from nexar.types import NodeId, Rank, describe_peer, format_seconds
from nexar.wire.messages import Doing

State: TypeAlias = Literal["self", "alive", "stuck", "silent", "lost", "unwatched"]

_CHARACTERS: Final = 120
"""Of what a peer says of itself."""


@dataclass(frozen=True, slots=True)
class Health:
    """One rank."""

    rank: Rank
    node: NodeId
    state: State
    """Stuck: it lives, and does not go on. Silent: nothing has come for the heartbeat timeout. Lost: it cannot be
    reached, and the others are asked whether they can. Unwatched: others look after it, and nothing bad was heard of
    it."""
    host: str
    """Its id, as in `comm.host`."""
    address: str | None
    """Where it listens; None: only within its host."""
    carriers: tuple[str, ...]
    """What connects us now: "shm", "quic", "tls"."""
    last_heard: float | None
    """Seconds since anything came from it; None: not known here."""
    doing: str
    """The call that it has been in for longest, as `all_reduce #1234 for 12 s`; empty: none, or not known here."""
    last_finished: str
    """The last call that it finished, so far as is known here."""
    cause: str = ""
    """Why it is lost."""

    def __str__(self) -> str:
        """One line, for people."""
        facts = [f"{describe_peer(self.rank, self.node, self.address)}: {self.state}"]
        if self.cause:
            facts.append(self.cause)
        if self.doing:
            facts.append(f"in {self.doing}")
        if self.last_finished:
            facts.append(f"last finished {self.last_finished}")
        if self.last_heard is not None and self.state != "self":
            facts.append(f"last heard {format_seconds(self.last_heard)} ago")
        return ", ".join(facts)


class Line(Protocol):
    """What is asked of a link."""

    @property
    def schemes(self) -> tuple[str, ...]: ...
    @property
    def failure(self) -> Exception | None: ...


def health(
    membership: Membership,
    me: NodeId,
    mine: tuple[Sequence[Doing], str],
    *,
    known: Callable[[NodeId], Known | None],
    links: Mapping[NodeId, Line],
    suspects: Mapping[NodeId, str],
) -> dict[Rank, Health]:
    """All members, by rank.

    `mine` is what this node does, and the last call it finished; `known` what its heartbeat knows of another, None
    where it does not watch it; `suspects` says why those are gone who have not been voted out yet.
    """

    def of(rank: Rank, member: Member) -> Health:
        if member.node == me:
            doing, finished = mine
            return Health(
                rank, me, "self", member.host, _address(member), (), 0.0, _longest(doing), brief(finished, _CHARACTERS)
            )
        return _of_other(rank, member, known(member.node), links.get(member.node), suspects.get(member.node))

    return {rank: of(rank, member) for rank, member in enumerate(membership.members)}


def _of_other(rank: Rank, member: Member, known: Known | None, line: Line | None, suspected: str | None) -> Health:
    beat = None if known is None else known.beat
    return Health(
        rank=rank,
        node=member.node,
        state=_state(known, suspected),
        host=member.host,
        address=_address(member),
        carriers=() if line is None or line.failure is not None else line.schemes,
        last_heard=None if known is None else known.age,
        doing="" if known is None or beat is None else _longest(beat.doing, known.beat_age),
        last_finished="" if beat is None else brief(beat.finished, _CHARACTERS),
        cause=suspected or "",
    )


def _state(known: Known | None, suspected: str | None) -> State:
    if suspected is not None:
        return "lost"
    if known is None:
        return "unwatched"
    return "stuck" if known.state == "hung" else known.state


def _longest(doing: Sequence[Doing], since: float = 0.0) -> str:
    """The call that has not moved for longest; `since` that was told."""
    call = max(doing, key=lambda each: each.age, default=None)
    if call is None:
        return ""
    return f"{brief(call.operation, _CHARACTERS)} #{call.sequence} for {format_seconds(call.age + since)}"


def _address(member: Member) -> str | None:
    """The best one of a transport that reaches other hosts."""
    found = [places[0] for scheme, places in member.addresses.items() if scheme != "shm" and places]
    return found[0] if found else None
