"""Faults as values, and the weather they make on a memory network.

    faults = Faults(network, Delay(0.2), Cut(source=1, destination=2, after_frames=10))
    faults.add(*partition({1, 2}, {3}))
    faults.clear()

Each fault says on which way it acts; a node left out means every node. Counts are of one carrier, in that direction.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from nexar.transport.memory import DeliveryFault, Direction, MemoryNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What all faults have: where they act."""

    source: int | None = None
    destination: int | None = None

    def concerns(self, way: Direction) -> bool:
        """Whether it acts on that way."""
        return self.source in (None, way.source) and self.destination in (None, way.destination)


@dataclass(frozen=True, slots=True)
class LinkDelay(Fault):
    """Everything arrives `seconds` later, in order. Several delays add up."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted(Fault):
    after_frames: int = 0
    after_payload_bytes: int = 0

    def strikes(self, frames: int, payload_bytes: int) -> bool:
        """Whether so much has passed that it is time."""
        return frames >= self.after_frames and payload_bytes >= self.after_payload_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStall(_Counted):
    """Nothing arrives any more, and nobody is told: what a pulled cable looks like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCut(_Counted):
    """The carrier breaks and both ends see it. With `after_payload_bytes`: in the middle of a payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseDial(Fault):
    """A dial is refused at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentDial(Fault):
    """A dial gets no answer, until the dialer's deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleDial(Fault):
    """The listener accepts two carriers for one dial; the dialer drops the first."""


_DIALS: Final[dict[type[Fault], DeliveryFault]] = {
    RefuseDial: DeliveryFault.CUT,
    SilentDial: DeliveryFault.HOLD,
    DoubleDial: DeliveryFault.DOUBLE,
}


def partition(one: Collection[int], other: Collection[int]) -> list[Fault]:
    """The faults that keep two sets of nodes from hearing of each other, dials included."""
    ways = [(a, b) for a in one for b in other] + [(b, a) for a in one for b in other]
    return [kind(source=a, destination=b) for a, b in ways for kind in (LinkStall, SilentDial)]


class Faults:
    """Makes the weather of a network from faults in force. Every method may be called from any thread."""

    def __init__(self, network: MemoryNetwork, *faults: Fault) -> None:
        self._network = network
        self._faults = faults  # replaced as a whole by add(), remove() and clear()
        network.fault_model = self
        network.changed()

    def add(self, *faults: Fault) -> None:
        """From now on these too."""
        self._replace((*self._faults, *faults))

    def remove(self, *faults: Fault) -> None:
        """These no longer."""
        self._replace(tuple(fault for fault in self._faults if fault not in faults))

    def clear(self) -> None:
        """None any more: what was held back goes on."""
        self._replace(())

    def delay(self, way: Direction) -> float:
        """See `Weather`."""
        return sum(fault.seconds for fault in self._faults if isinstance(fault, LinkDelay) and fault.concerns(way))

    def judge(self, way: Direction, frames: int, payload_bytes: int) -> DeliveryFault:
        """See `Weather`. A cut is stronger than a stall."""
        verdict = DeliveryFault.PASS
        for fault in self._faults:
            if isinstance(fault, LinkStall | LinkCut) and fault.concerns(way) and fault.strikes(frames, payload_bytes):
                if isinstance(fault, LinkCut):
                    return DeliveryFault.CUT
                verdict = DeliveryFault.HOLD
        return verdict

    def judge_dial(self, way: Direction) -> DeliveryFault:
        """See `Weather`. The first fault that concerns dials decides."""
        verdicts = (_DIALS[type(fault)] for fault in self._faults if type(fault) in _DIALS and fault.concerns(way))
        return next(verdicts, DeliveryFault.PASS)

    def _replace(self, faults: tuple[Fault, ...]) -> None:
        self._faults = faults
        self._network.changed()
