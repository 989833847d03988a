"""What the seed was told about its door. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from nexar.cluster.decisions.compatibility import ClockLimits
from nexar.transport.pending_connections import Choose

_PROOF_SHARE: Final = 3


def _first(connections: Sequence[int]) -> int:
    return connections[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorRules:
    """Who may come in, besides those who form the cluster, and how many may wait at the door."""

    max_pending: int = 256
    auth_timeout: float = 10.0
    choose: Choose = _first
    """Picks the pending connection that gives way. A seed's choice is random: nobody can arrange to outlast others."""
    elastic: bool = False
    """Others may come in after it has formed."""
    most: int = 0
    """Members and those who wait to be: not more; 0: any number."""
    clocks: ClockLimits = field(default_factory=ClockLimits)
    """By how much a candidate's clock may differ from the seed's."""

    @property
    def proof_timeout(self) -> float:
        """Seconds from a hello to its proof: one round trip and a computation, so less than for all of it."""
        return self.auth_timeout / _PROOF_SHARE
