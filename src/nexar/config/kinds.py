"""Kinds of setting: what values each takes, and how a text becomes one.

A kind has three parts: `accept` brings a Python value into its one normal form or raises `Refused`; `parse` does the
same for a text (an environment variable, a command-line option); `allowed` says in words what both take. Pure.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from nexar.types import real, whole

AUTO: Literal["auto"] = "auto"
_LONGEST = 1e9  # seconds, thirty years
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


class Refused(ValueError):
    """The value is none of this kind; the caller knows which setting it was meant for."""


class Kind(ABC):
    """The values one setting may have."""

    @property
    @abstractmethod
    def allowed(self) -> str:
        """What is taken, in words, for error messages and the reference."""

    @abstractmethod
    def accept(self, value: object) -> object:
        """The normal form of a Python value, or Refused."""

    def parse(self, text: str) -> object:
        """The value a text stands for. The text is trimmed and not empty: empty means unset and never comes here."""
        return self.accept(text)


@dataclass(frozen=True, slots=True)
class Seconds(Kind):
    """A duration, fractions allowed, as long as the system can wait: it counts nanoseconds in 64 bits."""

    zero: str = ""
    """What 0 means; empty: 0 is refused."""
    least: float = 0.0
    """Other than 0, it may be this short."""

    @property
    def allowed(self) -> str:
        if self.zero:
            return f"seconds, 0 to 1e9 (0 = {self.zero})"
        return f"seconds, {self.least:g} to 1e9" if self.least else "seconds above 0, at most 1e9"

    def accept(self, value: object) -> float:
        seconds = None if isinstance(value, bool) else real(value)
        if seconds is None or not self.least <= seconds <= _LONGEST or (seconds == 0 and not self.zero):
            raise Refused
        return seconds

    def parse(self, text: str) -> float:
        try:
            return self.accept(float(text))
        except ValueError:
            raise Refused from None


@dataclass(frozen=True, slots=True)
class Whole(Kind):
    """A whole number within limits."""

    least: int = 0
    most: int | None = None
    zero: str = ""
    """What 0 means, where it means something special."""

    @property
    def allowed(self) -> str:
        limits = f"{self.least} or more" if self.most is None else f"{self.least} to {self.most}"
        return f"a whole number, {limits}" + (f" (0 = {self.zero})" if self.zero else "")

    def accept(self, value: object) -> int:
        number = None if isinstance(value, bool) else whole(value)
        if number is None or number < self.least or (self.most is not None and number > self.most):
            raise Refused
        return number

    def parse(self, text: str) -> int:
        try:
            return self.accept(int(text))
        except ValueError:
            raise Refused from None


@dataclass(frozen=True, slots=True)
class Flag(Kind):
    """Yes or no."""

    @property
    def allowed(self) -> str:
        return "1/0, true/false, yes/no, on/off"

    def accept(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise Refused
        return value

    def parse(self, text: str) -> bool:
        word = text.lower()
        if word not in _TRUE | _FALSE:
            raise Refused
        return word in _TRUE


@dataclass(frozen=True, slots=True)
class Choice(Kind):
    """One word of a list, in any case; `aliases` are further spellings."""

    words: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def allowed(self) -> str:
        return ", ".join(self.words)

    def accept(self, value: object) -> str:
        if not isinstance(value, str):
            raise Refused
        word = dict(self.aliases).get(value.strip().lower(), value.strip().lower())
        if word not in self.words:
            raise Refused
        return word


@dataclass(frozen=True, slots=True)
class Or(Kind):
    """A word that stands for `value`, or a value of another kind: `auto` or a flag, `off` or a port."""

    word: str
    value: object
    other: Kind

    @property
    def allowed(self) -> str:
        return f"{self.word}, or {self.other.allowed}"

    def accept(self, value: object) -> object:
        if value == self.value or (isinstance(value, str) and value.strip().lower() == self.word):
            return self.value
        return self.other.accept(value)

    def parse(self, text: str) -> object:
        return self.value if text.lower() == self.word else self.other.parse(text)


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """A text of a given form; unset (None) unless given. Its case is kept."""

    form: str
    """What it is, in words."""
    pattern: str = r"(?s).+"

    @property
    def allowed(self) -> str:
        return self.form

    def accept(self, value: object) -> str | None:
        if value is None:
            return None
        if not isinstance(value, str) or not re.fullmatch(self.pattern, value.strip()):
            raise Refused
        return value.strip()
