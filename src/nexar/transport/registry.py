"""The transports by scheme, and the wrapper around transports of other packages.

Other packages add a transport with an entry point of the group `nexar.transports`. Its name is the scheme; its object
is a callable `(waker, credentials, trust)` that returns a `nexar.transport.base.Transport`. Nodes whose setting
`transports` names it use it. nexar's own schemes cannot be replaced.

If it raises while driven, the wrapper logs the traceback once and raises TransportFailed. All waiting calls of the node
end with that: nobody knows what the transport lost, and a link uses all its carriers as one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, cast

from nexar.errors import UsageError
from nexar.security.certificates import Credentials, Trust
from nexar.transport.base import Acceptor, Carrier, Expected, Transport
from nexar.types import describe_package

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


_log = logging.getLogger(__name__)


class TransportFailed(UsageError):
    """A third-party transport raised while it was driven; `__cause__` has the exception."""


class ForeignTransport(Transport):
    """Wraps a third-party transport and raises TransportFailed for its exceptions. Carriers are not wrapped."""

    def __init__(self, inside: Transport, blame: Callable[[BaseException], str]) -> None:
        """`blame` makes the message that names the package."""
        self.scheme = inside.scheme
        self.inside = inside
        self._blame = blame
        self._logged = False  # written by the driver or the closing thread

    @property
    def address(self) -> str | None:  # type: ignore[override]  # the inner transport knows where it listens
        return self.inside.address

    def replace_credentials(self, credentials: Credentials, trust: Trust) -> None:
        self.inside.replace_credentials(credentials, trust)

    def expect_peers(self, count: int) -> None:
        self.inside.expect_peers(count)

    def listen(self, address: str, acceptor: Acceptor) -> str:
        return self.inside.listen(address, acceptor)

    def address_for(self, node: int) -> str | None:
        return self.inside.address_for(node)

    def connect(self, address: str, expected: Expected, deadline: float) -> Carrier:
        return self.inside.connect(address, expected, deadline)

    # -- driven by the node ----------------------------------------------------------------------------

    def poll(self) -> bool:
        try:
            return self.inside.poll()
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything
            self._raise_failed(error)

    @property
    def spins(self) -> bool:
        try:
            return self.inside.spins
        except Exception as error:  # noqa: BLE001
            self._raise_failed(error)

    def prepare_sleep(self) -> bool:
        try:
            return self.inside.prepare_sleep()
        except Exception as error:  # noqa: BLE001
            self._raise_failed(error)

    def due(self) -> float | None:
        try:
            return self.inside.due()
        except Exception as error:  # noqa: BLE001
            self._raise_failed(error)

    def close(self) -> None:
        """Exceptions are only logged: no call waits for them now, and the other transports must close."""
        try:
            self.inside.close()
        except Exception as error:  # noqa: BLE001
            self._log_once(error)

    def abandon(self) -> None:
        self.inside.abandon()

    def _raise_failed(self, error: Exception) -> NoReturn:
        self._log_once(error)
        raise TransportFailed(self._blame(error)) from error

    def _log_once(self, error: Exception) -> None:
        if not self._logged:
            self._logged = True
            _log.error("%s", self._blame(error), exc_info=error)


Factory: TypeAlias = Callable[..., Transport]

GROUP: Final = "nexar.transports"
_OURS: Final = {
    "memory": "nexar.transport.memory.transport:MemoryTransport",
    "quic": "nexar.transport.quic.transport:QuicTransport",
    "shm": "nexar.transport.shm.transport:ShmTransport",
    "tcp": "nexar.transport.tls.transport:PlainTransport",
    "tls": "nexar.transport.tls.transport:TlsTransport",
}


def schemes() -> tuple[str, ...]:
    """Return every scheme that has a transport, usable here or not."""
    return tuple(sorted({*_third_party(), *_OURS}))


def is_ours(scheme: str) -> bool:
    """Return whether nexar itself has the scheme."""
    return scheme in _OURS


def load(scheme: str) -> Factory:
    """Return the factory of this scheme's transport.

    Raises UsageError if there is none or its package cannot be loaded, ImportError if one of nexar's own cannot be
    used.
    """
    if scheme in _OURS:
        module, _, name = _OURS[scheme].partition(":")
        return cast(Factory, getattr(import_module(module), name))
    theirs = _third_party()
    if scheme not in theirs:
        raise UsageError(f"unknown transport {scheme!r}; available: {', '.join(schemes())}")
    point = theirs[scheme]
    try:
        factory = point.load()
    except (Exception, SystemExit) as error:  # third-party code may raise anything; name its package
        raise _broken(point, error) from error
    return partial(_make, point, factory)


def blame(scheme: str, error: Exception) -> UsageError:
    """Return the error that names the package whose transport raised `error`."""
    return _broken(_third_party()[scheme], error)


def _make(point: EntryPoint, factory: Any, *arguments: Any, **settings: Any) -> Transport:
    try:
        made = factory(*arguments, **settings)
    except (Exception, SystemExit) as error:
        raise _broken(point, error) from error
    if not isinstance(made, Transport) or made.scheme != point.name:
        raise _broken(point, TypeError(f"it made {made!r}, which is no Transport of that scheme"))
    return ForeignTransport(made, partial(_explain, point))


def _broken(point: EntryPoint, error: BaseException) -> UsageError:
    return UsageError(_explain(point, error))


def _explain(point: EntryPoint, error: BaseException) -> str:
    return (
        f"the transport {point.name!r} of {describe_package(point)} cannot be used ({type(error).__name__}: {error}); "
        f"repair that package, or take {point.name!r} out of the transports"
    )


def _third_party() -> dict[str, EntryPoint]:
    """Slow: scans all installed packages, which may take longer than forming a cluster."""
    from importlib.metadata import entry_points  # noqa: PLC0415

    return {point.name: point for point in entry_points(group=GROUP)}


def log_unhandled(whose: str, fault: Exception) -> str:
    """Log that a message of `whose` raised `fault`. Returns the reason for ending its connection.

    Call it only in the `except` block that ends the connection: a message that raises costs its sender the connection
    and affects no other peer.
    """
    reason = f"its message could not be handled: {type(fault).__name__}: {fault}"
    _log.error("%s loses its connection: %s", whose, reason, exc_info=fault)
    return reason
