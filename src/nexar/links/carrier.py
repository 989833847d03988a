"""Which carrier takes what: one pure function of the size and of what is connected.

Shared memory where both ends have verified that they share a host, else QUIC, else TLS over TCP. Everything of one
link prefers the same carrier today; the size is asked so that a bulk sidecar can be chosen here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

PREFERENCE: Final = ("memory", "shm", "quic", "tls", "tcp")
"""Best first. The index is the number of a scheme on the wire."""

_NUMBERS: Final = {scheme: number for number, scheme in enumerate(PREFERENCE)}


def choose(size_bytes: int, connected: Collection[str]) -> str | None:
    """The scheme to use for a message of that size, None if nothing is connected."""
    del size_bytes  # no carrier is better for one size than for another yet
    return next((scheme for scheme in PREFERENCE if scheme in connected), None)


def number_of(scheme: str) -> int:
    """What an envelope says of the carrier of its payload."""
    return _NUMBERS[scheme]


def scheme_of(number: int) -> str | None:
    """The scheme an envelope names; None for a number we do not know."""
    return PREFERENCE[number] if number < len(PREFERENCE) else None
