"""Tools for tests: time that a test owns, faults that a test describes. Shipped; nothing inside nexar imports them."""

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
