"""A member of the simulated cluster: its machines are those of the product, its shell is written again in small.

What the shell does, and the product's has to do as well: beats to the watchers; telling who is behind what was chosen;
turning findings into Lost and Found; trying suspects again; asking to be let in, as long as it is none.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final, TypeAlias

from nexar.cluster.change import Change
from nexar.cluster.decisions.failure_detector import FailureDetector
from nexar.cluster.decisions.succession import Succession
from nexar.cluster.decisions.succession_events import Delayed, Found, Lost, Recover
from nexar.cluster.decisions.watchers import watched, watchers
from nexar.cluster.membership import Membership
from nexar.testing.simulator.inhabitant import Inhabitant
from nexar.testing.simulator.world import INTERVAL, STUCK_TIMEOUT, TIMEOUT, World
from nexar.types import NodeId
from nexar.wire.messages import Beat, Chosen

Making: TypeAlias = Callable[[NodeId, Membership, Random], Succession]
"""How a node's machine is made."""

_IN_TOUCH: Final = 3
"""Ranks below this beat to the seed, too."""


class SimulatedMember(Inhabitant):
    """A node that is a member, wants to be one, or was one."""

    def __init__(
        self,
        world: World,
        node: NodeId,
        making: Making,
        *,
        rate: float = 1.0,
        ahead: float = 0.0,
        asked: bool = False,
    ) -> None:
        """`asked`: its user asks for recovery, soon after something was lost."""
        super().__init__(world, node, rate=rate, ahead=ahead)
        self.succession: Succession | None = None
        self.is_expelled = False
        self.is_stalled = False
        """Since it entered its epoch."""
        self.broken: set[NodeId] = set()
        """Peers whose connection broke: when they are found again, it is on a new one."""
        self._making = making
        self._is_asked = asked
        self._detector = FailureDetector(INTERVAL, TIMEOUT, STUCK_TIMEOUT)
        self._count = 0
        self._watchers: tuple[NodeId, ...] = ()
        self._beats: dict[int, Beat] = {}
        self._delayed = 0.0

    @property
    def mind(self) -> Succession | None:
        """See Inhabitant."""
        return self.succession

    @property
    def epoch(self) -> int:
        """0: it is no member yet."""
        return self.succession.membership.epoch if self.succession is not None else 0

    # -- membership

    def begin(self, membership: Membership) -> None:
        """It is a member from now on, and its heart beats."""
        random = Random(self._world.random.getrandbits(64))
        self.succession = self._making(self.node, membership, random)
        self._world.laws.enters(self.node, membership.epoch)
        self._face(membership)
        self._world.timeline.after(self._world.random.random() * INTERVAL, self._pulse)

    def _face(self, membership: Membership) -> None:
        """Know whom to watch, and who watches."""
        rank = membership.rank_of(self.node)
        if rank is None:
            raise ValueError(f"node {self.node} is no member of epoch {membership.epoch}")
        self._watchers = tuple(membership.members[each].node for each in watchers(membership.size, rank))
        whom = [membership.members[each].node for each in watched(membership.size, rank)]
        self._detector.watch(whom, self.now())

    def _adopted(self, change: Change) -> None:
        self.is_stalled = False
        if self.succession is not None and change.epoch == self.epoch:  # of several at once the last
            self._face(self.succession.membership)

    def _expelled(self) -> None:
        self.is_expelled = True

    def _stalled(self) -> None:
        self.is_stalled = True

    # -- beats

    def _pulse(self) -> None:
        """Once in an interval, by its own clock; not while it is stopped."""
        if not self.alive or self.is_expelled:
            return
        if self.paused:
            self._held.append(self._pulse)
            return
        for watcher in (*self._watchers, *self._seed()):
            self._world.beat(self.node, watcher, self.epoch)
        self._measure()
        self._look()
        if self._is_asked and self.running and self.succession is not None and self.succession.suspects():
            self.happens(Recover())
        if self.alive:
            self._world.timeline.after(INTERVAL / self._rate + self._world.network.lag(self.node), self._pulse)

    def _measure(self) -> None:
        """Its machines are told how late it runs."""
        delay = self._world.own_delay(self.node)
        if delay != self._delayed:
            self._delayed = self._detector.own_delay = delay
            self.happens(Delayed(delay))

    def _seed(self) -> list[NodeId]:
        """A few members keep in touch with the seed."""
        membership = self.succession.membership if self.succession is not None else None
        if membership is None or membership.seed is None or (membership.rank_of(self.node) or 0) >= _IN_TOUCH:
            return []
        return [membership.seed.node]

    def felt(self, sender: NodeId, epoch: int) -> None:
        """A beat of somebody for whom this node is a watcher."""
        if self.succession is None:
            return
        self._count += 1
        beat = self._beats.setdefault(epoch, Beat(epoch))
        now = self.now()
        self._detector.packets(sender, self._count, now)
        self._detector.beat(sender, beat, now)
        if epoch < self.epoch:
            self.bring_up(sender, epoch)

    def bring_up(self, node: NodeId, epoch: int) -> None:
        """Tell a node that is behind what was chosen since."""
        for word in self.news_since(epoch):
            self._world.say(self.node, node, word)

    def news_since(self, epoch: int) -> list[Chosen]:
        """What was chosen since, for a node that is behind."""
        changes = self.succession.changes_since(epoch) if self.succession is not None else []
        return [Chosen((0, number, 0), value) for number, value in enumerate(changes, start=epoch)]

    def _look(self) -> None:
        for finding in self._detector.tick(self.now()):
            if finding.is_loss:
                self.happens(Lost(finding.node, finding.state))
            elif finding.state == "alive":
                self.find(finding.node)
        for suspect in list(self.succession.suspects()) if self.succession is not None else ():
            if self.running and self.reaches(suspect):
                self._dial(suspect)

    def _dial(self, suspect: NodeId) -> None:
        """A suspect answers: with what was chosen, if it is ahead. Nothing of an answer gets lost: the connection is
        there, or it is not.
        """
        epoch, other = self.epoch, self._world.inhabitants[suspect]
        for word in other.news_since(epoch):
            self.hear(suspect, word)
        if self.epoch == epoch and not self.is_expelled:
            self.find(suspect)

    def lines(self) -> tuple[NodeId, ...]:
        """Whom the kernel tells when this process ends."""
        return self._watchers

    def reaches(self, node: NodeId) -> bool:
        """Whether a dial would be answered."""
        return self._world.reaches(self.node, node)

    def find(self, node: NodeId) -> None:
        """A peer can be reached again."""
        severed = node in self.broken
        self.broken.discard(node)
        self.happens(Found(node, severed))
