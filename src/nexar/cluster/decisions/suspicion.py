"""The nodes that one node cannot reach: suspicions, their broadcast, probe results, and the stall timer. Pure.

- An urgent suspicion is acted on. A member that left willingly is quiet: removing it disturbs no call, until a call
  needs it and makes it urgent. A disputed suspicion is suspended: others reach that node.
- A suspicion is first sent to the few lowest ranks, which propose first. They may be lost too, so twice as
  many are informed each time, until something is decided. Those that reach the suspect inform it.
- Only a probe result obtained after a question answers it. "Reached" counts from the start of the probe: the node may
  have died since. "Missed" counts from its end.
- NoProgress is reported once per epoch: after the recovery timeout, or, without a majority, as soon as every suspicion
  has been checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from nexar.cluster.decisions.membership_events import Loss, NoProgress, SendMessage, StartProbe
from nexar.cluster.decisions.paxos import Agreement, Electorate
from nexar.cluster.membership import Membership
from nexar.types import NodeId
from nexar.wire.control import Suspect


@dataclass(slots=True)
class Suspicion:
    """A node that this node cannot reach."""

    loss: Loss
    willing: bool
    since: float
    first_since: float  # `since` in the epoch in which the suspicion arose
    disputes: int = 0  # how often its removal failed because others reach it
    suspended_until: float = 0.0  # when its dispute ends, if the probe has a result by then


class Suspicions(Mapping[NodeId, Suspicion]):
    """Suspicions of members, and of the seed: never removed, but its vote may be missing."""

    def __init__(self, me: NodeId, membership: Membership) -> None:
        self._membership = membership
        self._electorate = Electorate(membership)
        self._my_rank = membership.rank_of(me)
        self._all: dict[NodeId, Suspicion] = {}
        self._urgent: dict[NodeId, float] = {}  # members, by when they became urgent, earliest first
        self._willing: dict[NodeId, float] = {}  # members that left and are not urgent, earliest first
        self._disputed: dict[NodeId, float] = {}  # by when the dispute ends
        self.lower_rank_count = 0  # suspected members of a lower rank than mine
        self.votes = 0  # suspected voters
        self.newest = float("-inf")  # when the last suspicion was added

    def __getitem__(self, node: NodeId) -> Suspicion:
        return self._all[node]

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def urgent_since(self) -> float | None:
        return next(iter(self._urgent.values())) if self._urgent else None

    @property
    def willing_since(self) -> float | None:
        """When the first quiet member left."""
        return next(iter(self._willing.values())) if self._willing else None

    @property
    def disputed_until(self) -> float | None:
        return min(self._disputed.values()) if self._disputed else None

    @property
    def urgent(self) -> tuple[NodeId, ...]:
        return tuple(self._urgent)

    @property
    def reachable_members(self) -> int:
        seed = self._electorate.seed_voter
        return self._membership.size - self.votes + (seed is not None and seed in self._all)

    @property
    def leave_majority(self) -> bool:
        return len(self._electorate) - self.votes >= self._electorate.needed

    def removable(self, *, lost: bool = True) -> list[NodeId]:
        """Members to remove, by rank. `lost`: not only quiet ones."""
        nodes = [*(self._urgent if lost else ()), *self._willing]
        return sorted(nodes, key=lambda node: self._membership.rank_of(node) or 0)

    def is_quiet(self, node: NodeId) -> bool:
        return node in self._willing

    def add(self, node: NodeId, loss: Loss, now: float, *, willing: bool = False) -> bool:
        """Returns whether anything changed. The loss of the higher precedence is kept."""
        known = self._all.get(node)
        if known is None:
            self._all[node] = Suspicion(loss, willing, now, now)
            self._count(node, 1)
            self.newest = now
        else:
            known.willing = known.willing or willing
            known.loss = loss if loss.outranks(known.loss) else known.loss
        return self._categorize(node, now, urgent=not willing)

    def drop(self, node: NodeId) -> bool:
        if self._all.pop(node, None) is None:
            return False
        self._count(node, -1)
        for sort in (self._urgent, self._willing, self._disputed):
            sort.pop(node, None)
        return True

    def dispute(self, node: NodeId, until: float, *, latest: float | None = None) -> int:
        """Returns how often others reached it. The dispute ends between `until` and `latest`, when a probe misses the
        node.
        """
        self._urgent.pop(node, None)
        self._disputed[node] = until if latest is None else latest
        self._all[node].suspended_until = until
        self._all[node].disputes += 1
        return self._all[node].disputes

    def probe_missed(self, node: NodeId) -> None:
        """End its dispute at `until`."""
        if node in self._disputed:
            self._disputed[node] = min(self._disputed[node], self._all[node].suspended_until)

    def end_disputes(self, now: float) -> bool:
        """Makes their suspicions urgent."""
        over = [node for node, until in self._disputed.items() if until <= now] if self._disputed else []
        for node in over:
            del self._disputed[node]
            self._urgent[node] = now
        return bool(over)

    def make_urgent(self, now: float) -> None:
        for node in list(self._willing):
            self._categorize(node, now, urgent=True)

    def carried(self, me: NodeId, membership: Membership, now: float) -> Suspicions:
        """Those that apply to the next membership, as new ones. Disputes go on: otherwise none would end if changes
        follow one another sooner.
        """
        seed = membership.seed.node if membership.seed else None
        kept = Suspicions(me, membership)
        for node, each in self._all.items():
            if node == seed or membership.rank_of(node) is not None:
                kept.add(node, each.loss, now, willing=each.willing and node in self._willing)
                kept._continue(node, each, self._disputed.get(node))
        return kept

    def _continue(self, node: NodeId, before: Suspicion, disputed_until: float | None) -> None:
        known = self._all[node]
        known.willing, known.disputes, known.first_since = before.willing, before.disputes, before.first_since
        if disputed_until is not None:
            self._urgent.pop(node, None)
            self._disputed[node], known.suspended_until = disputed_until, before.suspended_until

    def _categorize(self, node: NodeId, now: float, *, urgent: bool) -> bool:
        # Whether the node changed its category.
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
            self.lower_rank_count += one
        if node in self._electorate:
            self.votes += one


_FIRST_RECEIVERS: Final = 4  # members informed first; doubles each time
_FIRST_PAUSE: Final = 1.0  # seconds until the next time; doubles too
_MAX_PAUSE: Final = 8.0


class SuspicionBroadcast:
    """Sends one node's suspicions in one epoch."""

    def __init__(
        self,
        me: NodeId,
        membership: Membership,
        suspicions: Suspicions,
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._own_delay = own_delay
        self._me = me
        self._membership = membership
        self._suspicions = suspicions
        self._unsent: list[NodeId] = list(suspicions.urgent)
        self._receiver_count = _FIRST_RECEIVERS
        self._pause = _FIRST_PAUSE
        self.again: float | None = None  # when suspicions are sent again
        self._forwarded: set[tuple[NodeId, NodeId]] = set()

    def add(self, node: NodeId) -> None:
        self._unsent.append(node)

    def messages(self, now: float, *, repeat: bool) -> list[SendMessage]:
        """`repeat`: send them again while a suspicion is urgent."""
        nodes, self._unsent = self._unsent, []
        if self.again is not None and now >= self.again:
            self._receiver_count, self._pause = 2 * self._receiver_count, min(2 * self._pause, _MAX_PAUSE)
            self.again, nodes = None, list(self._suspicions.urgent)
        if not repeat or self._suspicions.urgent_since is None:
            self.again = None
        elif self.again is None:
            self._postpone(now)
        if not nodes:
            return []
        receivers = self._lowest()
        messages = [self._message(node) for node in nodes if node in self._suspicions]
        return [SendMessage(receiver, message) for message in messages for receiver in receivers]

    def saw_proposal(self, now: float) -> None:
        """A member proposes: others need not be informed, each over a new link, unless that takes long."""
        if self.again is not None:
            self._postpone(now)

    def _postpone(self, now: float) -> None:
        # A node without evidence of its own waits for this, so that a delay of this node at most doubles the pause.
        self.again = now + self._pause + min(self._pause, self._own_delay())

    def forward(self, message: Suspect) -> list[SendMessage]:
        """Inform the suspect, once for each reporter."""
        if (message.node, message.by) in self._forwarded:
            return []
        self._forwarded.add((message.node, message.by))
        return [SendMessage(message.node, message)]

    def _message(self, node: NodeId) -> Suspect:
        return Suspect(self._membership.epoch, node, self._me, self._suspicions[node].loss.cause)

    def _lowest(self) -> list[NodeId]:
        # The lowest ranks that are reachable, without mine.
        found: list[NodeId] = []
        for member in self._membership.members:
            if len(found) == self._receiver_count:
                break
            if member.node != self._me and member.node not in self._suspicions:
                found.append(member.node)
        return found


class ProbeResults:
    """Probes of one node; requests are collected until `drain`."""

    def __init__(self, timeout: float, own_delay: Callable[[], float] = lambda: 0.0) -> None:
        """A probe without a result for twice `timeout` plus `own_delay` is repeated."""
        self._timeout = timeout
        self._own_delay = own_delay
        self._running: dict[NodeId, float] = {}  # running, by when they began
        self._reached: dict[NodeId, float] = {}  # by when the probe began
        self._missed: dict[NodeId, float] = {}  # by when the probe ended
        self._wanted: list[NodeId] = []

    def ask(self, node: NodeId, now: float) -> None:
        began = self._running.get(node)
        if began is None or now >= began + 2 * (self._timeout + self._own_delay()):
            self._running[node] = now
            self._wanted.append(node)

    def record(self, node: NodeId, now: float, *, reached: bool) -> None:
        """An unrequested result counts only if it missed the node."""
        began = self._running.pop(node, None)
        self._reached.pop(node, None)
        self._missed.pop(node, None)
        if not reached:
            self._missed[node] = now
        elif began is not None:
            self._reached[node] = began

    def clear_miss(self, node: NodeId) -> None:
        """The node was reached by other means."""
        self._missed.pop(node, None)

    def reached_since(self, node: NodeId, moment: float) -> bool:
        """Counts probes that began at `moment` or later."""
        return self._reached.get(node, float("-inf")) >= moment

    def missed_since(self, node: NodeId, moment: float) -> bool:
        """Counts probes that ended at `moment` or later."""
        return self._missed.get(node, float("-inf")) >= moment

    def clear(self) -> None:
        """A new epoch. Running probes still report."""
        self._reached.clear()
        self._missed.clear()

    def drain(self) -> list[StartProbe]:
        if not self._wanted:
            return []
        wanted, self._wanted = self._wanted, []
        return [StartProbe(node) for node in wanted]


class StallTimer:
    """When one node reports NoProgress in one epoch."""

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
        """A suspicion older than `probe_timeout` has been checked. `own_delay` extends all limits."""
        self._own_delay = own_delay
        self._me = me
        self._electorate = electorate
        self._suspicions = suspicions
        self._recovery_timeout = recovery_timeout
        self._probe_timeout = probe_timeout
        self._since: float | None = None
        self.reported = False

    def update(self, now: float, *, must_decide: bool) -> None:
        if not must_decide:
            self._since = None
        elif self._since is None:
            self._since = now

    @property
    def due(self) -> float | None:
        """None if nothing must be decided, or after the report."""
        if self._since is None or self.reported:
            return None
        delay = self._own_delay()
        over = self._since + self._recovery_timeout + delay
        return min(over, self._suspicions.newest + self._probe_timeout + delay) if self._is_hopeless else over

    def report(self, agreement: Agreement | None, now: float) -> list[NoProgress]:
        due = self.due
        if due is None or now < due:
            return []
        self.reported = True
        alive = tuple(voter for voter in self._electorate if voter not in self._suspicions)
        missing = () if self._is_hopeless else self._missing(agreement, alive)
        left = tuple(node for node in self._electorate if node in self._suspicions and self._suspicions[node].willing)
        return [NoProgress(alive, self._electorate.needed, missing, left)]

    @property
    def _is_hopeless(self) -> bool:
        return len(self._electorate) - self._suspicions.votes < self._electorate.needed

    def _missing(self, agreement: Agreement | None, alive: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
        # The voters that have not voted, as far as this node can know: all others if it has no ballot of its own.
        asked = [] if agreement is None else agreement.missing()
        return tuple(node for node in asked or alive if node != self._me)
