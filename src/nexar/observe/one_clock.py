"""The clocks of several hosts, brought together by what their ranks did. Pure.

Ranks of one host share a clock; those of two hosts have clocks that began at different moments. But where every rank
needs something of every other, nobody ends before all have begun. So for ranks a and b of hosts A and B in such a call,
with d as what B's clock is ahead:

    begin(b) - d ≤ end(a)    and    begin(a) ≤ end(b) - d    hence    begin(b) - end(a) ≤ d ≤ end(b) - begin(a)

Each call narrows it from both sides; the middle of what is left is off by half a small call at most. Where two hosts
had no such call in common, the clocks on their walls must do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

from nexar.collectives.operations import OperationCode
from nexar.collectives.trace_part import Part

TOGETHER: Final = frozenset(
    {
        OperationCode.BARRIER,
        OperationCode.ALL_REDUCE,
        OperationCode.ALL_GATHER,
        OperationCode.ALL_GATHER_V,
        OperationCode.ALL_TO_ALL,
        OperationCode.ALL_GATHER_OBJECT,
    }
)
"""Collectives in which nobody ends before all have begun."""

Key: TypeAlias = tuple[int, int, int]
"""Communicator, generation, sequence."""


class _Stay(NamedTuple):
    """Of the ranks of one host in one call: the first end, and the last beginning."""

    last_begin: float
    first_end: float


def offsets(parts: Sequence[Part]) -> dict[str, float]:
    """By host: what its clock is ahead of that of the first part's host, in seconds."""
    if not parts:
        return {}
    by_host: dict[str, list[Part]] = {}
    for part in parts:
        by_host.setdefault(part.host, []).append(part)
    reference = parts[0].host
    stays = {host: _stays(each) for host, each in by_host.items()}
    return {
        host: 0.0 if host == reference else _ahead(stays[reference], stays[host], by_host[reference][0], each[0])
        for host, each in by_host.items()
    }


def _ahead(ours: dict[Key, _Stay], theirs: dict[Key, _Stay], our_part: Part, their_part: Part) -> float:
    least, most = -math.inf, math.inf
    for key in ours.keys() & theirs.keys():
        least = max(least, theirs[key].last_begin - ours[key].first_end)
        most = min(most, theirs[key].first_end - ours[key].last_begin)
    if math.isinf(least):
        return (their_part.monotonic - their_part.wall) - (our_part.monotonic - our_part.wall)
    return (least + most) / 2


def _stays(parts: Iterable[Part]) -> dict[Key, _Stay]:
    found: dict[Key, _Stay] = {}
    for part in parts:
        for sequence, fingerprint, began, ended, _, outcome in part.calls:
            if outcome or fingerprint[0] not in TOGETHER:
                continue
            key = part.communicator, part.generation, sequence
            stay = found.get(key, _Stay(began, ended))
            found[key] = _Stay(max(stay.last_begin, began), min(stay.first_end, ended))
    return found
