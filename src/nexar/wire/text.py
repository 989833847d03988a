"""Restrict text from other nodes to printable lines.

`line` and ONE_LINE exclude invisible characters, also direction overrides and zero-width ones: a member could use them
to imitate another's row.
"""

from __future__ import annotations

import re
from typing import Final

from nexar.errors import printable

# The Unicode categories Cc, Cf, Cs, Zl and Zp, and some code points reserved for them.
_HIDDEN: Final = (
    r"\x00-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u2028-\u202e"
    r"\u2060-\u206f\ud800-\udfff\ufeff\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001345f\U0001bca0-\U0001bca3"
    r"\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
ONE_LINE: Final = rf"\A[^{_HIDDEN}]*\Z"  # pattern for message fields
FEW_LINES: Final = rf"\A(?:[^{_HIDDEN}]|\n)*\Z"  # pattern for message fields with several lines
_hidden: Final = re.compile(f"[{_HIDDEN}]")


def line(text: str, most: int = 120) -> str:
    """Return one printable line of at most `most` characters."""
    plain = _hidden.sub(" ", text)
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"


def few_lines(text: str, most: int = 1000) -> str:
    """Return printable lines of at most `most` characters in all."""
    plain = "\n".join(_hidden.sub(" ", each) for each in text.split("\n"))
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"


def foreign_line(text: str) -> str:
    """Return `text` with spaces for unprintable characters: it cannot add lines or colours to our logs."""
    return "".join(character if character.isprintable() else " " for character in text)


def foreign_lines(text: str) -> str:
    """Return several lines without unprintable characters."""
    return printable(text)
