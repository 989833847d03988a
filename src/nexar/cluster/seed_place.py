"""Where a seed listens, and where others find it."""

from __future__ import annotations

from typing import Final

from nexar.cluster.addresses import candidate_addresses
from nexar.cluster.interfaces import read_interfaces
from nexar.cluster.membership import MAX_MEMBERS
from nexar.cluster.transports import NETWORK, Transports, open_transports, usable
from nexar.config import Config
from nexar.errors import UsageError
from nexar.security.credentials import Credentials, Trust
from nexar.transport.address import format_address, is_loopback, parse_address
from nexar.transport.base import Acceptor
from nexar.wire.joining import MAX_JOIN_BYTES

_SILENCE: Final = 10.0
"""Seconds after which a silent join line is lost. QUIC does not tell of a process that was killed: until then a
candidate waits for a seed that is gone, and a seed counts a node that is. Who was only slow knocks again."""
_SIGN_OF_LIFE: Final = 2.5

_MAX_STREAMS: Final = 16
"""A join line takes a handful, and a stranger gets no more."""
_LINES: Final = 4
"""QUIC connections at once, for each that may be pending: they wait, say their last word, or are in their handshake."""
_PACKET_BYTES: Final = 1200
"""What every path carries. Larger ones would have to be looked for on each connection, those of strangers too."""
_WINDOW_BYTES: Final = 2 * MAX_JOIN_BYTES
"""What may wait to be read: the largest message, and the beginning of the next."""


def open_place(
    config: Config, credentials: Credentials, trust: Trust, acceptor: Acceptor, *, size: int, listen: str | None = None
) -> Transports:
    """Listen for join lines of a cluster of `size` members: over what is wanted, possible here, and leads anywhere. As
    `open_transports`.
    """
    schemes = [scheme for scheme in usable(config) if scheme in NETWORK]
    settings = {
        "idle_timeout": _SILENCE,
        "keep_alive_interval": _SIGN_OF_LIFE,
        "max_streams": _MAX_STREAMS,
        "max_connections": MAX_MEMBERS + _LINES * config.join_max_pending,
        "peers": size,
        "stream_window_bytes": _WINDOW_BYTES,
        "handshake_budget": 2 * config.join_max_pending,
        "max_mtu": _PACKET_BYTES,
        "loopback_mtu": _PACKET_BYTES,
    }
    return open_transports(config, credentials, trust, acceptor, listen=listen, schemes=schemes, quic=settings)


def same_place(port: int, listen: str | None, config: Config) -> str | None:
    """Where to listen, given the port of an earlier seed of this cluster (0: there was none). UsageError if another one
    is asked for: tickets that are out name that port.
    """
    if not port:
        return listen
    bind = (config.bind or "").removeprefix("[").removesuffix("]")
    host, wanted = (bind, config.port) if listen is None else parse_address(listen)
    if wanted not in (0, port):
        raise UsageError(
            f"the seed in the state directory listens at port {port}, as its ticket says, not {wanted}; "
            f"give port {port} or 0, or another directory"
        )
    return format_address(host, port)


def seed_addresses(config: Config, address: str) -> tuple[str, ...]:
    """What others can dial to reach a seed that listens at `address`, the most promising first. Loopback leads anybody
    else to themselves, so it is named only where there is nothing else. ConfigError as `candidate_addresses`.
    """
    interfaces = read_interfaces()
    (found,) = candidate_addresses(
        interfaces, address, schemes=("any",), iface=config.iface, advertise=config.advertise
    ).values()
    elsewhere = tuple(text for text in found if not is_loopback(text))
    return elsewhere or found or (format_address("127.0.0.1", parse_address(address)[1]),)
