"""Opens the transports of one process: UDP and TCP at one port, and shared memory."""

from __future__ import annotations

import difflib
import errno
import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast

from nexar.config import Config
from nexar.errors import ConfigError, InternalError, NexarError, UsageError
from nexar.security.certificates import Credentials, Trust
from nexar.transport.address import format_address, parse_address
from nexar.transport.base import Acceptor, Sleeper, Transport
from nexar.transport.quic import missing_support
from nexar.transport.registry import (
    capabilities_of,
    is_builtin,
    is_installed,
    load,
    node_port_schemes,
    opened_on_request,
    package_error,
    schemes,
    why_not_opened,
)
from nexar.transport.sleeper import PollSleeper

_log = logging.getLogger(__name__)

Opened = TypeVar("Opened")

_MAX_TRIES: Final = 100  # a port free for UDP may be taken for TCP, but hardly so often in a row
_TAKEN: Final = frozenset({errno.EADDRINUSE, errno.EACCES})
_FREE: Final = "a port that is free for UDP and TCP"


@dataclass(frozen=True, slots=True)
class _PortRequest:
    host: str
    ports: tuple[int, ...]
    variable: str
    value: object
    listen: str | None = None

    def addresses(self) -> Iterator[str]:
        ports = (0,) * _MAX_TRIES if self.ports == (0,) else self.ports
        return (format_address(self.host, port) for port in ports)


def bind_ports(config: Config, open_at: Callable[[str], Opened], *, listen: str | None = None) -> Opened:
    """Return `open_at(address)` for the first address that works: `listen` (host:port), or the settings `port`,
    `port_range`, else any port; on `bind`, else all interfaces.

    `open_at` opens UDP and TCP at one port, or closes all and raises OSError. Raises ConfigError or UsageError with the
    remedy.
    """
    request = _port_request(config) if listen is None else _explicit(listen)
    refused = OSError(errno.EADDRINUSE, "Address already in use")
    for address in request.addresses():
        try:
            opened = open_at(address)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise _explain(config, request, error) from error
            refused = error
        else:
            del refused  # its traceback would keep the callers' objects alive until a garbage collection
            return opened
    raise _explain(config, request, refused) from refused


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


def _explain(config: Config, request: _PortRequest, error: OSError) -> NexarError:
    reason = error.strerror or str(error)
    if request.listen is not None:
        return UsageError(f"cannot listen on {request.listen}: {reason}; {_remedy(error, request)}")
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(variable="NEXAR_BIND", value=config.bind, allowed="an address of this host", hint=reason)
    return ConfigError(
        variable=request.variable, value=request.value, allowed=_FREE, hint=f"{reason}; {_remedy(error, request)}"
    )


def _remedy(error: OSError, request: _PortRequest) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return "give an address of this host, or none for every interface"
    if error.errno == errno.EACCES:
        return "ports below 1024 need privileges: take a higher one, or 0 for any free port"
    if error.errno == errno.EADDRINUSE and len(request.ports) > 1:
        return "all ports of the range are taken: widen it, or stop what uses them"
    if error.errno == errno.EADDRINUSE:
        return "another process uses it: stop that one, take another port, or 0 for any free one"
    return "choose another address"


_NO_OVERRIDES: Final[Mapping[str, Any]] = MappingProxyType({})
_KEEP_ALIVE_INTERVAL: Final = 5.0
_IDLE_TIMEOUT: Final = 30.0
_MAX_IDLE_TIMEOUT: Final = 1e6


@dataclass(frozen=True, slots=True)
class Transports:
    """Listening transports, which accept while they are driven. Close them."""

    by_scheme: Mapping[str, Transport]  # in order of preference
    sleeper: Sleeper
    address: str  # host:port of the network transports

    def close(self) -> None:
        """After the last drive. Idempotent."""
        _close(self.by_scheme, self.sleeper)


def usable_schemes(config: Config) -> tuple[str, ...]:
    """The available configured schemes, preferred first. Raises ConfigError if one is unknown or cannot be opened by a
    node, or none reaches other hosts.
    """
    for problem in filter(None, map(_why_not_opened, config.transports)):
        raise ConfigError(
            variable="NEXAR_TRANSPORTS",
            value=",".join(config.transports),
            allowed=f"{', '.join(opened_on_request())} and registered transports",
            hint=problem,
        )
    found = tuple(filter(is_installed, config.transports))
    if not any(capabilities_of(scheme).node_port for scheme in found):
        missing = ", ".join(scheme for scheme in config.transports if scheme not in found)
        hint = f"the package nexar-native is not installed, so {missing} is missing" if missing else ""
        raise ConfigError(
            variable="NEXAR_TRANSPORTS",
            value=",".join(config.transports),
            allowed=f"a list with {' or '.join(node_port_schemes())} in it, to reach the seed and other hosts",
            hint=hint,
        )
    return found


