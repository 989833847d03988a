"""What can happen to things on their way, in the memory network's words. `testing.faults` makes the weather."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol


class Way(NamedTuple):
    """From one node to another."""

    source: int
    destination: int


class Verdict(Enum):
    """What becomes of the next thing on a way."""

    PASS = "pass"
    HOLD = "hold"  # nothing is delivered until the weather changes
    CUT = "cut"  # the carrier breaks, and both ends are told
    DOUBLE = "double"  # dials only: the listener sees two of them


class Weather(Protocol):
    """Decides what happens between sending and taking. A network without weather delivers everything at once.

    Called from any thread, under no lock of the transport; answers at once.
    """

    def delay(self, way: Way) -> float:
        """Seconds between sending a frame, a payload or an end, and the moment it may be taken."""
        ...

    def judge(self, way: Way, frames: int, payload_bytes: int) -> Verdict:
        """The fate of what comes next on a carrier that has delivered so much on this way."""
        ...

    def judge_dial(self, way: Way) -> Verdict:
        """CUT: refused. HOLD: no answer until the dialer's deadline."""
        ...
