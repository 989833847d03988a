"""The members of a new generation make sure that all of them are there, and learn how far all of them had come.

A dissemination: in round i each rank tells the one 2**i further, and hears from the one 2**i behind, the least it knows
of. The least of all numbers does not mind being counted twice, so after ⌈log₂ n⌉ rounds everybody has it, and nobody
has it before everybody has come.
"""

from __future__ import annotations

import struct
from typing import Final

from nexar.errors import PeerMisbehaved
from nexar.group import Group
from nexar.links.message import collective_tag
from nexar.links.sending import About
from nexar.wire.frame import Space

SEQUENCE: Final = (1 << 64) - 2
"""No collective ever has this number."""
NOTHING: Final = -1
"""What somebody says who has finished no call."""
ANYTHING: Final = (1 << 63) - 1
"""What somebody says who was not there before: the others' word counts."""
_NUMBER: Final = struct.Struct("<q")


def settle(group: Group, mine: int, deadline: float) -> int:
    """The least of all members' numbers. Returns when all have come. PeerLost, OperationTimeout: one did not."""
    least, distance, step = mine, 1, 0
    while distance < group.size:
        least = min(least, _exchange(group, least, distance, step, deadline))
        distance, step = 2 * distance, step + 1
    return least


def _exchange(group: Group, number: int, distance: int, step: int, deadline: float) -> int:
    there, back = (group.rank + distance) % group.size, (group.rank - distance) % group.size
    receive = group.post_receive(back, None, space=Space.COLLECTIVE, tag=collective_tag(SEQUENCE, step))
    about = About(space=Space.COLLECTIVE, sequence=SEQUENCE, step=step)
    send = group.post_send(there, memoryview(_NUMBER.pack(number)), deadline, about=about)
    group.wait((send, receive), deadline)
    told = bytes(receive.into or b"")
    if len(told) != _NUMBER.size:
        raise PeerMisbehaved(rank=back, what="it settled a communicator with something that is no number")
    (heard,) = _NUMBER.unpack(told)
    return int(heard)
