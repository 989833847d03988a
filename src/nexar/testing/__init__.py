"""Tools for tests: time that a test owns, faults that a test describes. Shipped; nothing inside nexar imports them."""

from nexar.testing.faults import Cut, Delay, DoubleDial, Fault, Faults, RefuseDial, SilentDial, Stall, partition
from nexar.testing.virtual_clock import VirtualClock

__all__ = [
    "Cut",
    "Delay",
    "DoubleDial",
    "Fault",
    "Faults",
    "RefuseDial",
    "SilentDial",
    "Stall",
    "VirtualClock",
    "partition",
]
