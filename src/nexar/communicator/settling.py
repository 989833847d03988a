"""The members of a new generation make sure that all of them are there, and learn how far all of them had come.

A dissemination: in round i each rank tells the one 2**i further, and hears from the one 2**i behind, the least and the
most it knows of. The least of all numbers does not mind being counted twice, so after ⌈log₂ n⌉ rounds everybody has it,
and nobody has it before everybody has come.

Numbers of calls mean something within one generation. When changes follow one another closely, some members have made a
generation that others have skipped: then they come from different ones, and nothing is known to be completed by all.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from nexar.errors import PeerMisbehaved
from nexar.group import Group
from nexar.links.message import collective_tag
from nexar.links.sending import About
from nexar.wire.frame import Space

SEQUENCE: Final = (1 << 64) - 2
"""No collective ever has this number."""
NOTHING: Final = -1
"""Of somebody who has finished no call."""
ANYTHING: Final = (1 << 63) - 1
"""Of somebody who was not there before: the others' word counts."""
_NEWS: Final = struct.Struct("<qqq")


class Completed(NamedTuple):
    """How far a member had come."""

    generation: int
    """That it comes from."""
    number: int
    """Of the last call that it completed there; NOTHING if there is none."""


NEWCOMER: Final = Completed(ANYTHING, ANYTHING)
"""Who was not there before."""


class _News(NamedTuple):
    """What is known of all who were heard of so far."""

    least: int
    oldest: int
    """Generation that one of them comes from."""
    newest: int

    def merged(self, other: _News) -> _News:
        return _News(min(self.least, other.least), min(self.oldest, other.oldest), max(self.newest, other.newest))


def settle(group: Group, mine: Completed, deadline: float) -> int:
    """What all members have completed: the least of their numbers; NOTHING, too, if they come from different
    generations; ANYTHING if all are new. Returns when all have come. PeerLost, OperationTimeout: one did not.
    """
    is_new = mine == NEWCOMER
    news = _News(mine.number, mine.generation, NOTHING if is_new else mine.generation)
    distance, step = 1, 0
    while distance < group.size:
        news = news.merged(_exchange(group, news, distance, step, deadline))
        distance, step = 2 * distance, step + 1
    return news.least if news.newest in (NOTHING, news.oldest) else NOTHING


def _exchange(group: Group, news: _News, distance: int, step: int, deadline: float) -> _News:
    there, back = (group.rank + distance) % group.size, (group.rank - distance) % group.size
    receive = group.post_receive(back, None, space=Space.COLLECTIVE, tag=collective_tag(SEQUENCE, step))
    about = About(space=Space.COLLECTIVE, sequence=SEQUENCE, step=step)
    send = group.post_send(there, memoryview(_NEWS.pack(*news)), deadline, about=about)
    group.wait((send, receive), deadline)
    told = bytes(receive.into or b"")
    if len(told) != _NEWS.size:
        raise PeerMisbehaved(rank=back, what="it settled a communicator with something that is no number")
    return _News(*_NEWS.unpack(told))
