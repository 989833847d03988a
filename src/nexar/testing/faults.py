"""Injects faults into a memory network.

    faults = Faults(network, LinkDelay(0.2), LinkCut(source=1, destination=2, after_frames=10))
    faults.add(*partition({1, 2}, {3}))
    faults.clear()

An omitted node means every node. Counts are per carrier and direction.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from nexar.transport.memory import DeliveryFault, Direction, MemoryNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault on one direction between two nodes."""

    source: int | None = None
    destination: int | None = None

    def concerns(self, direction: Direction) -> bool:
        return self.source in (None, direction.source) and self.destination in (None, direction.destination)


@dataclass(frozen=True, slots=True)
class LinkDelay(Fault):
    """Everything arrives `seconds` later, in order. Delays add up."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted(Fault):
    after_frames: int = 0
    after_payload_bytes: int = 0

    def is_due(self, frames: int, payload_bytes: int) -> bool:
        """Whether enough frames and bytes have passed."""
        return frames >= self.after_frames and payload_bytes >= self.after_payload_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStall(_Counted):
    """Nothing arrives and nobody is notified, as with a pulled cable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCut(_Counted):
    """The carrier breaks, also within a payload; both ends see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseDial(Fault):
    """A dial is refused at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentDial(Fault):
    """A dial gets no answer before the dialer's deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleDial(Fault):
    """The listener accepts two carriers for one dial; the dialer drops the first."""


_DIALS: Final[dict[type[Fault], DeliveryFault]] = {
    RefuseDial: DeliveryFault.CUT,
    SilentDial: DeliveryFault.HOLD,
    DoubleDial: DeliveryFault.DOUBLE,
}


def partition(one: Collection[int], other: Collection[int]) -> list[Fault]:
    """Separates two sets of nodes in both directions, dials included."""
    directions = [(a, b) for a in one for b in other] + [(b, a) for a in one for b in other]
    return [kind(source=a, destination=b) for a, b in directions for kind in (LinkStall, SilentDial)]


class Faults:
    """The fault model of a network. Any thread may call its methods."""

    def __init__(self, network: MemoryNetwork, *faults: Fault) -> None:
        self._network = network
        self._faults = faults  # add(), remove() and clear() replace it as a whole
        network.fault_model = self
        network.changed()

    def add(self, *faults: Fault) -> None:
        self._replace((*self._faults, *faults))

    def remove(self, *faults: Fault) -> None:
        self._replace(tuple(fault for fault in self._faults if fault not in faults))

    def clear(self) -> None:
        """Ends all faults; held frames are delivered."""
        self._replace(())

    def delay(self, direction: Direction) -> float:
        return sum(
            fault.seconds for fault in self._faults if isinstance(fault, LinkDelay) and fault.concerns(direction)
        )

    def decide(self, direction: Direction, frames: int, payload_bytes: int) -> DeliveryFault:
        """A cut takes precedence over a stall."""
        outcome = DeliveryFault.PASS
        for fault in self._faults:
            if (
                isinstance(fault, LinkStall | LinkCut)
                and fault.concerns(direction)
                and fault.is_due(frames, payload_bytes)
            ):
                if isinstance(fault, LinkCut):
                    return DeliveryFault.CUT
                outcome = DeliveryFault.HOLD
        return outcome

    def decide_dial(self, direction: Direction) -> DeliveryFault:
        """The first fault that concerns dials decides."""
        outcomes = (
            _DIALS[type(fault)] for fault in self._faults if type(fault) in _DIALS and fault.concerns(direction)
        )
        return next(outcomes, DeliveryFault.PASS)

    def _replace(self, faults: tuple[Fault, ...]) -> None:
        self._faults = faults
        self._network.changed()
