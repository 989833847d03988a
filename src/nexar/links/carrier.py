"""Which carrier takes what: one pure function of the size and of what is connected.

Shared memory where both ends have verified that they share a host, else QUIC, else TLS over TCP. Everything of one
link prefers the same carrier today; the size is asked so that a bulk sidecar can be chosen here and nowhere else. Of
two dials that crossed, the lower node id's stays, so that both ends keep the same one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final
from zlib import crc32

PREFERENCE: Final = ("memory", "shm", "quic", "tls", "tcp")
"""Best first; schemes of others come after ours. The index is the number of a scheme on the wire."""
_FIRST_FOREIGN: Final = 16

_NUMBERS: Final = {scheme: number for number, scheme in enumerate(PREFERENCE)}


def choose(size_bytes: int, connected: Collection[str]) -> str | None:
    """The scheme to use for a message of that size, None if nothing is connected."""
    del size_bytes  # no carrier is better for one size than for another yet
    ours = next((scheme for scheme in PREFERENCE if scheme in connected), None)
    return ours or min(connected, default=None)


def number_of(scheme: str) -> int:
    """What an envelope says of the carrier of its payload. Both ends must agree, also on schemes of others."""
    known = _NUMBERS.get(scheme)
    return known if known is not None else _FIRST_FOREIGN + crc32(scheme.encode()) % (256 - _FIRST_FOREIGN)


def stays(dialed_by: int, other_dialed_by: int) -> bool:
    """Of two carriers made at the same moment from both ends: does the one dialed by node `dialed_by` stay?"""
    return dialed_by < other_dialed_by
