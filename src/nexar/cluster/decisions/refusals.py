"""Refusals: their texts, and a bounded log of the newest."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Literal, TypeAlias

from nexar.wire.join import MAX_REASON_CHARACTERS, MAX_REFUSALS

RefusalCode: TypeAlias = Literal["", "full", "incompatible", "nobody_left", "not_elastic", "wrong_secret"]
"""What a program can act on; empty for the rest. They are sent: never reuse one."""
_MAX_TEXT: Final = 200  # characters kept of a reason; it may quote an unauthenticated peer


class Refusal(Exception):
    """The text is the reason, for people."""

    code: RefusalCode = ""  # of the class, unless the constructor gets another

    def __init__(self, reason: str, *further: str, expelled: int = 0, code: RefusalCode | None = None) -> None:
        """`further`: facts and remedies, one line each. `expelled`: it was a member until this epoch."""
        super().__init__("; ".join((reason, *further)))
        self.lines = "\n".join(brief(each) for each in (reason, *further))
        self.expelled = expelled
        self.code = self.code if code is None else code


class NoRanksLeft(Refusal):
    """The requester may wait if the cluster is elastic."""

    code = "full"


class RefusalLog:
    """The newest refusals, one per requester: bounded memory, and a repeated refusal displaces no other."""

    def __init__(self) -> None:
        self._newest: OrderedDict[str, str] = OrderedDict()  # by requester, its last refusal
        self.count = 0  # all refusals so far

    def __len__(self) -> int:
        return len(self._newest)

    def add(self, who: str, why: str) -> None:
        self._newest[who] = brief(why)
        self._newest.move_to_end(who)
        if len(self._newest) > MAX_REFUSALS:
            self._newest.popitem(last=False)
        self.count += 1

    def listed(self) -> dict[str, str]:
        return dict(self._newest)


def brief(text: str, most: int = _MAX_TEXT) -> str:
    """One printable line of at most `most` characters."""
    line = "".join(character if character.isprintable() else " " for character in text[: most + 1])
    return line if len(line) <= most else f"{line[: most - 1]}…"


def brief_lines(text: str, most: int = MAX_REASON_CHARACTERS) -> str:
    """As `brief`, but keeps line breaks."""
    cut = text if len(text) <= most else f"{text[: most - 1]}…"
    return "\n".join(brief(line, most) for line in cut.split("\n"))


def last_line(text: str) -> str:
    """The exception line of a traceback."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason was given")
