"""Sizes as they are typed (`8`, `64K`, `128M`), and the series between two of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from nexar.errors import ConfigError

_UNITS: Final = {"": 0, "K": 10, "M": 20, "G": 30}
_FORM: Final = re.compile(r"(\d+)\s*([KMG]?)i?B?", re.IGNORECASE)


def parse_size(text: str, option: str) -> int:
    """Bytes. ConfigError names the option."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ConfigError(variable=option, value=text, allowed="a number of bytes, or one with K, M or G (1024)")
    return int(match[1]) << _UNITS[match[2].upper()]


def series(begin: int, end: int, factor: float) -> Iterator[int]:
    """`begin`, and each time `factor` times more, up to `end` itself."""
    if factor <= 1:
        raise ConfigError(variable="-f", value=factor, allowed="a number above 1")
    if not 0 < begin <= end:
        raise ConfigError(variable="-b", value=begin, allowed=f"1 to the end of the series, {end}")
    size = float(begin)
    while round(size) <= end:
        yield round(size)
        size = max(size * factor, size + 1)
