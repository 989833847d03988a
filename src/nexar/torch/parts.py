"""Groups of groups: some ranks of a communicator, and those that are left of one."""

from __future__ import annotations

from collections.abc import Sequence

from nexar.communicator.communicator import Communicator
from nexar.errors import MembershipChanged, UsageError


def part_of(communicator: Communicator, ranks: Sequence[int], timeout: float | None = None) -> Communicator | None:
    """These ranks, in this order; None if this one is not among them. They all call it with the same list."""
    return communicator.group([int(rank) for rank in ranks], timeout=timeout)


def without(communicator: Communicator, ranks: Sequence[int]) -> Communicator:
    """All but these ranks, which may be lost; the others call it with the same list. UsageError for one that is left
    out itself.
    """
    left_out = set(ranks)
    if communicator.rank in left_out:
        raise UsageError(f"rank {communicator.rank} asked for a group without itself; only those that stay may ask")
    members = communicator.membership.members
    staying = [member.node for rank, member in enumerate(members) if rank not in left_out]
    newest = communicator
    while True:
        present = [member.node for member in newest.membership.members]
        try:
            part = part_of(newest, [present.index(node) for node in staying if node in present])
        except MembershipChanged as change:
            if change.communicator is None:
                raise
            newest = change.communicator
        else:
            assert part is not None  # this rank stays, so it is one of them
            return part
