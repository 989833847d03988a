"""Whom one node cannot reach, in one epoch. Pure; each change costs the same, however many there are.

An urgent suspicion is to be acted on. Who left willingly goes quietly: it has no vote any more, and nobody is disturbed
by that, until somebody needs it, which makes it urgent. A disputed one rests for a while: others reach that node.

Who is told that a node cannot be reached, and by whom. Pure.

A few hear of it first: the lowest ranks, which propose first. As long as nothing comes of it more and more do, for
those few may be gone as well, and nobody knows it yet. The suspect hears of it through those who reach it.

Which nodes are being tried, and what came of it. Pure.

Only what was found out after a question says anything about the answer. That a node was reached counts from when the
try began: it may have died since. That it was not counts until the try ended: it had all that time to answer.

When a node says that no next membership comes about. Pure.

It says so when the time for recovery is over; and before, when those who are lost leave no majority, as soon as it is
sure of them. It is told once in an epoch: what was chosen makes a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from nexar.cluster.decisions.membership_events import NoProgress, SendMessage, StartProbe
from nexar.cluster.decisions.paxos import Agreement, Electorate
from nexar.cluster.membership import Membership
from nexar.types import NodeId
from nexar.wire.control import MAX_CAUSE_CHARACTERS, Suspect


@dataclass(slots=True)
class Suspicion:
    """One of them."""

    cause: str
    willing: bool
    since: float
    disputes: int = 0
    """How often so many reached it that its removal failed."""
    rests_until: float = 0.0
    """When its dispute is over, if the probe of it has a result by then."""


class Suspicions(Mapping[NodeId, Suspicion]):
    """By node: members, and the seed, which is never removed but whose vote may be missing."""

    def __init__(self, me: NodeId, membership: Membership) -> None:
        """None so far. `me` is a member."""
        self._membership = membership
        self._electorate = Electorate(membership)
        self._my_rank = membership.rank_of(me)
        self._all: dict[NodeId, Suspicion] = {}
        self._urgent: dict[NodeId, float] = {}  # members, by when it became urgent, the earliest first
        self._willing: dict[NodeId, float] = {}  # members that are not urgent, the earliest first
        self._disputed: dict[NodeId, float] = {}  # until when
        self.lower = 0
        """Suspected members of a lower rank than mine."""
        self.votes = 0
        """Voters among the suspected."""
        self.newest = float("-inf")
        """When the last one was added."""

    def __getitem__(self, node: NodeId) -> Suspicion:
        return self._all[node]

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def urgent_since(self) -> float | None:
        """When the first became urgent that still is."""
        return next(iter(self._urgent.values()), None)

    @property
    def willing_since(self) -> float | None:
        """When the first left willingly of those that are not urgent."""
        return next(iter(self._willing.values()), None)

    @property
    def disputed_until(self) -> float | None:
        """When the next dispute is over."""
        return min(self._disputed.values(), default=None)

    @property
    def urgent(self) -> tuple[NodeId, ...]:
        """Members that are to be removed, and not disputed."""
        return tuple(self._urgent)

    @property
    def leave_majority(self) -> bool:
        """Whether enough voters are not suspected to decide anything."""
        return len(self._electorate) - self.votes >= self._electorate.needed

    def removable(self, *, lost: bool = True) -> list[NodeId]:
        """Members to remove when something is proposed, in order of rank; `lost`: not only who left willingly."""
        nodes = [*(self._urgent if lost else ()), *self._willing]
        return sorted(nodes, key=lambda node: self._membership.rank_of(node) or 0)

    def is_quiet(self, node: NodeId) -> bool:
        """Whether it left willingly, and nobody here needs it."""
        return node in self._willing

    def add(self, node: NodeId, cause: str, now: float, *, willing: bool = False) -> bool:
        """Whether that is news. What a node says itself about why it leaves is the better cause."""
        known = self._all.get(node)
        if known is None:
            self._all[node] = Suspicion(cause, willing, now)
            self._count(node, 1)
            self.newest = now
        elif willing and not known.willing:
            known.cause, known.willing = cause, True
        return self._sort_in(node, now, urgent=not willing)

    def drop(self, node: NodeId) -> bool:
        """It can be reached after all. Whether it was suspected."""
        if self._all.pop(node, None) is None:
            return False
        self._count(node, -1)
        for sort in (self._urgent, self._willing, self._disputed):
            sort.pop(node, None)
        return True

    def dispute(self, node: NodeId, until: float, *, latest: float | None = None) -> int:
        """Others reach it. How often that has happened. The dispute lasts until it was `looked` for, at least to
        `until` and at most to `latest`.
        """
        self._urgent.pop(node, None)
        self._disputed[node] = until if latest is None else latest
        self._all[node].rests_until = until
        self._all[node].disputes += 1
        return self._all[node].disputes

    def looked(self, node: NodeId) -> None:
        """A probe has not reached it: its dispute need not last longer for that."""
        if node in self._disputed:
            self._disputed[node] = min(self._disputed[node], self._all[node].rests_until)

    def wake(self, now: float) -> bool:
        """Disputes that are over become urgent again. Whether there were some."""
        over = [node for node, until in self._disputed.items() if until <= now] if self._disputed else []
        for node in over:
            del self._disputed[node]
            self._urgent[node] = now
        return bool(over)

    def hurry(self, now: float) -> None:
        """Who left willingly is to be removed now, too."""
        for node in list(self._willing):
            self._sort_in(node, now, urgent=True)

    def carried(self, me: NodeId, membership: Membership, now: float) -> Suspicions:
        """Those that still mean something in the next membership: as new there."""
        seed = membership.seed.node if membership.seed else None
        kept = Suspicions(me, membership)
        for node, each in self._all.items():
            if node == seed or membership.rank_of(node) is not None:
                kept.add(node, each.cause, now, willing=each.willing and node in self._willing)
                kept._all[node].willing = each.willing
        return kept

    def _sort_in(self, node: NodeId, now: float, *, urgent: bool) -> bool:
        """Whether it is in another place than before."""
        is_member = self._membership.rank_of(node) is not None
        if not is_member or node in self._urgent or node in self._disputed:
            return False
        if urgent:
            self._willing.pop(node, None)
            self._urgent[node] = now
            return True
        is_new = node not in self._willing
        self._willing.setdefault(node, now)
        return is_new

    def _count(self, node: NodeId, one: int) -> None:
        rank = self._membership.rank_of(node)
        if rank is not None and self._my_rank is not None and rank < self._my_rank:
            self.lower += one
        if node in self._electorate:
            self.votes += one


_FIRST: Final = 4  # members that hear of it first; doubles each time
_AGAIN: Final = 1.0  # seconds until the next time; doubles, too
_LONGEST: Final = 8.0


class SuspicionBroadcast:
    """Of one node, in one epoch."""

    def __init__(self, me: NodeId, membership: Membership, suspicions: Suspicions) -> None:
        """Those that were carried here from the epoch before are still to be told."""
        self._me = me
        self._membership = membership
        self._suspicions = suspicions
        self._untold: list[NodeId] = list(suspicions.urgent)
        self._audience = _FIRST
        self._pause = _AGAIN
        self.again: float | None = None
        """When what was told is told again."""
        self._forwarded: set[tuple[NodeId, NodeId]] = set()

    def add(self, node: NodeId) -> None:
        """A suspicion is new."""
        self._untold.append(node)

    def tell(self, now: float, *, insist: bool) -> list[SendMessage]:
        """What is to be told now. `insist`: and again later, while it is urgent."""
        nodes, self._untold = self._untold, []
        if self.again is not None and now >= self.again:
            self._audience, self._pause = 2 * self._audience, min(2 * self._pause, _LONGEST)
            self.again, nodes = None, list(self._suspicions.urgent)
        if not insist or self._suspicions.urgent_since is None:
            self.again = None
        elif self.again is None:
            self.again = now + self._pause
        listeners = self._lowest() if nodes else []
        messages = [self._word(node) for node in nodes if node in self._suspicions]
        return [SendMessage(listener, message) for message in messages for listener in listeners]

    def forward(self, message: Suspect) -> list[SendMessage]:
        """The suspect is to know who complains. Once: it may be told by many."""
        if (message.node, message.by) in self._forwarded:
            return []
        self._forwarded.add((message.node, message.by))
        return [SendMessage(message.node, message)]

    def _word(self, node: NodeId) -> Suspect:
        cause = self._suspicions[node].cause[-MAX_CAUSE_CHARACTERS:]
        return Suspect(self._membership.epoch, node, self._me, cause)

    def _lowest(self) -> list[NodeId]:
        """The lowest ranks that are reached, without mine."""
        found: list[NodeId] = []
        for member in self._membership.members:
            if len(found) == self._audience:
                break
            if member.node != self._me and member.node not in self._suspicions:
                found.append(member.node)
        return found


class ProbeResults:
    """The tries of one node. Wanted ones are collected until `drain`."""

    def __init__(self, timeout: float, own_delay: Callable[[], float] = lambda: 0.0) -> None:
        """`timeout`: how long a try takes at most, and `own_delay` longer if this node runs slowly. One without a
        result for twice that is made again.
        """
        self._timeout = timeout
        self._own_delay = own_delay
        self._begun: dict[NodeId, float] = {}  # under way
        self._reached: dict[NodeId, float] = {}  # by when the try began
        self._missed: dict[NodeId, float] = {}  # by when the try ended
        self._wanted: list[NodeId] = []

    def ask(self, node: NodeId, now: float) -> None:
        """Try it, unless that is under way."""
        begun = self._begun.get(node)
        if begun is None or now >= begun + 2 * (self._timeout + self._own_delay()):
            self._begun[node] = now
            self._wanted.append(node)

    def told(self, node: NodeId, now: float, *, reached: bool) -> None:
        """The result of a try. One that nobody asked for says only that it was missed."""
        begun = self._begun.pop(node, None)
        self._reached.pop(node, None)
        self._missed.pop(node, None)
        if not reached:
            self._missed[node] = now
        elif begun is not None:
            self._reached[node] = begun

    def found(self, node: NodeId) -> None:
        """It was reached by other means: that a try has missed it means nothing any more."""
        self._missed.pop(node, None)

    def reached_since(self, node: NodeId, moment: float) -> bool:
        """Whether a try that began at this moment or later has reached it."""
        return self._reached.get(node, float("-inf")) >= moment

    def missed_since(self, node: NodeId, moment: float) -> bool:
        """Whether a try that ended at this moment or later has not reached it."""
        return self._missed.get(node, float("-inf")) >= moment

    def forget(self) -> None:
        """Another epoch: results of the one before are of no use. What is under way will be told."""
        self._reached.clear()
        self._missed.clear()

    def drain(self) -> list[StartProbe]:
        """The tries to make now."""
        wanted, self._wanted = self._wanted, []
        return [StartProbe(node) for node in wanted]


class StallTimer:
    """The patience of one node, in one epoch."""

    def __init__(
        self,
        me: NodeId,
        electorate: Electorate,
        suspicions: Suspicions,
        *,
        recovery_timeout: float,
        probe_timeout: float,
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`probe_timeout`: a suspicion as old as that has been checked. All limits extend by `own_delay`."""
        self._own_delay = own_delay
        self._me = me
        self._electorate = electorate
        self._suspicions = suspicions
        self._recovery_timeout = recovery_timeout
        self._probe_timeout = probe_timeout
        self._since: float | None = None
        self.told = False

    def press(self, now: float, *, pressing: bool) -> None:
        """Whether something has to be decided."""
        if not pressing:
            self._since = None
        elif self._since is None:
            self._since = now

    @property
    def due(self) -> float | None:
        """When to say it; None: nothing presses, or it is said."""
        if self._since is None or self.told:
            return None
        delay = self._own_delay()
        over = self._since + self._recovery_timeout + delay
        return min(over, self._suspicions.newest + self._probe_timeout + delay) if self._is_hopeless else over

    def stall(self, agreement: Agreement | None, now: float) -> list[NoProgress]:
        """What is to be said now."""
        due = self.due
        if due is None or now < due:
            return []
        self.told = True
        alive = tuple(voter for voter in self._electorate if voter not in self._suspicions)
        missing = () if self._is_hopeless else self._missing(agreement, alive)
        left = tuple(node for node in self._electorate if node in self._suspicions and self._suspicions[node].willing)
        return [NoProgress(alive, self._electorate.needed, missing, left)]

    @property
    def _is_hopeless(self) -> bool:
        return len(self._electorate) - self._suspicions.votes < self._electorate.needed

    def _missing(self, agreement: Agreement | None, alive: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
        """Who has not voted, so far as this node can know: all others, if it has no ballot of its own."""
        asked = [] if agreement is None else agreement.missing()
        return tuple(node for node in asked or alive if node != self._me)
