"""Injected faults and a virtual clock for tests on the memory transport. Nothing else in nexar imports this package."""

from nexar.testing.faults import (
    DoubleDial,
    Fault,
    Faults,
    LinkCut,
    LinkDelay,
    LinkStall,
    RefuseDial,
    SilentDial,
    partition,
)
from nexar.testing.virtual_clock import VirtualClock

__all__ = [
    "DoubleDial",
    "Fault",
    "Faults",
    "LinkCut",
    "LinkDelay",
    "LinkStall",
    "RefuseDial",
    "SilentDial",
    "VirtualClock",
    "partition",
]
