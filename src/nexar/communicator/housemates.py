"""The ranks of one host, as their arena must know them: who they are, how to wake them, and when they are lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nexar.collectives.arena import Arena
from nexar.collectives.arena_records import Announcement
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.journal import Journal
from nexar.errors import Cancelled, CollectiveMismatch, NexarError
from nexar.group import Group
from nexar.types import AwaitedPeer, NodeId, Rank


class Housemates:
    """See arena.Members."""

    def __init__(self, group: Group, journal: Journal, ranks: Sequence[Rank]) -> None:
        """`ranks`: of this host, by their index in the arena."""
        self._group = group
        self._journal = journal
        self._ranks = ranks

    def awaited(self, index: int) -> AwaitedPeer:
        """See arena.Members."""
        rank = self._ranks[index]
        return AwaitedPeer(rank=rank, node=self._group.membership.member(rank).node)

    def given_up(self, index: int, operation: str) -> BaseException:
        """See arena.Members. The rank itself says why, to the journal."""
        rank = self._ranks[index]
        return Cancelled(operation=operation, reason=f"rank {rank} has given it up", rank=rank)

    def differs(self, index: int, theirs: Fingerprint, mine: Announcement) -> BaseException:
        """See arena.Members. All ranks are told."""
        rank, (sequence, ours) = self._ranks[index], mine
        self._journal.disagree(sequence, ours, rank, theirs)
        return CollectiveMismatch(expected=ours.describe(), found=theirs.describe(), ranks=[rank], sequence=sequence)

    def nudges(self) -> list[Callable[[], None]]:
        """By index; one's own does nothing."""
        links = self._group.links()
        found = [links[rank].nudge if rank in links else None for rank in self._ranks]
        return [each or _nobody for each in found]

    def watch(self, arena: Arena) -> Callable[[], None]:
        """Fail it when one of them is lost. Returns what ends the watch."""
        nodes = {self._group.membership.member(rank).node for rank in self._ranks}

        def lost(node: NodeId, error: NexarError) -> None:
            if node in nodes:
                arena.fail(error)

        return self._group.router.tell_of_losses(lost)


def _nobody() -> None:
    """Oneself is awake."""
