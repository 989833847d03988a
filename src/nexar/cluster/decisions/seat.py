"""The seed's seat among the voters: words of members go to the witness, and what it wants is done on their lines. Pure.

Law: a vote is on the disk before it is said. So KeepVote comes before every word that follows from it.

A member is asked on its line whether it is there. One whose line has broken is not: the system tells when a process
ends. One that has not yet come back to a seed that was started again has as long as an answer may take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from nexar.cluster.change import Change
from nexar.cluster.decisions.admission_events import KeepVote, Tell
from nexar.cluster.decisions.guest import Guest
from nexar.cluster.decisions.succession_events import Adopt, Event, Heard, Probe, Probed, Say, Tick, Word
from nexar.cluster.decisions.witness import Witness
from nexar.types import NodeId, format_seconds
from nexar.wire import joining
from nexar.wire.joining import MAX_WORD_BYTES, AreYouThere
from nexar.wire.messages import MAX_MESSAGE_BYTES, encode

PROBE_TIMEOUT: Final = 1.0
"""Seconds for a member to say that it is there."""

Deed: TypeAlias = KeepVote | Tell | Change
"""What to do, in this order. A Change was chosen: the membership moves on."""


@dataclass(frozen=True, slots=True)
class _Probe:
    number: int
    deadline: float


class Seat:
    """`lines` are the members that are connected; what it says goes to them alone."""

    def __init__(self, witness: Witness, lines: Mapping[NodeId, Guest], is_awaited: Callable[[NodeId], bool]) -> None:
        """`is_awaited`: whether a member without a line may still come back to a seed that was started again."""
        self._witness = witness
        self._lines = lines
        self._is_awaited = is_awaited
        self._kept = witness.vote
        self._probes: dict[NodeId, _Probe] = {}
        self._number = 0

    def heard(self, sender: NodeId, word: Word, now: float) -> list[Deed]:
        """A member said it."""
        return self._take([Heard(sender, word)], now)

    def answered(self, node: NodeId, number: int, now: float) -> list[Deed]:
        """A member says that it is there. What was not asked, or long ago, is ignored."""
        probe = self._probes.get(node)
        return self._settle(node, None, now) if probe is not None and probe.number == number else []

    def lost(self, node: NodeId, cause: str, now: float) -> list[Deed]:
        """The line of a member has broken."""
        return self._settle(node, cause, now) if node in self._probes else []

    def returned(self, node: NodeId) -> list[Deed]:
        """A member is back: one that was missed is asked on its new line."""
        return [self._ask(node, self._probes[node].number)] if node in self._probes else []

    def tick(self, now: float) -> list[Deed]:
        """Time has passed."""
        late = [node for node, probe in self._probes.items() if probe.deadline <= now]
        cause = f"it did not answer the seed within {format_seconds(PROBE_TIMEOUT)}"
        settled = [deed for node in late for deed in self._settle(node, cause, now)]
        return settled + self._take([Tick()], now)

    def due(self, now: float) -> float | None:
        """When the next tick is needed."""
        times = [probe.deadline for probe in self._probes.values()]
        witness = self._witness.due(now)
        return min(times if witness is None else [*times, witness], default=None)

    def _settle(self, node: NodeId, cause: str | None, now: float) -> list[Deed]:
        del self._probes[node]
        return self._take([Probed(node, cause)], now)

    def _take(self, events: list[Event], now: float) -> list[Deed]:
        deeds: list[Deed] = []
        while events:
            actions = self._witness.step(events.pop(0), now)
            vote = self._witness.vote
            if vote.promised is not None and vote != self._kept:
                deeds.append(KeepVote(vote))
            self._kept = vote
            for action in actions:
                if isinstance(action, Probe):
                    self._probe(action.node, now, events, deeds)
                elif isinstance(action, Adopt):
                    deeds.append(action.change)
            deeds += self._said(action for action in actions if isinstance(action, Say))
        return deeds

    def _probe(self, node: NodeId, now: float, events: list[Event], deeds: list[Deed]) -> None:
        if node in self._probes:
            return
        if node not in self._lines and not self._is_awaited(node):
            events.append(Probed(node, "it has no line to the seed"))
            return
        self._number += 1
        self._probes[node] = _Probe(self._number, now + PROBE_TIMEOUT)
        if node in self._lines:
            deeds.append(self._ask(node, self._number))

    def _ask(self, node: NodeId, number: int) -> Tell:
        return Tell(AreYouThere(number), (self._lines[node].connection,))

    def _said(self, says: Iterable[Say]) -> list[Deed]:
        """A word for many is one message for many. Who has no line hears it from the others."""
        listeners: dict[int, tuple[Word, list[int]]] = {}
        for say in says:
            if say.node in self._lines:
                _, connections = listeners.setdefault(id(say.word), (say.word, []))
                connections.append(self._lines[say.node].connection)
        return [tell for word, to in listeners.values() if (tell := _tell(word, to)) is not None]


def _tell(word: Word, connections: list[int]) -> Tell | None:
    """None for what is too long to be said here: members carry it among themselves."""
    body = encode(word)
    return Tell(joining.Word(body), tuple(connections)) if len(body) <= min(MAX_WORD_BYTES, MAX_MESSAGE_BYTES) else None
