"""Text that somebody else wrote and that will stand in our errors and logs."""

from __future__ import annotations

from nexar.errors.base import printable


def one_line(text: str) -> str:
    """`text` with a space for whatever does not print: nobody writes a second line, or a colour, into our logs."""
    return "".join(character if character.isprintable() else " " for character in text)


def several_lines(text: str) -> str:
    """The same for a text that may have several lines, as a traceback has."""
    return printable(text)
