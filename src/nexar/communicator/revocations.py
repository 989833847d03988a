"""Communicators that a rank declares over, and those that it has closed: what members say to one another of that.

Law: a word counts only from a member of the communicator, and nobody can say in another's name that this node did
something. Who passes on what a third one said is named with it: a member that lies accuses nobody but itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from nexar.communicator.absences import Absence
from nexar.communicator.branch import Branch
from nexar.communicator.lineage import Lineage
from nexar.errors import Revoked
from nexar.errors.base import sendable
from nexar.links.link import Link
from nexar.transport.foreign_text import one_line
from nexar.types import NodeId, Rank
from nexar.wire.messages import MAX_CAUSE_CHARACTERS, Message, Revoke

_MOST_EARLY: Final = 64  # communicators that are not made yet, and of which something was said


class Revocations:
    """Of one node. Any thread, but for `heard`."""

    def __init__(self, me: NodeId, lineage: Lineage, say: Callable[[NodeId, Message], None]) -> None:
        """`say` must not block, and finds a way to whom there is no link yet."""
        self._me = me
        self._lineage = lineage
        self._say = say
        self._lock = threading.Lock()  # over what is below
        # About what is not made yet, by who said it: nobody's word hides another's, least of all that of a stranger.
        self._early: dict[tuple[int, int], dict[tuple[NodeId, bool], Revoke]] = {}

    def revoke(self, branch: Branch, reason: str) -> None:
        """This communicator is over, for all its members."""
        self._revoke(branch, branch.group.rank, sendable(reason))

    def _revoke(self, branch: Branch, rank: Rank, reason: str, by: str = "") -> None:
        """Passed on, once, so that it needs no link that is not there."""
        if isinstance(branch.fate.error, Revoked) or branch.successor is not None:
            return
        error = Revoked(communicator=str(branch.communicator), reason=f"{reason}{by}", rank=rank)
        branch.fate.seal(error)
        branch.interrupt(error)
        word = Revoke(branch.communicator, branch.membership.epoch, rank, reason[:MAX_CAUSE_CHARACTERS])
        for link in branch.group.speakers().values():
            self._say(link.peer, word)

    def heard(self, link: Link, message: Message) -> None:
        """From the driving thread. Who made it a moment before us may revoke it before we have it: kept until then.
        Looked up afterwards, so either this finds the branch, or who lists the branch finds this.
        """
        assert isinstance(message, Revoke)
        about = message.communicator, message.generation
        with self._lock:
            self._early.setdefault(about, {})[link.peer, message.closed] = message
            while len(self._early) > _MOST_EARLY:
                del self._early[next(iter(self._early))]
        branch = self._lineage.find(*about)
        if branch is not None:
            self.listed(branch)

    def listed(self, branch: Branch) -> None:
        """It can be found from now on."""
        with self._lock:
            early = self._early.pop((branch.communicator, branch.membership.epoch), {})
        for (peer, _), word in early.items():
            self._follow(branch, peer, word)

    def _follow(self, branch: Branch, peer: NodeId, word: Revoke) -> None:
        speaker = branch.membership.rank_of(peer)
        if speaker is None:
            return
        if word.closed:
            if word.rank == speaker:
                self._lineage.closed_by(branch, peer)
        elif 0 <= word.rank < branch.group.size and word.rank != branch.group.rank:
            by = "" if word.rank == speaker else f" (as rank {speaker} passed on)"
            self._revoke(branch, word.rank, one_line(word.reason), by)

    def absent(self, absence: Absence) -> None:
        """Tell its members, one by one, that this node has closed it: also who has no link with it may wait for it."""
        membership = absence.membership
        rank = membership.rank_of(self._me)
        assert rank is not None  # it was a member's to close
        word = Revoke(absence.communicator, membership.epoch, rank, "it has closed it", closed=True)
        for member in membership.members:
            if member.node != self._me:
                self._say(member.node, word)
