"""The last word of a rank whose user has closed a communicator that others may still use. Pure.

Closing is local, and most often everybody does so after the same call: then nobody needs to hear of it. But who waits
in a call that this rank will never make is told: when it closes, if it knows of that call, and else by the answer to
the question what has become of it, which every call asks that lasts.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from nexar.types import Rank
from nexar.wire.messages import GaveUp, Inquire, Report

_REASON: Final = "it has closed this communicator"
_DOING: Final = "user code, which has closed this communicator"


class Farewell(NamedTuple):
    """Of one generation of one communicator."""

    communicator: int
    generation: int
    rank: Rank
    sequence: int
    """Of the first call that it has no part in."""

    @property
    def word(self) -> GaveUp:
        """To those who wait."""
        return GaveUp(self.communicator, self.generation, self.sequence, self.rank, _REASON, closed=True)

    def answer(self, question: Inquire) -> GaveUp | Report:
        """What was asked for has ended well here, or will never begin; who waits for a message is told where it is."""
        about = self.communicator, self.generation, question.number, self.rank
        if question.sequence < 0:
            return Report(*about, "absent", doing=_DOING)
        return Report(*about, "done") if question.sequence < self.sequence else self.word
