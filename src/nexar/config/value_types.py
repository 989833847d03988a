"""Types of settings. Pure.

`accept` brings a Python value into its normal form or raises `ValueRefused`; `parse` does the same for a text;
`allowed` says in words what both take.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nexar.types import real, whole

AUTO: Literal["auto"] = "auto"
_LONGEST = 1e9  # seconds: thirty years
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


class ValueRefused(ValueError):
    """The value is not allowed."""


class ValueType(ABC):
    """The values one setting may have."""

    @property
    @abstractmethod
    def allowed(self) -> str: ...

    @abstractmethod
    def accept(self, value: object) -> object:
        """ValueRefused if it is not allowed."""

    def parse(self, text: str) -> object:
        """The text is trimmed and not empty: an empty variable counts as unset."""
        return self.accept(text)


@dataclass(frozen=True, slots=True)
class Seconds(ValueType):
    """A duration, bounded by what the system can wait: it counts nanoseconds in 64 bits."""

    zero: str = ""
    """What 0 means; empty: 0 is not allowed."""
    least: float = 0.0
    """The minimum, other than 0."""

    @property
    def allowed(self) -> str:
        if self.zero:
            return f"seconds, 0 to 1e9 (0 = {self.zero})"
        return f"seconds, {self.least:g} to 1e9" if self.least else "seconds above 0, at most 1e9"

    def accept(self, value: object) -> float:
        seconds = None if isinstance(value, bool) else real(value)
        if seconds is None or not self.least <= seconds <= _LONGEST or (seconds == 0 and not self.zero):
            raise ValueRefused
        return seconds

    def parse(self, text: str) -> float:
        try:
            return self.accept(float(text))
        except ValueError:
            raise ValueRefused from None


@dataclass(frozen=True, slots=True)
class Integer(ValueType):
    """A whole number within limits."""

    least: int = 0
    most: int | None = None
    zero: str = ""
    """What 0 means, if it is special."""

    @property
    def allowed(self) -> str:
        limits = f"{self.least} or more" if self.most is None else f"{self.least} to {self.most}"
        return f"a whole number, {limits}" + (f" (0 = {self.zero})" if self.zero else "")

    def accept(self, value: object) -> int:
        number = None if isinstance(value, bool) else whole(value)
        if number is None or number < self.least or (self.most is not None and number > self.most):
            raise ValueRefused
        return number

    def parse(self, text: str) -> int:
        try:
            return self.accept(int(text))
        except ValueError:
            raise ValueRefused from None


@dataclass(frozen=True, slots=True)
class Flag(ValueType):
    """Yes or no."""

    @property
    def allowed(self) -> str:
        return "1/0, true/false, yes/no, on/off"

    def accept(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueRefused
        return value

    def parse(self, text: str) -> bool:
        word = text.lower()
        if word not in _TRUE | _FALSE:
            raise ValueRefused
        return word in _TRUE


@dataclass(frozen=True, slots=True)
class Choice(ValueType):
    """One word of a list, in any case; `aliases` are further spellings."""

    words: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def allowed(self) -> str:
        return ", ".join(self.words)

    def accept(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueRefused
        word = dict(self.aliases).get(value.strip().lower(), value.strip().lower())
        if word not in self.words:
            raise ValueRefused
        return word


@dataclass(frozen=True, slots=True)
class WordOr(ValueType):
    """A word that stands for `value`, or a value of another type."""

    word: str
    value: object
    other: ValueType

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
class Text(ValueType):
    """A text of a given form, or None. Its case is kept."""

    form: str
    """Description for `allowed`."""
    pattern: str = r"(?s).+"

    @property
    def allowed(self) -> str:
        return self.form

    def accept(self, value: object) -> str | None:
        if value is None:
            return None
        if not isinstance(value, str) or not re.fullmatch(self.pattern, value.strip()):
            raise ValueRefused
        return value.strip()


_PORTS = range(1, 65536)


@dataclass(frozen=True, slots=True)
class Token(ValueType):
    """A secret that users made. Length and alphabet bound its strength only from above."""

    @property
    def allowed(self) -> str:
        return "a random text of at least 128 bits, such as `python3 -c 'import secrets; print(secrets.token_hex(32))'`"

    def accept(self, value: object) -> str | None:
        if value is None:
            return None
        if not isinstance(value, str) or _most_bits(value.strip()) < 128:
            raise ValueRefused
        return value.strip()


@dataclass(frozen=True, slots=True)
class Endpoint(ValueType):
    """Host and port as text, or None."""

    @property
    def allowed(self) -> str:
        return "HOST:PORT, an IPv6 address in brackets, the port from 1 to 65535"

    def accept(self, value: object) -> str | None:
        if value is None:
            return None
        text = value.strip() if isinstance(value, str) else ""
        found = re.fullmatch(r"(?:\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s:\[\]]+):([0-9]{1,5})", text)
        if not found or int(found[1]) not in _PORTS:
            raise ValueRefused
        return text


@dataclass(frozen=True, slots=True)
class Topology(ValueType):
    """Which pairs of ranks have a data link."""

    @property
    def allowed(self) -> str:
        return "full_mesh, hypercube, or k_regular:K with K even and at least 2"

    def accept(self, value: object) -> str:
        name = value.strip().lower() if isinstance(value, str) else ""
        degree = re.fullmatch(r"k_regular:([0-9]{1,9})", name)
        if degree and int(degree[1]) >= 2 and int(degree[1]) % 2 == 0:
            return f"k_regular:{int(degree[1])}"
        if name not in {"full_mesh", "hypercube"}:
            raise ValueRefused
        return name


@dataclass(frozen=True, slots=True)
class Schemes(ValueType):
    """Names of transports in order of preference. Any name is accepted: third parties may register more."""

    default: tuple[str, ...]

    @property
    def allowed(self) -> str:
        default = ",".join(self.default)
        return f"names of transports, each once, separated by commas ({default}, or others that a package registers)"

    def accept(self, value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            value = value.split(",")
        if not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value):
            raise ValueRefused
        names = tuple(name.strip().lower() for name in value)
        if not names or len(set(names)) < len(names) or not all(re.fullmatch(r"[a-z][a-z0-9_+-]*", n) for n in names):
            raise ValueRefused
        return names


@dataclass(frozen=True, slots=True)
class PortRange(ValueType):
    """First and last port, both included, or None."""

    @property
    def allowed(self) -> str:
        return "FIRST-LAST, both ports from 1 to 65535"

    def accept(self, value: object) -> tuple[int, int] | None:
        if value is None:
            return None
        first, last = _pair(value, "-")
        if first not in _PORTS or last not in _PORTS or first > last:
            raise ValueRefused
        return first, last


@dataclass(frozen=True, slots=True)
class BufferTiers(ValueType):
    """A named profile of the buffer pool, or its tiers: (bytes, how many are kept)."""

    @property
    def allowed(self) -> str:
        return "training, inference, or tiers BYTES:COUNT separated by commas, sizes growing"

    def accept(self, value: object) -> str | tuple[tuple[int, int], ...]:
        if isinstance(value, str):
            if value.strip().lower() in {"training", "inference"}:
                return value.strip().lower()
            value = value.split(",")
        if not isinstance(value, Sequence) or not value:
            raise ValueRefused
        tiers = tuple(_pair(tier, ":") for tier in value)
        sizes = [size for size, _ in tiers]
        if sizes != sorted(set(sizes)) or sizes[0] < 1 or any(kept < 0 for _, kept in tiers):
            raise ValueRefused
        return tiers


def _most_bits(text: str) -> float:
    """The entropy if the text was drawn well. Few distinct characters mean that it was not."""
    alphabet = 16 if re.fullmatch(r"[0-9a-fA-F]*", text) else 64
    return len(text) * math.log2(alphabet) if len(set(text)) >= 8 else 0.0


def _pair(value: object, separator: str) -> tuple[int, int]:
    """Two whole numbers, from a sequence or a text."""
    if isinstance(value, str):
        value = [_digits(part) for part in value.split(separator)]
    if not isinstance(value, Sequence) or len(value) != 2:
        raise ValueRefused
    first, second = (None if isinstance(item, bool) else whole(item) for item in value)
    if first is None or second is None:
        raise ValueRefused
    return first, second


def _digits(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()):
        raise ValueRefused
    return int(text)
