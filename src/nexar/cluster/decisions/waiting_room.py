"""Those who knocked and have not proven anything yet: few, and for a short time.

Law: a stranger costs one entry here, for at most `timeout`, and there are at most `capacity` of them. When one more
comes it is let in at the cost of another: the oldest that has said nothing, else the oldest. So whoever knocks always
gets its turn, and who speaks at once is not pushed out by those who are silent.

Everybody has the same time, so the order of arrival is the order of the deadlines: the first is the next to go.
"""

from __future__ import annotations

from collections import OrderedDict


class WaitingRoom:
    """Connections without a name, in the order in which they came. Each operation takes constant time."""

    def __init__(self, capacity: int, timeout: float) -> None:
        self._capacity = capacity
        self._timeout = timeout
        self._deadlines: OrderedDict[int, float] = OrderedDict()
        self._silent: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, connection: int) -> bool:
        return connection in self._deadlines

    def enter(self, connection: int, now: float) -> int | None:
        """Somebody came; the connection that has to go for it, if there was no room. It has been taken out."""
        displaced = self._make_room() if len(self._deadlines) >= self._capacity else None
        self._deadlines[connection] = now + self._timeout
        self._silent[connection] = None
        return displaced

    def spoke(self, connection: int) -> None:
        """It has said something that makes sense."""
        self._silent.pop(connection, None)

    def leave(self, connection: int) -> None:
        """It is no stranger any more, or not here. Without effect if it was not waiting."""
        self._deadlines.pop(connection, None)
        self._silent.pop(connection, None)

    def expired(self, now: float) -> list[int]:
        """Those whose time is over, the oldest first. They have been taken out."""
        gone = []
        while (deadline := self.next_deadline) is not None and deadline <= now:
            oldest = next(iter(self._deadlines))
            self.leave(oldest)
            gone.append(oldest)
        return gone

    @property
    def next_deadline(self) -> float | None:
        """When the next one's time is over; None: nobody waits."""
        return next(iter(self._deadlines.values()), None)

    def _make_room(self) -> int:
        chosen = next(iter(self._silent or self._deadlines))
        self.leave(chosen)
        return chosen
