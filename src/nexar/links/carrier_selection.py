"""Pure functions that choose the carrier of a payload.

The mesh carrier is verified shared memory, else QUIC, else TLS over TCP. It carries everything except large payloads of
a link with a bulk channel. Of two dials that crossed, both ends keep the one from the lower node id.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final
from zlib import crc32

RELAY: Final = "relay"  # over other nodes, for a pair without a connection
# Best first; third-party schemes follow. The index is the number of a scheme on the wire.
PREFERENCE: Final = ("memory", "shm", "quic", "tls", "tcp", RELAY)
# Payloads of this size use the bulk channel. Plain TCP beside QUIC between two namespaces measured 1.1 to 1.7 times as
# fast from here on, hardly faster below.
BULK_BYTES: Final = 128 << 10
_FIRST_FOREIGN: Final = 16
_MEMORY: Final = ("memory", "shm")

_NUMBERS: Final = {scheme: number for number, scheme in enumerate(PREFERENCE)}


def choose(size_bytes: int, connected: Collection[str], sidecar: str | None = None) -> str | None:
    """Return the scheme for a payload, or None if nothing is connected. `sidecar` is the confirmed bulk channel's."""
    if sidecar is not None and size_bytes >= BULK_BYTES:
        return sidecar
    ours = next((scheme for scheme in PREFERENCE if scheme in connected), None)
    return ours or min(connected, default=None)


def bulk_channel_scheme(enabled: bool | str, *, encrypted: bool) -> str | None:
    """Return the bulk channel's scheme by the settings. "auto": only plain TCP, because QUIC is as fast as TLS over
    TCP.
    """
    if not enabled:
        return None
    if not encrypted:
        return "tcp"
    return "tls" if enabled is True else None


def takes_bulk_channel(scheme: str | None, connected: Collection[str]) -> bool:
    """Return whether a bulk channel helps: memory is faster, and a second TLS is not."""
    if scheme is None or not connected:
        return False
    return scheme not in connected and not any(memory in connected for memory in _MEMORY)


def number_of(scheme: str) -> int:
    """Return a scheme's number in frames, equal on both ends, also for third-party schemes."""
    known = _NUMBERS.get(scheme)
    return known if known is not None else _FIRST_FOREIGN + crc32(scheme.encode()) % (256 - _FIRST_FOREIGN)


def is_relayed(connected: Collection[str]) -> bool:
    """Return whether only a relayed carrier connects the two."""
    return RELAY in connected and len(connected) == 1


def stays(dialed_by: int, other_dialed_by: int) -> bool:
    """Return whether the carrier from node `dialed_by` wins against a simultaneous one."""
    return dialed_by < other_dialed_by
