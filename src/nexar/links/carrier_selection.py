"""Pure functions that choose the carrier of a payload.

The mesh carrier is verified shared memory, else QUIC, else TLS over TCP. It carries everything except large payloads
when the link has a bulk channel.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final
from zlib import crc32

from nexar.transport.registry import FIRST_THIRD_PARTY, builtin_numbers, capabilities_of

RELAY: Final = "relay"  # over other nodes, for a pair without a connection
_NUMBERS: Final = {**builtin_numbers(), RELAY: 5}  # the wire format
PREFERENCE: Final = tuple(_NUMBERS)  # best first; third-party schemes follow
# Payloads of this size use the bulk channel. Plain TCP beside QUIC between two namespaces measured 1.1 to 1.7 times as
# fast from here on, hardly faster below.
BULK_BYTES: Final = 128 << 10


def choose(size_bytes: int, connected: Collection[str], sidecar: str | None = None) -> str | None:
    """Return the scheme for a payload, or None. `sidecar`: scheme of the confirmed bulk channel."""
    if sidecar is not None and size_bytes >= BULK_BYTES:
        return sidecar
    builtin = next((scheme for scheme in PREFERENCE if scheme in connected), None)
    return builtin or min(connected, default=None)


def bulk_channel_scheme(enabled: bool | str, *, encrypted: bool) -> str | None:
    """Return the bulk channel's scheme. "auto" allows only plain TCP: QUIC is as fast as TLS over TCP."""
    if not enabled:
        return None
    if not encrypted:
        return "tcp"
    return "tls" if enabled is True else None


def takes_bulk_channel(scheme: str | None, connected: Collection[str]) -> bool:
    """Whether a bulk channel helps. It does not beside memory, which is faster, or the same scheme."""
    if scheme is None or not connected:
        return False
    return scheme not in connected and not any(_is_memory(each) for each in connected)


def _is_memory(scheme: str) -> bool:
    capabilities = capabilities_of(scheme)
    return capabilities.shares_memory or capabilities.in_process


def shares_memory(connected: Collection[str]) -> bool:
    """Whether one of the carriers is shared memory."""
    return any(capabilities_of(scheme).shares_memory for scheme in connected)


def closes_on_death(connected: Collection[str]) -> bool:
    """Whether one of the carriers is lost at once when the peer's process ends."""
    return any(capabilities_of(scheme).closes_on_death for scheme in connected)


def shows_life(connected: Collection[str]) -> bool:
    """Whether packets of a live peer arrive even while its Python code does not run."""
    return any(capabilities_of(scheme).shows_life for scheme in connected)


def number_of(scheme: str) -> int:
    """Return a scheme's number in frames. Both ends compute the same, also for third-party schemes."""
    known = _NUMBERS.get(scheme)
    return known if known is not None else FIRST_THIRD_PARTY + crc32(scheme.encode()) % (256 - FIRST_THIRD_PARTY)


def is_relayed(connected: Collection[str]) -> bool:
    """Whether the only carrier is relayed."""
    return RELAY in connected and len(connected) == 1


def wins_simultaneous_dial(dialed_by: int, other_dialed_by: int) -> bool:
    """Whether the carrier that `dialed_by` dialed wins against a simultaneous one: the lower node id wins."""
    return dialed_by < other_dialed_by
