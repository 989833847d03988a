"""What the seed was told about its door. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from nexar.cluster.decisions.compatibility import ClockLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorRules:
    """Who may come in, besides those who form the cluster, and how many may wait at the door."""

    max_pending: int = 256
    auth_timeout: float = 10.0
    elastic: bool = False
    """Others may come in after it has formed."""
    most: int = 0
    """Members and those who wait to be: not more; 0: any number."""
    clocks: ClockLimits = field(default_factory=ClockLimits)
    """By how much a candidate's clock may differ from the seed's."""
