"""How much each lane may hold back for a peer that does not take it. Pure."""

from __future__ import annotations

from typing import Final

from nexar.wire.frame import Lane

BUDGET_BYTES: Final[dict[Lane, int]] = {Lane.CONTROL: 1 << 20, Lane.RPC: 16 << 20}
"""Data needs none: its credit bounds it, wherever it waits."""


def admits(lane: Lane, queued_bytes: int, size_bytes: int) -> bool:
    """May a frame of that size still join what the lane holds back? One frame always may, however large."""
    budget = BUDGET_BYTES.get(lane)
    return budget is None or queued_bytes == 0 or queued_bytes + size_bytes <= budget
