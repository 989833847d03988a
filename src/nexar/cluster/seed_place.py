"""Where a seed listens, and where others find it."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, cast

from nexar.cluster.addresses import candidate_addresses
from nexar.cluster.interfaces import read_interfaces
from nexar.cluster.membership import MAX_MEMBERS
from nexar.cluster.ports import bind_ports
from nexar.config import Config
from nexar.errors import UsageError
from nexar.security.credentials import Credentials, Trust
from nexar.transport.address import format_address, parse_address
from nexar.transport.base import Acceptor, Sleeper, Transport
from nexar.transport.quic import available
from nexar.transport.registry import load
from nexar.transport.sleep import PollSleeper
from nexar.wire.joining import MAX_JOIN_BYTES

_SILENCE: Final = 10.0
"""Seconds after which a silent join line is lost. QUIC does not tell of a process that was killed: until then a
candidate waits for a seed that is gone, and a seed counts a node that is. Who was only slow knocks again."""
_SIGN_OF_LIFE: Final = 2.5

_MAX_STREAMS: Final = 16
"""A join line takes a handful, and a stranger gets no more."""
_STRANGERS: Final = 4
"""Handshakes under way, for each that may wait to authenticate. When a quarter of all connections are handshakes, the
native package lets strangers show first that they receive at the address they send from."""
_WINDOW_BYTES: Final = 2 * MAX_JOIN_BYTES
"""What may wait to be read: the largest message, and the beginning of the next."""


@dataclass(frozen=True, slots=True)
class Place:
    """Transports that listen, all at one port number, and what their thread sleeps in. Close it."""

    address: str
    transports: Sequence[Transport]
    sleeper: Sleeper

    def close(self) -> None:
        """When nobody drives them any more. Idempotent."""
        for transport in self.transports:
            transport.close()
        if isinstance(self.sleeper, PollSleeper):
            self.sleeper.close()


def open_place(
    config: Config, credentials: Credentials, trust: Trust, acceptor: Acceptor, *, listen: str | None = None
) -> Place:
    """Listen, over what is wanted and possible here. Nothing comes in before somebody drives the transports.
    ConfigError or UsageError, and nothing stays open, if that cannot be.
    """
    schemes = _schemes(config)

    def open_at(address: str) -> Place:
        with ExitStack() as undo:
            made, sleeper = _make(address, schemes, config, undo, credentials=credentials, trust=trust)
            for transport in made:
                address = transport.listen(address, acceptor)  # the port that the first was given is for all
            undo.pop_all()
            return Place(address, made, sleeper)

    return bind_ports(config, open_at, listen=listen)


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
    elsewhere = tuple(text for text in found if not _is_loopback(text))
    return elsewhere or found or (format_address("127.0.0.1", parse_address(address)[1]),)


def _schemes(config: Config) -> tuple[str, ...]:
    """What join lines can come over, as wanted and possible here. UsageError if nothing is."""
    wanted = tuple(scheme for scheme in ("quic", "tls") if scheme in config.transports) or ("tls",)
    missing = available() if "quic" in wanted else None
    if missing is None:
        return wanted
    if "tls" not in wanted:
        raise UsageError(f"only the transport quic is wanted and cannot be used: {missing}; allow tls, or install it")
    return ("tls",)


def _make(
    address: str, schemes: Sequence[str], config: Config, undo: ExitStack, *, credentials: Credentials, trust: Trust
) -> tuple[list[Transport], Sleeper]:
    """`undo` learns how to let go of each. QUIC is first: it has its port from its making on."""
    made: list[Transport] = []
    timeout = config.join_auth_timeout
    if "quic" in schemes:
        from nexar.transport.quic.settings import QuicSettings  # noqa: PLC0415  # only where there is QUIC

        settings = QuicSettings(
            handshake_timeout=timeout,
            idle_timeout=_SILENCE,
            keep_alive_interval=_SIGN_OF_LIFE,
            max_streams=_MAX_STREAMS,
            max_connections=MAX_MEMBERS + _STRANGERS * config.join_max_pending,
            stream_window_bytes=_WINDOW_BYTES,
        )
        made.append(load("quic")(credentials, trust, bind=address, settings=settings))
        undo.callback(made[0].close)
    sleeper = cast(Sleeper, made[0]) if made else _poll_sleeper(undo)
    if "tls" in schemes:
        made.append(
            load("tls")(sleeper, credentials, trust, handshake_timeout=timeout, max_pending=config.join_max_pending)
        )
        undo.callback(made[-1].close)
    return made, sleeper


def _poll_sleeper(undo: ExitStack) -> PollSleeper:
    sleeper = PollSleeper()
    undo.callback(sleeper.close)
    return sleeper


def _is_loopback(address: str) -> bool:
    host = parse_address(address)[0]
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
