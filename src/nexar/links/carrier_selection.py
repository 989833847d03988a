"""Which carrier takes what: pure functions of the size and of what is connected.

Shared memory where both ends have verified that they share a host, else QUIC, else TLS over TCP: that is the mesh
carrier, on which everything travels but the large payloads of a link that has a sidecar. Of two dials that crossed,
the lower node id's stays, so that both ends keep the same one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final
from zlib import crc32

RELAY: Final = "relay"
"""Over other nodes: what connects who has no connection of their own."""
PREFERENCE: Final = ("memory", "shm", "quic", "tls", "tcp", RELAY)
"""Best first; schemes of others come after ours. The index is the number of a scheme on the wire."""
BULK_BYTES: Final = 128 << 10
"""A payload of this size or more takes the sidecar. Measured between two namespaces, plain TCP beside QUIC: from here
on 1.1 to 1.7 times as fast, below it hardly."""
_FIRST_FOREIGN: Final = 16
_MEMORY: Final = ("memory", "shm")

_NUMBERS: Final = {scheme: number for number, scheme in enumerate(PREFERENCE)}


def choose(size_bytes: int, connected: Collection[str], sidecar: str | None = None) -> str | None:
    """The scheme to use for a payload of that size, None if nothing is connected. `sidecar`: of the one that both ends
    know.
    """
    if sidecar is not None and size_bytes >= BULK_BYTES:
        return sidecar
    ours = next((scheme for scheme in PREFERENCE if scheme in connected), None)
    return ours or min(connected, default=None)


def bulk_channel_scheme(enabled: bool | str, *, encrypted: bool) -> str | None:
    """The sidecar that the settings ask for. `enabled` may be "auto": only where it wins, which is plain TCP, for QUIC
    is as fast as TLS over TCP.
    """
    if not enabled:
        return None
    if not encrypted:
        return "tcp"
    return "tls" if enabled is True else None


def takes_bulk_channel(scheme: str | None, connected: Collection[str]) -> bool:
    """Whether a link over these has any use for that sidecar: memory is faster, and beside TLS another TLS is not."""
    if scheme is None or not connected:
        return False
    return scheme not in connected and not any(memory in connected for memory in _MEMORY)


def number_of(scheme: str) -> int:
    """What an envelope says of the carrier of its payload. Both ends must agree, also on schemes of others."""
    known = _NUMBERS.get(scheme)
    return known if known is not None else _FIRST_FOREIGN + crc32(scheme.encode()) % (256 - _FIRST_FOREIGN)


def is_relayed(connected: Collection[str]) -> bool:
    """Whether nothing connects the two but other nodes."""
    return RELAY in connected and len(connected) == 1


def stays(dialed_by: int, other_dialed_by: int) -> bool:
    """Of two carriers made at the same moment from both ends: does the one dialed by node `dialed_by` stay?"""
    return dialed_by < other_dialed_by
