"""Choosing the one port of this process, free for UDP and for TCP.

Whether a port is free is known only by taking it. So the caller opens its sockets, both at the same number, and what is
here says at which addresses to try and what a failure means in the words of the settings.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from nexar.config import Config
from nexar.errors import ConfigError, NexarError, UsageError
from nexar.transport.address import format_address, parse_address

Opened = TypeVar("Opened")

_TRIES: Final = 100
"""Of any free port: one that the system gave for UDP may be taken for TCP, but hardly so often in a row."""
_TAKEN: Final = frozenset({errno.EADDRINUSE, errno.EACCES})
_FREE: Final = "a port that is free for UDP and TCP"


@dataclass(frozen=True, slots=True)
class _Wish:
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
    wish = _wish(config) if listen is None else _explicit(listen)
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


def _wish(config: Config) -> _Wish:
    host = _host(config.bind or "")
    if config.port or config.port_range is None:
        return _Wish(host, (config.port,), "NEXAR_PORT", config.port)
    first, last = config.port_range
    return _Wish(host, tuple(range(first, last + 1)), "NEXAR_PORT_RANGE", f"{first}-{last}")


def _host(bind: str) -> str:
    host = bind.removeprefix("[").removesuffix("]")
    try:
        parse_address(format_address(host, 0))
    except (UsageError, ValueError) as error:
        allowed = "a host name or an address, without a port"
        raise ConfigError(variable="NEXAR_BIND", value=bind, allowed=allowed, hint="the port is NEXAR_PORT") from error
    return host


def _explicit(listen: str) -> _Wish:
    host, port = parse_address(listen)
    return _Wish(host, (port,), "listen", port, listen)


def _explain(config: Config, wish: _Wish, error: OSError) -> NexarError:
    reason = error.strerror or str(error)
    if wish.listen is not None:
        return UsageError(f"cannot listen on {wish.listen}: {reason}; {_remedy(error, wish)}")
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(variable="NEXAR_BIND", value=config.bind, allowed="an address of this host", hint=reason)
    return ConfigError(
        variable=wish.variable, value=wish.value, allowed=_FREE, hint=f"{reason}; {_remedy(error, wish)}"
    )


def _remedy(error: OSError, wish: _Wish) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return "give an address of this host, or none for every interface"
    if error.errno == errno.EACCES:
        return "ports below 1024 need privileges: take a higher one, or 0 for any free port"
    if error.errno == errno.EADDRINUSE and len(wish.ports) > 1:
        return "all ports of the range are taken: widen it, or stop what uses them"
    if error.errno == errno.EADDRINUSE:
        return "another process uses it: stop that one, take another port, or 0 for any free one"
    return "see what the system says, and choose another address"