def _why_not_opened(scheme: str) -> str | None:
    if is_builtin(scheme):
        return why_not_opened(scheme)
    known = [each for each in schemes() if not is_builtin(each) or why_not_opened(each) is None]
    near = difflib.get_close_matches(scheme, known, n=1)
    unknown = f"unknown transport {scheme!r}; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}")
    return None if scheme in known else unknown


def quic_settings_for(config: Config) -> dict[str, float]:
    """QUIC's own packets distinguish a stuck peer from a dead one. So several are sent within `heartbeat_timeout`, and
    connections outlive it.
    """
    return {
        "handshake_timeout": config.join_auth_timeout,
        "keep_alive_interval": min(_KEEP_ALIVE_INTERVAL, config.heartbeat_timeout / 3),
        "idle_timeout": max(_IDLE_TIMEOUT, min(2 * config.heartbeat_timeout, _MAX_IDLE_TIMEOUT)),
    }


def open_transports(
    config: Config,
    credentials: Credentials,
    trust: Trust,
    acceptor: Acceptor,
    *,
    listen: str | None = None,
    schemes: Sequence[str] | None = None,
    quic: Mapping[str, Any] = _NO_OVERRIDES,
    plain_too: bool = False,
) -> Transports:
    """Open all usable schemes, or `schemes`. Errors as `bind_ports` and `usable_schemes`; then nothing stays open.

    `listen` (host:port) precedes the settings; `quic` overrides QuicSettings; with `plain_too` TLS accepts connections
    that continue unencrypted.
    """
    chosen = usable_schemes(config) if schemes is None else tuple(schemes)

    def open_at(address: str) -> Transports:
        return _Opening(config, credentials, trust, acceptor, quic, plain_too=plain_too).open(chosen, address)

    return bind_ports(config, open_at, listen=listen)


class _Opening:
    """Opens all transports or none. Each built-in transport takes arguments of its own, so each has its code here."""

    _BUILTIN: Final = frozenset({"quic", "tls", "shm"})

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
        """Opens QUIC first: the node sleeps in it. Raises OSError, and InternalError for a built-in scheme that no code
        here opens.
        """
        for scheme in schemes:
            if is_builtin(scheme) and scheme not in self._BUILTIN:
                raise InternalError(f"no code in nexar.cluster.transports opens the built-in transport {scheme!r}")
        if "quic" in schemes:
            address = self._open_quic(address)
        sleeper = cast(Sleeper, self._opened["quic"]) if self._opened else PollSleeper()
        try:
            if "tls" in schemes:
                address = self._open_tls(sleeper, address)
            if "shm" in schemes:
                self._opened["shm"] = load("shm")(sleeper, self._credentials.node)
                self._listen_on_shared_memory()
            for scheme in schemes:
                if not is_builtin(scheme):
                    self._open_third_party(scheme, sleeper, address)
        except BaseException:
            _close(self._opened, sleeper)
            raise
        ordered = {scheme: self._opened[scheme] for scheme in schemes if scheme in self._opened}
        return Transports(ordered, sleeper, address)

    def _open_quic(self, address: str) -> str:
        problem = missing_support()
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

    def _open_third_party(self, scheme: str, sleeper: Sleeper, address: str) -> None:
        # On the node's host, but not at the node's port: that is taken, and the transport may use no port. So even an
        # OSError is not about the node's port.
        third_party = load(scheme)(sleeper, self._credentials, self._trust)
        self._opened[scheme] = third_party
        try:
            third_party.listen(format_address(parse_address(address)[0], 0), self._acceptor)
        except Exception as error:
            raise package_error(scheme, error) from error

    def _listen_on_shared_memory(self) -> None:
        # The host may lack memory or a suitable CPU.
        try:
            self._opened["shm"].listen("", self._acceptor)
        except OSError as error:
            _log.info("no shared memory, using the network: %s", error)
            self._opened.pop("shm").close()


def _close(opened: Mapping[str, Transport], sleeper: Sleeper) -> None:
    for transport in opened.values():
        transport.close()
    if isinstance(sleeper, PollSleeper):
        sleeper.close()
