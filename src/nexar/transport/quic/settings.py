"""The settings of QUIC, one value. What is not here has the native package's default, which was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import nexar_quic

_STRANGERS: Final = 256
"""Handshakes of strangers that may be in progress, beside those of peers."""


def handshake_limit(peers: int) -> int:
    """Inbound handshakes that may be in progress at once, where `peers` may dial."""
    return 2 * peers + _STRANGERS


@dataclass(frozen=True, slots=True, kw_only=True)
class QuicSettings:
    """What a node may choose."""

    idle_timeout: float = 30.0
    """Seconds of silence after which a connection is lost."""
    keep_alive_interval: float = 5.0
    """Seconds; while nothing else is sent, something is, so that only a dead peer is silent."""
    handshake_timeout: float = 10.0
    """Seconds an inbound handshake may take. A dial has its own deadline."""
    max_streams: int = 1024
    """Streams a peer may have open at once. Room for all of them, 160 KB, is made when its certificate is verified."""
    unverified_streams: int = 9
    """The same before it has authenticated: one more than `inbound` tolerates, so that it notices who wants more."""
    max_connections: int = 65536
    peers: int = 1
    """Peers that may dial at once; the limit of handshakes in progress follows from it."""
    stream_window_bytes: int = 32 << 20
    """What a peer may send of one payload before we read it: the most of it that a busy node holds outside its place.
    100 Gbit/s for a millisecond are 12 MiB."""

    handshake_budget: int = 1024
    """Handshakes of peers that do not authenticate which may begin at once; 64 a second after that."""
    max_mtu: int = 8972
    """Largest packet, both ways. Each connection finds out how large packets its path carries, by sending large ones:
    that is worth it only where much is sent."""
    loopback_mtu: int = 65000
    """The same for paths over the loopback interface."""

    def to_native(self) -> nexar_quic.Settings:
        """The same for the native package, which checks the values (ValueError)."""
        return nexar_quic.Settings(
            idle_timeout=self.idle_timeout,
            keep_alive_interval=self.keep_alive_interval,
            handshake_timeout=self.handshake_timeout,
            max_streams=self.max_streams,
            max_connections=self.max_connections,
            unverified_streams=self.unverified_streams,
            max_handshakes=handshake_limit(self.peers),
            stream_window_bytes=self.stream_window_bytes,
            handshake_budget=self.handshake_budget,
            max_mtu=self.max_mtu,
            loopback_mtu=self.loopback_mtu,
        )
