"""Two members and the one connection between them, as one of the two sees it. Pure: events in, what to do out.

Both may dial at any moment, also at the same one, and answers take their time. Law: of two dials that of the lower node
stays.

- Who has opened the connection, or has welcomed the peer's dial and waits for its next word, does not dial.
- The lower node lets an introduction wait while its own dial is under way. If that one opens, the peer is told that
  its dial is superseded; if it fails, the peer's is welcomed.
- The higher node welcomes at once, also while it dials: its own introduction waits at the other side.
- Who has it open already tells the dialer that it is superseded: the dialer has welcomed us, and is about to hear so.

So no side ever makes a link of two connections, and both make a link of the same one. If a connection breaks before it
was a link, whoever wants one begins anew. Connections are not ordered among one another: a dial that was given up may
be heard of after the one that followed it. So all of a peer's dials are welcome until it goes on with one of them; it
goes on with one only.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Generic, NamedTuple, TypeVar

Dialer = TypeVar("Dialer")
_GONE: Final = "it holds on to a connection that is lost on this side"


class Turn(Enum):
    """What somebody does who wants the link."""

    OPEN = "open"  # use it
    WAIT = "wait"  # something is under way
    DIAL = "dial"  # and say `dialed` when it is over


class Fate(Enum):
    """What becomes of a dial of the peer."""

    WELCOME = "welcome"
    HOLD = "hold"  # no answer yet
    SUPERSEDED = "superseded"  # our own has won


class Sentence(NamedTuple, Generic[Dialer]):
    """Who is to be told, and what."""

    dialer: Dialer
    fate: Fate


class Pairing(Generic[Dialer]):
    """One peer. `Dialer` stands for a connection on which the peer has introduced itself."""

    def __init__(self, *, lower: bool) -> None:
        """`lower`: this node has the lower id of the two."""
        self._lower = lower
        self.open = False
        """For good: what becomes of a link later is the link's business."""
        self.cause: str | None = None
        """Why our last dial failed."""
        self.failures = 0
        """How many did."""
        self._dialing = False
        self._welcomed: list[Dialer] = []  # few: who keeps connections keeps few of each peer
        self._held: list[Dialer] = []

    @property
    def pending(self) -> bool:
        """Whether something is under way that may open it."""
        return not self.open and (self._dialing or bool(self._welcomed))

    @property
    def waiting(self) -> list[Dialer]:
        """The peer's dials that may still become the link, or are still to be answered."""
        return [*self._welcomed, *self._held]

    def want(self) -> Turn:
        """Somebody wants the link."""
        if self.open:
            return Turn.OPEN
        if self.pending:
            return Turn.WAIT
        self._dialing = True
        return Turn.DIAL

    def dialed(self, *, opened: bool, cause: str | None = None) -> list[Sentence[Dialer]]:
        """Our dial is over. `cause`: it failed; neither opened nor failed: the peer says that its own has won.

        The answers are for dials of the peer that waited for this.
        """
        self._dialing = False
        self.open = self.open or opened
        if cause is None and not self.open and not self._welcomed:
            cause = _GONE  # or the next dial would be told the same, and so on
        if cause is not None:
            self.failures += 1
            self.cause = cause
        held, self._held = self._held, []
        return [Sentence(dialer, self._judge(dialer)) for dialer in held]

    def introduced(self, dialer: Dialer) -> Fate:
        """The peer has dialed us."""
        if self._dialing and self._lower and not self.open:
            self._held.append(dialer)
            return Fate.HOLD
        return self._judge(dialer)

    def welcomes(self, dialer: Dialer) -> bool:
        """Whether this connection is the link as soon as the peer says another word."""
        return dialer in self._welcomed and not self.open

    def confirmed(self, dialer: Dialer) -> None:
        """The peer went on, on a connection that is welcome: it is the link."""
        self.ended(dialer)
        self.open = True

    def ended(self, dialer: Dialer) -> None:
        """A connection of the peer came to nothing."""
        for dials in (self._welcomed, self._held):
            if dialer in dials:
                dials.remove(dialer)

    def _judge(self, dialer: Dialer) -> Fate:
        if self.open:
            return Fate.SUPERSEDED
        self._welcomed.append(dialer)
        return Fate.WELCOME
