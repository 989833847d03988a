"""One line of text that others may show: what it may hold, and how any text becomes one. Pure.

Law: what `line` gives matches ONE_LINE, whatever it was given. A character that does not show itself has no place in a
line: not only what moves the cursor of a terminal, but also what turns the direction of writing round or has no width.
With those a member could make its row look like another's.

Text that somebody else wrote and that will stand in our errors and logs.
"""

from __future__ import annotations

import re
from typing import Final

from nexar.errors import printable

# The categories Cc, Cf, Cs, Zl and Zp of Unicode, and a few places that it keeps for more of them.
_HIDDEN: Final = (
    r"\x00-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u2028-\u202e"
    r"\u2060-\u206f\ud800-\udfff\ufeff\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001345f\U0001bca0-\U0001bca3"
    r"\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
ONE_LINE: Final = rf"\A[^{_HIDDEN}]*\Z"
"""A pattern for fields of messages."""
FEW_LINES: Final = rf"\A(?:[^{_HIDDEN}]|\n)*\Z"
"""Likewise, for texts that people read as several lines."""
_hidden: Final = re.compile(f"[{_HIDDEN}]")


def line(text: str, most: int = 120) -> str:
    """`text` as one printable line, cut where it is too long."""
    plain = _hidden.sub(" ", text)
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"


def few_lines(text: str, most: int = 1000) -> str:
    """`text` as printable lines, cut where it is too long."""
    plain = "\n".join(_hidden.sub(" ", each) for each in text.split("\n"))
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"


def foreign_line(text: str) -> str:
    """`text` with a space for whatever does not print: nobody writes a second line, or a colour, into our logs."""
    return "".join(character if character.isprintable() else " " for character in text)


def foreign_lines(text: str) -> str:
    """The same for a text that may have several lines, as a traceback has."""
    return printable(text)
