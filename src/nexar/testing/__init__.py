"""Test tools: a virtual clock and injected faults. Nothing else in nexar imports them."""

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
