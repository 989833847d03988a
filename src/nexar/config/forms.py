"""Kinds of setting with a form of their own: secrets, lists, ranges, topologies, buffer tiers. Pure."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from nexar.config.kinds import Kind, Refused
from nexar.types import whole

_PORTS = range(1, 65536)


@dataclass(frozen=True, slots=True)
class Token(Kind):
    """A secret people made. Its strength can only be bounded from above, by its length and its alphabet."""

    @property
    def allowed(self) -> str:
        return "a random text of at least 128 bits, such as `python3 -c 'import secrets; print(secrets.token_hex(32))'`"

    def accept(self, value: object) -> str | None:
        if value is None:
            return None
        if not isinstance(value, str) or _most_bits(value.strip()) < 128:
            raise Refused
        return value.strip()


@dataclass(frozen=True, slots=True)
class Endpoint(Kind):
    """Host and port, as text; None: unset."""

    @property
    def allowed(self) -> str:
        return "HOST:PORT, an IPv6 address in brackets, the port from 1 to 65535"

    def accept(self, value: object) -> str | None:
        if value is None:
            return None
        text = value.strip() if isinstance(value, str) else ""
        found = re.fullmatch(r"(?:\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s:\[\]]+):([0-9]{1,5})", text)
        if not found or int(found[1]) not in _PORTS:
            raise Refused
        return text


@dataclass(frozen=True, slots=True)
class Topology(Kind):
    """Who has a data link to whom."""

    @property
    def allowed(self) -> str:
        return "full_mesh, hypercube, or k_regular:K with K even and at least 2"

    def accept(self, value: object) -> str:
        name = value.strip().lower() if isinstance(value, str) else ""
        degree = re.fullmatch(r"k_regular:([0-9]{1,9})", name)
        if degree and int(degree[1]) >= 2 and int(degree[1]) % 2 == 0:
            return f"k_regular:{int(degree[1])}"
        if name not in {"full_mesh", "hypercube"}:
            raise Refused
        return name


@dataclass(frozen=True, slots=True)
class Schemes(Kind):
    """Names of transports, the preferred one first. Third parties may register more, so any name is taken here."""

    @property
    def allowed(self) -> str:
        return "names of transports, each once, separated by commas (shm, quic, tls, memory or a registered one)"

    def accept(self, value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            value = value.split(",")
        if not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value):
            raise Refused
        names = tuple(name.strip().lower() for name in value)
        if not names or len(set(names)) < len(names) or not all(re.fullmatch(r"[a-z][a-z0-9_+-]*", n) for n in names):
            raise Refused
        return names


@dataclass(frozen=True, slots=True)
class PortRange(Kind):
    """First and last port, both included; None: no range."""

    @property
    def allowed(self) -> str:
        return "FIRST-LAST, both ports from 1 to 65535"

    def accept(self, value: object) -> tuple[int, int] | None:
        if value is None:
            return None
        first, last = _pair(value, "-")
        if first not in _PORTS or last not in _PORTS or first > last:
            raise Refused
        return first, last


@dataclass(frozen=True, slots=True)
class BufferTiers(Kind):
    """A named profile of the buffer pool, or its tiers: (bytes, how many are kept), the smallest first."""

    @property
    def allowed(self) -> str:
        return "training, inference, or tiers BYTES:COUNT separated by commas, sizes growing"

    def accept(self, value: object) -> str | tuple[tuple[int, int], ...]:
        if isinstance(value, str):
            if value.strip().lower() in {"training", "inference"}:
                return value.strip().lower()
            value = value.split(",")
        if not isinstance(value, Sequence) or not value:
            raise Refused
        tiers = tuple(_pair(tier, ":") for tier in value)
        sizes = [size for size, _ in tiers]
        if sizes != sorted(set(sizes)) or sizes[0] < 1 or any(kept < 0 for _, kept in tiers):
            raise Refused
        return tiers


def _most_bits(text: str) -> float:
    """The entropy the text has if it was drawn well. Few distinct characters mean that it was not."""
    alphabet = 16 if re.fullmatch(r"[0-9a-fA-F]*", text) else 64
    return len(text) * math.log2(alphabet) if len(set(text)) >= 8 else 0.0


def _pair(value: object, separator: str) -> tuple[int, int]:
    """Two whole numbers, from a sequence or from a text with a separator."""
    if isinstance(value, str):
        value = [_digits(part) for part in value.split(separator)]
    if not isinstance(value, Sequence) or len(value) != 2:
        raise Refused
    first, second = (None if isinstance(item, bool) else whole(item) for item in value)
    if first is None or second is None:
        raise Refused
    return first, second


def _digits(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()):
        raise Refused
    return int(text)
