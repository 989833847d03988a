"""What was chosen: the changes behind this node, for those who are behind it, and those that came too early. Pure."""

from __future__ import annotations

from typing import Final, TypeAlias

from nexar.cluster.decisions.succession_events import Say
from nexar.types import NodeId
from nexar.wire.messages import Accept, Accepted, Chosen, Number, Prepare, Promise, Rejected

BallotWord: TypeAlias = Prepare | Promise | Accept | Accepted | Rejected | Chosen
"""A word of a ballot."""

KEPT: Final = 1024
"""Changes. Who is further behind than that is told nothing; it cannot be a member any more."""
_AHEAD: Final = 64
_TOLD: Final = 16  # changes in one answer


class History:
    """By the epoch that each change was made in."""

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self._chosen: dict[int, bytes] = {}  # in order of epoch
        self._ahead: dict[int, bytes] = {}

    def add(self, epoch: int, value: bytes) -> None:
        """This was chosen to follow `epoch`."""
        self._chosen[epoch] = value
        if len(self._chosen) > KEPT:
            del self._chosen[next(iter(self._chosen))]

    def tell(self, node: NodeId, epoch: int) -> list[Say]:
        """Bring a node that is in `epoch` nearer; nothing if what followed is not known: the rest would not help it."""
        if epoch not in self._chosen:
            return []
        near = range(epoch, epoch + _TOLD)
        return [Say(node, Chosen((0, each, 0), self._chosen[each])) for each in near if each in self._chosen]

    def since(self, epoch: int) -> list[bytes]:
        """All that brings who is in `epoch` here, in order; nothing if one of them is not known any more."""
        if epoch not in self._chosen:
            return []
        return [value for made_in, value in self._chosen.items() if made_in >= epoch]

    def keep_for_later(self, epoch: int, value: bytes) -> bool:
        """Chosen after an epoch that this node has not reached. Kept if it is near: the others come again. Whether that
        is news: only then it is worth a question, or each answer would bring as many questions as it has words.
        """
        is_new = epoch not in self._ahead
        self._ahead[epoch] = value
        if len(self._ahead) > _AHEAD:
            del self._ahead[max(self._ahead)]
        return is_new

    def take(self, epoch: int) -> bytes | None:
        """What was kept for this epoch, now that it is reached."""
        return self._ahead.pop(epoch, None)

    def answer(self, me: NodeId, sender: NodeId, word: BallotWord, epoch: int) -> list[Say] | None:
        """What `me`, who is in `epoch`, says to a word that is not about what follows it: who is behind is told what
        was chosen, who is ahead is asked, other agreements are nobody's business here. None: it is about that.
        """
        communicator, about, sequence = word.instance
        if communicator or sequence:
            return []
        if about < epoch:
            return self.tell(sender, about) if isinstance(word, Prepare | Accept) else []
        if about == epoch:
            return None
        if isinstance(word, Chosen) and not self.keep_for_later(about, word.value):
            return []
        return [ask(me, sender, epoch)]


def ask(me: NodeId, node: NodeId, epoch: int) -> Say:
    """Have a node that is ahead tell what followed `epoch`: who knows what was chosen answers a ballot with it. No
    proposer has round 0, so it stands in nobody's way.
    """
    return Say(node, Prepare((0, epoch, 0), Number(0, me)))
