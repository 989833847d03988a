"""How much a sender may send before the receiver has asked for it. Pure arithmetic.

Law: for each (peer, communicator) the bytes of frames sent and not yet consumed never exceed the credit. Small
messages stop above a reserve and become envelopes; envelopes use the reserve; when even that is used up, sends
wait. So one unread conversation never stops another, and what a peer can make us hold is bounded.
"""

from __future__ import annotations

MIN_CREDIT_BYTES = 262_144
"""What every receiver grants. A sender assumes no more until the receiver has said more; so settings may differ."""
_RETURN_FRACTION = 4
_RESERVE_FRACTION = 4


class SendCredit:
    """What I may still send to one peer in one communicator."""

    __slots__ = ("available", "limit", "reserve")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.available = limit
        self.reserve = limit // _RESERVE_FRACTION

    def take_whole(self, cost: int) -> bool:
        """Room for a message that travels whole?"""
        if self.available - cost < self.reserve:
            return False
        self.available -= cost
        return True

    def take_envelope(self, cost: int) -> bool:
        """Room for an envelope?"""
        if self.available < cost:
            return False
        self.available -= cost
        return True

    def raise_limit(self, amount: int) -> None:
        """The receiver allows more than was assumed."""
        self.limit += amount
        self.available += amount
        self.reserve = self.limit // _RESERVE_FRACTION

    def give_back(self, amount: int) -> bool:
        """The receiver consumed that much. False: more than was ever taken, so the peer is wrong."""
        self.available += amount
        return self.available <= self.limit


class ReceiveCredit:
    """What one peer may still send to me in one communicator, and what I owe it back."""

    __slots__ = ("comfort", "held", "limit", "owed", "threshold")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.threshold = limit // _RETURN_FRACTION
        self.comfort = limit - self.threshold  # above this the peer may have less than a quarter left
        self.held = 0
        self.owed = 0

    def arrived(self, cost: int) -> bool:
        """A frame came. False: the peer overdrew its credit."""
        self.held += cost
        return self.held <= self.limit

    def consumed(self, cost: int) -> int:
        """A frame's memory is free again. Returns how much to give back now.

        Small amounts are saved up, but only while the peer has plenty left: of a credit that others hold unread, the
        last part must circulate, or it would run dry with all of it owed here.
        """
        owed = self.owed + cost
        if owed < self.threshold and self.held <= self.comfort:
            self.owed = owed
            return 0
        self.owed = 0
        self.held -= owed
        return owed


class EarlyBudget:
    """Bytes of large messages that a node takes in although nobody has asked for them yet."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def reserve(self, size: int) -> bool:
        """Room for `size` more?"""
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def exceed(self, size: int) -> None:
        """`size` more, room or not: a receive that was cancelled leaves its message here. Others wait until it fits."""
        self.used += size

    def release(self, size: int) -> None:
        """Those bytes were consumed, or will not come."""
        self.used -= size
