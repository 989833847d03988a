"""Nobody leaves before everybody has come.

Dissemination: in round k each rank tells the rank 2^k above it, and hears from the one 2^k below it (round the ring).
After ceil(log2 n) rounds everybody has heard from everybody, directly or through others: steps ceil(log2 n), messages
n·ceil(log2 n), each without a payload.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nexar.group import Group
from nexar.links.message import collective_tag
from nexar.links.sending import About
from nexar.types import Rank
from nexar.wire.frame import Space

OPERATION: Final = 1
"""In the fingerprint of every frame. Numbers are the wire format: never reuse one."""
_NOTHING: Final = memoryview(bytearray())


def rounds(rank: Rank, size: int) -> Iterator[tuple[Rank, Rank]]:
    """Whom to tell and from whom to hear, round by round."""
    distance = 1
    while distance < size:
        yield (rank + distance) % size, (rank - distance) % size
        distance *= 2


def barrier(group: Group, sequence: int, deadline: float) -> None:
    """Return when every rank has called it. PeerLost if one cannot any more.

    OperationTimeout names the rank that this one did not hear from: it has not come, or waits for one that has not.
    """
    for step, (above, below) in enumerate(rounds(group.rank, group.size)):
        heard = group.post_receive(below, _NOTHING, space=Space.COLLECTIVE, tag=collective_tag(sequence, step))
        try:
            about = About(space=Space.COLLECTIVE, sequence=sequence, step=step, operation=OPERATION)
            told = group.post_send(above, _NOTHING, deadline, about=about)
        except BaseException:
            heard.cancel()
            raise
        group.wait((heard, told), deadline)
