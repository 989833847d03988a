"""Colour and key → sub-communicators.

Each rank brings a colour and a key, and all see all of them. Those of one colour become a communicator, ranked by key
and then by their old rank. Its id follows from what its members know alike: the parent, the occasion, who they are. So
it needs no further word, and is the same as another's only by a chance of one in 2**63.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from nexar.cluster.membership import Membership
from nexar.collectives.all_gather import all_gather
from nexar.collectives.assembly import PLAIN, Assembly
from nexar.collectives.operations import OperationCode
from nexar.collectives.work import Work
from nexar.errors import UsageError
from nexar.group import Group
from nexar.types import Rank, whole

_NOBODY: Final = -1  # the colour of who takes part in none
_LARGEST: Final = (1 << 63) - 1
_LEAST: Final = -1 << 63
_SPLIT, _GROUP = range(2)


class Part(NamedTuple):
    """One sub-communicator: its members by their old ranks, in the order of the new ones."""

    communicator: int
    ranks: tuple[Rank, ...]


def propose(assembly: Assembly, color: Any, key: Any) -> Work:
    """Tell all ranks what this one wants; the result is its part, None if it takes part in none."""
    mine = np.array([_checked_color(color), _checked_key(key)], np.int64)
    out = np.empty((assembly.group.size, 2), np.int64)
    work = all_gather(assembly, mine, out.reshape(-1), PLAIN, OperationCode.SPLIT)
    assert work.call is not None
    occasion = work.call.entry.sequence
    return work.then(lambda _: part_of(assembly.group, out.tolist(), occasion))


def _checked_color(color: Any) -> int:
    wanted = whole(color)
    if color is None:
        return _NOBODY
    if wanted is None or not 0 <= wanted <= _LARGEST:
        raise UsageError(
            f"split(color={color!r}): a colour is a whole number from 0 to {_LARGEST} (2**63 - 1), or None for no part"
        )
    return wanted


def _checked_key(key: Any) -> int:
    order = whole(key)
    if order is None or not _LEAST <= order <= _LARGEST:
        raise UsageError(f"split(key={key!r}): a key is a whole number of 64 bits, {_LEAST} to {_LARGEST}")
    return order


def part_of(group: Group, proposals: Sequence[Sequence[int]], occasion: int) -> Part | None:
    """What becomes of this rank, given everybody's colour and key."""
    rank = group.rank
    color = proposals[rank][0]
    if color == _NOBODY:
        return None
    members = sorted((each[1], other) for other, each in enumerate(proposals) if each[0] == color)
    ranks = tuple(other for _, other in members)
    return Part(id_of(group, _SPLIT, occasion, ranks), ranks)


def members_of(membership: Membership, ranks: Sequence[Rank]) -> Membership:
    """Those ranks alone, in that order."""
    return Membership(membership.cluster, membership.epoch, tuple(membership.members[rank] for rank in ranks))


def chosen(group: Group, ranks: Iterable[Any], occasions: Counter[tuple[Rank, ...]]) -> Part | None:
    """The part that these ranks make among themselves, without a word to the others; None if this one is not among
    them. `occasions` counts how often each set of them has done so.
    """
    if not isinstance(ranks, Iterable):
        raise UsageError(f"group({ranks!r}): give the ranks as a list, e.g. group([0, 1])")
    listed = tuple(group.check(rank) for rank in ranks)
    if len(set(listed)) != len(listed) or not listed:
        raise UsageError(f"group({list(listed)}) is no list of different ranks; name each member once")
    if group.rank not in listed:
        return None
    occasions[listed] += 1
    return Part(id_of(group, _GROUP, occasions[listed], listed), listed)


def id_of(group: Group, way: int, occasion: int, ranks: Sequence[Rank]) -> int:
    """The same for all members, another for everybody else."""
    facts = (group.communicator, group.matching.generation, way, occasion, *ranks)
    digest = hashlib.sha256(np.array(facts, np.uint64).tobytes()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
