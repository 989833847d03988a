"""Who was turned away, and why: the newest, and how many there were. A flood of strangers fills no memory, and one
that is turned away again and again hides nobody else.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from nexar.wire.join import MAX_REASON_CHARACTERS, MAX_REFUSALS

_MAX_TEXT: Final = 200
"""Characters of a reason that are kept; it may quote what a stranger sent."""


class Refusal(Exception):
    """Somebody cannot have what it asked for. The text says why, and is meant for them."""

    def __init__(self, reason: str, *further: str, expelled: int = 0, nobody_left: bool = False) -> None:
        """`further`: facts and remedies for lines of their own. `expelled`: it was a member until this epoch.
        `nobody_left`: every member has left or died.
        """
        super().__init__("; ".join((reason, *further)))
        self.lines = "\n".join(brief(each) for each in (reason, *further))
        """What it says, for people."""
        self.expelled = expelled
        self.nobody_left = nobody_left


class NoRanksLeft(Refusal):
    """So many places are not left. Where others may come in later, this need not be the end."""


class RefusalLog:
    """A list that forgets its oldest."""

    def __init__(self) -> None:
        self._newest: OrderedDict[str, str] = OrderedDict()  # by who, the last time they came
        self.count = 0
        """All that ever were."""

    def __len__(self) -> int:
        return len(self._newest)

    def add(self, who: str, why: str) -> None:
        """One more."""
        self._newest[who] = brief(why)
        self._newest.move_to_end(who)
        if len(self._newest) > MAX_REFUSALS:
            self._newest.popitem(last=False)
        self.count += 1

    def listed(self) -> dict[str, str]:
        """Those that are remembered: who, and why (the last time)."""
        return dict(self._newest)


def brief(text: str, most: int = _MAX_TEXT) -> str:
    """One line of at most `most` characters, whatever was in it: fit for a log and for a Refused message."""
    line = "".join(character if character.isprintable() else " " for character in text[: most + 1])
    return line if len(line) <= most else f"{line[: most - 1]}…"


def brief_lines(text: str, most: int = MAX_REASON_CHARACTERS) -> str:
    """As `brief`, but its line breaks stay: fit for a FormationFailed message."""
    cut = text if len(text) <= most else f"{text[: most - 1]}…"
    return "\n".join(brief(line, most) for line in cut.split("\n"))


def last_line(text: str) -> str:
    """Of a traceback, what was raised."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason was given")
