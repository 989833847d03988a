"""The ranks of a new communicator agree whether they share memory, host by host, before its first collective.

All or none: collectives choose their way by facts that must be the same on every rank, and "the ranks of every host
share memory" is one of them. So the ranks of a host first make sure that all pairs of them are linked through memory;
then the first of them makes an arena, the others open it and say whether they could; the firsts of all hosts tell one
another; and each tells its own what came out of it. Where memory cannot be shared, the links serve instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Final

from nexar.cluster.membership import Membership
from nexar.collectives.arena import Arena
from nexar.collectives.arena_memory import ArenaMemory, create_memory, open_memory
from nexar.collectives.journal import Journal
from nexar.communicator.housemates import Housemates
from nexar.errors import OperationTimeout
from nexar.group import Group
from nexar.links.message import collective_tag
from nexar.links.operation import Operation
from nexar.links.sending import About
from nexar.topology.neighbors import FULL_MESH, are_neighbors
from nexar.transport.foreign_text import one_line
from nexar.types import Rank
from nexar.wire.frame import Space

_log = logging.getLogger(__name__)

LARGEST: Final = 8
"""Ranks of a host, and hosts: all pairs of a host must be linked, and the first ranks of all hosts, before the first
collective; in larger worlds that would cost more than it gives.
"""
_SEQUENCE: Final = (1 << 64) - 1  # no collective ever has this number
_HELLO, _INVITE, _ANSWER, _HOSTS, _VERDICT = range(5)
_FINE: Final = b"+"
_LONGEST: Final = 1000  # bytes of what others say that is logged
_NAME: Final = "making the communicator"
_MISSING: Final = "its part in it: it has not made the same init, split or group, or it waits for another rank itself"


def may_share(membership: Membership, topology: str = FULL_MESH) -> bool:
    """Is it worth trying? Pure, so that all ranks come to the same answer without a word. `topology`: of these ranks,
    where it is known; those of a host share memory only if all of them are neighbours.
    """
    most = max(len(membership.ranks_on(host)) for host in membership.hosts)
    if most == 1 or not all("shm" in each.capabilities for each in membership.members):
        return False
    if most > LARGEST or len(membership.hosts) > LARGEST:
        _log.info(
            "collectives use links, not shared memory: up to %d hosts with %d ranks each can share it", LARGEST, LARGEST
        )
        return False
    return topology == FULL_MESH or all(_are_neighbours(membership, host, topology) for host in membership.hosts)


def _are_neighbours(membership: Membership, host: str, topology: str) -> bool:
    """All ranks of a host of one another."""
    ranks, size = membership.ranks_on(host), membership.size
    return all(are_neighbors(topology, size, *pair) for pair in combinations(ranks, 2))


class Sharing:
    """The set-up of one communicator, at one rank."""

    def __init__(self, group: Group, deadline: float) -> None:
        self._group = group
        self._deadline = deadline
        membership = group.membership
        self._local = group.local_ranks
        self._others = [rank for rank in self._local if rank != group.rank]
        self._firsts = [membership.ranks_on(host)[0] for host in membership.hosts]
        self._memory: ArenaMemory | None = None
        self._arena: Arena | None = None
        self._unwatch: Callable[[], None] | None = None
        self.shared = False
        """The ranks of every host share memory: the same on all ranks, once they have agreed."""

    def agree(self, journal: Journal) -> Arena | None:
        """The arena; None on every rank if any host cannot have one. A host with a single rank needs none, and has
        none: `shared` tells the difference. Close the sharing when the communicator ends.
        """
        try:
            reason = self._try()
            self.shared = self._decide(reason)
        except BaseException:
            self.close()
            raise
        if not self.shared or self._memory is None:
            self.close()
            return None
        self._memory.close_door()
        return self._make(journal, self._memory)

    def _try(self) -> str:
        """What keeps the ranks of this host from sharing memory, as the first of them knows; empty: nothing."""
        if not self._others:
            return ""
        self._group.open_links(self._others, self._deadline)
        self._tell(self._others, _HELLO, b"")
        self._hear(self._others, _HELLO)
        reason = self._missing_link()
        if self._group.rank == self._local[0]:
            return self._invite(reason)
        (offer,) = self._hear([self._local[0]], _INVITE)
        self._tell([self._local[0]], _ANSWER, (reason or self._open(offer)).encode())
        return ""

    def _missing_link(self) -> str:
        links = self._group.links()
        bare = [rank for rank in self._others if rank not in links or "shm" not in links[rank].schemes]
        return f"ranks {bare} are linked to rank {self._group.rank} through the network only" if bare else ""

    def _invite(self, reason: str) -> str:
        offer = ""
        if not reason:
            try:
                self._memory = create_memory(len(self._local))
                offer = self._memory.offer
            except OSError as error:
                reason = str(error)
        self._tell(self._others, _INVITE, offer.encode())
        answers = [answer.decode(errors="replace") for answer in self._hear(self._others, _ANSWER)]
        return reason or next(filter(None, answers), "")

    def _open(self, offer: bytes) -> str:
        if not offer:
            return "the first rank of this host could not make it"
        try:
            self._memory = open_memory(offer.decode(), len(self._local))
        except (OSError, ValueError) as error:
            return f"rank {self._group.rank}: {error}"
        return ""

    def _decide(self, reason: str) -> bool:
        """The same on every rank."""
        first = self._local[0]
        if self._group.rank != first:
            (verdict,) = self._hear([first], _VERDICT)
        else:
            mine = reason.encode() or _FINE
            others = [rank for rank in self._firsts if rank != first]
            self._tell(others, _HOSTS, mine)
            verdicts = [mine, *self._hear(others, _HOSTS)]
            verdict = next((each for each in verdicts if each != _FINE), _FINE)
            self._tell(self._others, _VERDICT, verdict)
        if verdict != _FINE:
            text = one_line(verdict[:_LONGEST].decode(errors="replace"))
            _log.info("collectives do not use shared memory, the links serve instead: %s", text)
        return verdict == _FINE

    def _make(self, journal: Journal, memory: ArenaMemory) -> Arena:
        group = self._group
        housemates = Housemates(group, journal, self._local)
        arena = Arena(group.progress, memory, self._local.index(group.rank), housemates, housemates.nudges())
        self._arena = arena
        self._unwatch = housemates.watch(arena)
        return arena

    def close(self) -> None:
        """Idempotent."""
        if self._unwatch is not None:
            self._unwatch()
        if self._arena is not None:
            self._arena.close()
        elif self._memory is not None:
            self._memory.close()

    # -- words -------------------------------------------------------------------------------------------

    def _tell(self, ranks: Iterable[Rank], step: int, text: bytes) -> None:
        about = About(space=Space.COLLECTIVE, sequence=_SEQUENCE, step=step)
        sent: list[Operation] = [
            self._group.post_send(rank, memoryview(text), self._deadline, about=about) for rank in ranks
        ]
        self._wait(sent)

    def _hear(self, ranks: Iterable[Rank], step: int) -> list[bytes]:
        tag = collective_tag(_SEQUENCE, step)
        posted = [self._group.post_receive(rank, None, space=Space.COLLECTIVE, tag=tag) for rank in ranks]
        self._wait(posted)
        return [bytes(receive.into or b"") for receive in posted]

    def _wait(self, operations: Sequence[Operation]) -> None:
        """As for every operation; but the user has heard of no such message, only of the call that needs it."""
        try:
            self._group.wait(operations, self._deadline)
        except OperationTimeout as late:
            found = late.waiting_for
            waiting = found if isinstance(found, str) else [replace(peer, missing=_MISSING) for peer in found]
            raise OperationTimeout(operation=_NAME, waiting_for=waiting, timeout=late.timeout) from late
