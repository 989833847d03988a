"""Choosing the one port of this process, free for UDP and for TCP.

Whether a port is free is known only by taking it. So the caller opens its sockets, both at the same number, and what is
here says at which addresses to try and what a failure means in the words of the settings.

The transports of one process, opened: UDP and TCP at one port number, and memory beside them.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast

from nexar.config import Config
from nexar.errors import ConfigError, NexarError, UsageError
from nexar.native import native_installed
from nexar.security.certificates import Credentials, Trust
from nexar.transport.address import format_address, parse_address
from nexar.transport.base import Acceptor, Sleeper, Transport
from nexar.transport.quic import available
from nexar.transport.registry import blame, is_ours, load
from nexar.transport.sleeper import PollSleeper

Opened = TypeVar("Opened")

_TRIES: Final = 100
"""Of any free port: one that the system gave for UDP may be taken for TCP, but hardly so often in a row."""
_TAKEN: Final = frozenset({errno.EADDRINUSE, errno.EACCES})
_FREE: Final = "a port that is free for UDP and TCP"


@dataclass(frozen=True, slots=True)
class _PortRequest:
    """Where to listen, and which setting said so."""

    host: str
    ports: tuple[int, ...]
    variable: str
    value: object
    listen: str | None = None

    def addresses(self) -> Iterator[str]:
        ports = (0,) * _TRIES if self.ports == (0,) else self.ports
        return (format_address(self.host, port) for port in ports)


def bind_ports(config: Config, open_at: Callable[[str], Opened], *, listen: str | None = None) -> Opened:
    """What `open_at(address)` returned, for the first address at which it could listen: at the `port` of the settings,
    else at the first free one of `port_range`, else at any. The host is the setting `bind`, else every interface, of
    both families where there are two.

    `open_at` opens all it needs at one number, UDP and TCP, and lets go of all of it if one is not to be had; then it
    raises OSError. With port 0 it takes what the system gives for the first and asks for the same for the other.

    `listen`, host:port, goes before the settings. ConfigError names the setting, UsageError `listen`, with the remedy.
    """
    wish = _port_request(config) if listen is None else _explicit(listen)
    refused = OSError(errno.EADDRINUSE, "Address already in use")
    for address in wish.addresses():
        try:
            opened = open_at(address)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise _explain(config, wish, error) from error
            refused = error
        else:
            del refused  # with its traceback it would keep alive what the callers hold, until Python collects garbage
            return opened
    raise _explain(config, wish, refused) from refused


def _port_request(config: Config) -> _PortRequest:
    host = _host(config.bind or "")
    if config.port or config.port_range is None:
        return _PortRequest(host, (config.port,), "NEXAR_PORT", config.port)
    first, last = config.port_range
    return _PortRequest(host, tuple(range(first, last + 1)), "NEXAR_PORT_RANGE", f"{first}-{last}")


def _host(bind: str) -> str:
    host = bind.removeprefix("[").removesuffix("]")
    try:
        parse_address(format_address(host, 0))
    except (UsageError, ValueError) as error:
        allowed = "a host name or an address, without a port"
        raise ConfigError(variable="NEXAR_BIND", value=bind, allowed=allowed, hint="the port is NEXAR_PORT") from error
    return host


def _explicit(listen: str) -> _PortRequest:
    host, port = parse_address(listen)
    return _PortRequest(host, (port,), "listen", port, listen)


def _explain(config: Config, wish: _PortRequest, error: OSError) -> NexarError:
    reason = error.strerror or str(error)
    if wish.listen is not None:
        return UsageError(f"cannot listen on {wish.listen}: {reason}; {_remedy(error, wish)}")
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(variable="NEXAR_BIND", value=config.bind, allowed="an address of this host", hint=reason)
    return ConfigError(
        variable=wish.variable, value=wish.value, allowed=_FREE, hint=f"{reason}; {_remedy(error, wish)}"
    )


def _remedy(error: OSError, wish: _PortRequest) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return "give an address of this host, or none for every interface"
    if error.errno == errno.EACCES:
        return "ports below 1024 need privileges: take a higher one, or 0 for any free port"
    if error.errno == errno.EADDRINUSE and len(wish.ports) > 1:
        return "all ports of the range are taken: widen it, or stop what uses them"
    if error.errno == errno.EADDRINUSE:
        return "another process uses it: stop that one, take another port, or 0 for any free one"
    return "see what the system says, and choose another address"


_log = logging.getLogger(__name__)

NETWORK: Final = ("quic", "tls")
"""Schemes that lead to other hosts, and to the seed."""
_USUAL: Final[Mapping[str, Any]] = MappingProxyType({})
_SIGN_OF_LIFE: Final = 5.0
_SILENCE: Final = 30.0
_LONGEST_SILENCE: Final = 1e6


@dataclass(frozen=True, slots=True)
class Transports:
    """Opened and listening. Nothing comes in before somebody drives them. Close them."""

    by_scheme: Mapping[str, Transport]
    """In the order of preference."""
    sleeper: Sleeper
    address: str
    """Where the network ones listen: host:port, the same for UDP and TCP."""

    def close(self) -> None:
        """When nobody drives them any more. Idempotent."""
        _close(self.by_scheme, self.sleeper)


def usable_schemes(config: Config) -> tuple[str, ...]:
    """The wanted schemes that this process can have, preferred first. ConfigError if none of them leads anywhere."""
    found = tuple(scheme for scheme in config.transports if scheme != "quic" or native_installed())
    if not set(found) & set(NETWORK):
        hint = (
            "" if "quic" not in config.transports else "the package nexar-native is not installed, so quic is missing"
        )
        raise ConfigError(
            variable="NEXAR_TRANSPORTS",
            value=",".join(config.transports),
            allowed="a list with quic or tls in it, to reach the seed and other hosts",
            hint=hint,
        )
    return found


def quic_settings_for(config: Config) -> dict[str, float]:
    """Fields of QuicSettings that follow from the settings. A peer whose Python code is stuck is told from a dead one
    by the packets that QUIC sends on its own: so it sends several within `heartbeat_timeout`, even if some are lost,
    and does not give a connection up before the heartbeat has given its peer up.
    """
    return {
        "handshake_timeout": config.join_auth_timeout,
        "keep_alive_interval": min(_SIGN_OF_LIFE, config.heartbeat_timeout / 3),
        "idle_timeout": max(_SILENCE, min(2 * config.heartbeat_timeout, _LONGEST_SILENCE)),
    }


def open_transports(
    config: Config,
    credentials: Credentials,
    trust: Trust,
    acceptor: Acceptor,
    *,
    listen: str | None = None,
    schemes: Sequence[str] | None = None,
    quic: Mapping[str, Any] = _USUAL,
    plain_too: bool = False,
) -> Transports:
    """Every usable scheme (or those of `schemes`), listening for `acceptor`. `listen`, host:port, goes before the
    settings; `quic` are fields of QuicSettings that differ from the usual ones; `plain_too`: TLS takes connections that
    go on without encryption. Errors as for `bind_ports` and `usable`; nothing is left open then.
    """
    chosen = usable_schemes(config) if schemes is None else tuple(schemes)

    def open_at(address: str) -> Transports:
        return _Opening(config, credentials, trust, acceptor, quic, plain_too=plain_too).open(chosen, address)

    return bind_ports(config, open_at, listen=listen)


class _Opening:
    """One attempt at one address: all of it, or nothing."""

    def __init__(
        self,
        config: Config,
        credentials: Credentials,
        trust: Trust,
        acceptor: Acceptor,
        quic: Mapping[str, Any],
        *,
        plain_too: bool,
    ) -> None:
        self._config = config
        self._plain_too = plain_too
        self._quic = quic
        self._credentials = credentials
        self._trust = trust
        self._acceptor = acceptor
        self._opened: dict[str, Transport] = {}

    def open(self, schemes: tuple[str, ...], address: str) -> Transports:
        """QUIC first: it is what the node sleeps in. Raises OSError if the address cannot be had."""
        if "quic" in schemes:
            address = self._open_quic(address)
        sleeper = cast(Sleeper, self._opened["quic"]) if self._opened else PollSleeper()
        try:
            if "tls" in schemes:
                address = self._open_tls(sleeper, address)
            if "shm" in schemes:
                self._opened["shm"] = load("shm")(sleeper, self._credentials.node)
                self._listen_in_memory()
            for scheme in schemes:
                if not is_ours(scheme):
                    self._open_theirs(scheme, sleeper, address)
        except BaseException:
            _close(self._opened, sleeper)
            raise
        ordered = {scheme: self._opened[scheme] for scheme in schemes if scheme in self._opened}
        return Transports(ordered, sleeper, address)

    def _open_quic(self, address: str) -> str:
        problem = available()
        if problem is not None:
            raise UsageError(f"QUIC cannot be used: {problem}; or leave it out with NEXAR_TRANSPORTS=shm,tls")
        from nexar.transport.quic.transport import QuicSettings  # noqa: PLC0415 - needs the native package

        settings = QuicSettings(**{**quic_settings_for(self._config), **self._quic})
        quic = load("quic")(self._credentials, self._trust, bind=address, settings=settings)
        try:
            address = quic.listen(address, self._acceptor)
        except BaseException:
            quic.close()
            raise
        self._opened["quic"] = quic
        return address

    def _open_tls(self, sleeper: Sleeper, address: str) -> str:
        tls = load("tls")(
            sleeper,
            self._credentials,
            self._trust,
            plain_too=self._plain_too,
            handshake_timeout=self._config.join_auth_timeout,
            max_pending=self._config.join_max_pending,
        )
        self._opened["tls"] = tls
        return tls.listen(address, self._acceptor)

    def _open_theirs(self, scheme: str, sleeper: Sleeper, address: str) -> None:
        """On the same host, at a port of its own: ours is taken, and theirs may have no ports at all. What fails is no
        matter of our port then, also where it is an OSError.
        """
        theirs = load(scheme)(sleeper, self._credentials, self._trust)
        self._opened[scheme] = theirs
        try:
            theirs.listen(format_address(parse_address(address)[0], 0), self._acceptor)
        except Exception as error:
            raise blame(scheme, error) from error

    def _listen_in_memory(self) -> None:
        """A host without room for shared memory, or with a CPU that cannot, does without."""
        try:
            self._opened["shm"].listen("", self._acceptor)
        except OSError as error:
            _log.info("no shared memory, the network serves instead: %s", error)
            self._opened.pop("shm").close()


def _close(opened: Mapping[str, Transport], sleeper: Sleeper) -> None:
    for transport in opened.values():
        transport.close()
    if isinstance(sleeper, PollSleeper):
        sleeper.close()
