"""What all inhabitants of a simulated world have: a life, a clock of their own, and a mind that takes steps.

A machine is asked and obeyed here as the product's shells do it: state changes first, words leave after. What
happens to a stopped process waits until it is continued, as in the buffers of its kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from nexar.cluster.change import Change
from nexar.cluster.decisions.succession_events import (
    Action,
    Adopt,
    Event,
    Expel,
    Heard,
    Probe,
    Probed,
    Say,
    Stall,
    Tick,
    Word,
)
from nexar.errors import NexarError
from nexar.testing.simulator.laws import Violation
from nexar.testing.simulator.telling import tell
from nexar.testing.simulator.world import World
from nexar.types import NodeId
from nexar.wire.messages import Chosen

_SHORTEST: Final = 0.001
"""Seconds between two ticks of one machine: a thread does not wake more often."""


class Mind(Protocol):
    """A decision machine of `cluster/decisions`."""

    def step(self, event: Event, now: float) -> list[Action]:
        """What to do about it."""

    def due(self, now: float) -> float | None:
        """When it wants a Tick."""


class Inhabitant:
    """A process of the simulated world."""

    def __init__(self, world: World, node: NodeId, *, rate: float = 1.0, ahead: float = 0.0) -> None:
        """Its clock runs `rate` times as fast as the world's, and is `ahead` of it."""
        self.node = node
        self.alive = True
        self.paused = False
        self.last_words: int | None = None
        """So many more words, then it dies: in the middle of what it has to say."""
        self._world = world
        self._rate = rate
        self._ahead = ahead
        self._held: list[Callable[[], None]] = []  # what waits for a stopped process
        self._wakes_at: float | None = None  # in the world's time

    @property
    def running(self) -> bool:
        """It exists, and is not stopped."""
        return self.alive and not self.paused

    @property
    def mind(self) -> Mind | None:
        """Its machine; None: it has none yet, or no longer."""
        raise NotImplementedError

    def now(self) -> float:
        """By its own clock."""
        return self._world.timeline.now * self._rate + self._ahead

    # -- life

    def die(self, why: str) -> None:
        """Its process ends. Idempotent."""
        if self.alive:
            self.alive = False
            self._held.clear()
            self._world.timeline.record(f"{self.node} dies: {why}")

    def pause(self) -> None:
        """Its process is stopped."""
        if self.running:
            self.paused = True
            self._world.timeline.record(f"{self.node} is stopped")

    def resume(self) -> None:
        """It goes on, and finds everything that has come meanwhile."""
        if not self.alive or not self.paused:
            return
        self.paused = False
        self._world.timeline.record(f"{self.node} is continued")
        held, self._held = self._held, []
        for action in held:
            action()

    def when_running(self, action: Callable[[], None]) -> None:
        """Now; if it is stopped, when it is continued; if it is dead, never."""
        if self.paused:
            self._held.append(action)
        elif self.alive:
            action()

    # -- thinking

    def hear(self, sender: NodeId, word: Word) -> None:
        """A word arrives."""
        self.happens(Heard(sender, word))

    def felt(self, sender: NodeId, epoch: int) -> None:
        """A beat arrives."""

    def news_since(self, epoch: int) -> list[Chosen]:
        """What it tells who dials it, and is in an earlier epoch."""
        del epoch
        return []

    def happens(self, event: Event) -> None:
        """Tell its machine, and do what that wants."""
        if self.paused:
            self._held.append(lambda: self.happens(event))
            return
        mind = self.mind
        if not self.alive or mind is None:
            return
        world = self._world
        world.timeline.record(tell(self.node, event))
        if world.timeline.events > world.most_events:
            raise Violation("a cluster comes to rest", f"more than {world.most_events} events")
        world.laws.told(self.node, event)
        actions = self._think(mind, event)
        world.laws.seen(self.node, event, actions)
        self._stepped()
        for action in actions:
            self._do(action)
            if not self.running:
                return  # it died of it
        self._arm()

    def _think(self, mind: Mind, event: Event) -> list[Action]:
        try:
            return mind.step(event, self.now())
        except (NexarError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise Violation("a machine does not fail", f"that of node {self.node}: {error!r}") from error

    def _stepped(self) -> None:
        """Before the words leave."""

    def _do(self, action: Action) -> None:
        match action:
            case Say(node=node, word=word):
                self._say(node, word)
            case Probe(node=node):
                self._probe(node)
            case Adopt(change=change):
                self._world.timeline.record(f"{self.node} adopts epoch {change.epoch}")
                self._adopted(change)
            case Expel(epoch=epoch, reason=reason):
                self._world.timeline.record(f"{self.node} is expelled by epoch {epoch}: {reason}")
                self._expelled()
            case Stall():
                self._world.timeline.record(f"{self.node} stalls: {len(action.alive)} of {action.needed}")
                self._stalled()

    def _say(self, node: NodeId, word: Word) -> None:
        if self.last_words is not None:
            self.last_words -= 1
            if self.last_words < 0:
                self.die("in mid-sentence")
                return
        self._world.say(self.node, node, word)

    def _probe(self, node: NodeId) -> None:
        seconds, cause = self._world.probe_takes(self.node, node)
        self._world.timeline.after(seconds, lambda: self.happens(Probed(node, cause)))

    def _adopted(self, change: Change) -> None:
        """It is in the next membership."""

    def _expelled(self) -> None:
        """It is not."""

    def _stalled(self) -> None:
        """There is no next membership."""

    def _arm(self) -> None:
        """See to it that its machine gets its ticks. One wake is scheduled at a time, the earliest that was asked for;
        what it finds is asked for again.
        """
        due = self.mind.due(self.now()) if self.mind is not None else None
        if due is None:
            return
        timeline = self._world.timeline
        when = max((due - self._ahead) / self._rate, timeline.now + _SHORTEST) + self._world.network.lag(self.node)
        if self._wakes_at is None or when < self._wakes_at or self._wakes_at < timeline.now:
            self._wakes_at = when
            timeline.at(when, lambda: self._wake(when))

    def _wake(self, when: float) -> None:
        if self._wakes_at != when:
            return  # an earlier one has come in between
        self._wakes_at = None
        self.when_running(self._tick)

    def _tick(self) -> None:
        due = self.mind.due(self.now()) if self.mind is not None else None
        if due is not None and due <= self.now() + 1e-9:
            self.happens(Tick())
        else:
            self._arm()
