"""A transport of another package, as the node that drives it sees it: what it raises there has a name.

An error of one of ours is a bug of nexar, and says so by itself. One of a package that was installed beside us would
end the driving thread somewhere in the middle, and nobody who waits would learn why. So what such a transport raises
while it is driven is logged once, with its traceback, and raised as `TransportBroke`; the node ends all waiting with
it. The whole node, not the links of that transport only: nobody can tell what it has lost, and a link is one with all
its carriers.

Which transports there are: scheme → what makes one. Nothing is imported before it is asked for.

Others may add theirs with an entry point of the group `nexar.transports`: the name is the scheme, the object a callable
`(waker, credentials, trust)` that returns a `nexar.transport.base.Transport`. It is used by nodes that name it in their
setting `transports`. Our own schemes cannot be replaced that way. What theirs raises is told with the name of the
package: here, or where it is driven (`foreign`).

A message that raises in its handler costs its sender the connection; the log has the traceback.
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
    """A transport of another package raised while it was driven; its cause is what it raised."""


class ForeignTransport(Transport):
    """Everything goes through to the transport inside; its carriers are its own."""

    def __init__(self, inside: Transport, blame: Callable[[BaseException], str]) -> None:
        """`blame`: what to say of an error, with the name of the package."""
        self.scheme = inside.scheme
        self.inside = inside
        self._blame = blame
        self._told = False  # written by who drives, or closes

    @property
    def address(self) -> str | None:  # type: ignore[override]  # the one inside says where it listens
        """See Transport."""
        return self.inside.address

    def replace_credentials(self, credentials: Credentials, trust: Trust) -> None:
        """See Transport."""
        self.inside.replace_credentials(credentials, trust)

    def expect_peers(self, count: int) -> None:
        """See Transport."""
        self.inside.expect_peers(count)

    def listen(self, address: str, acceptor: Acceptor) -> str:
        """See Transport."""
        return self.inside.listen(address, acceptor)

    def address_for(self, node: int) -> str | None:
        """See Transport."""
        return self.inside.address_for(node)

    def connect(self, address: str, expected: Expected, deadline: float) -> Carrier:
        """See Transport."""
        return self.inside.connect(address, expected, deadline)

    # -- what is driven --------------------------------------------------------------------------------

    def poll(self) -> bool:
        """See Transport. TransportBroke."""
        try:
            return self.inside.poll()
        except Exception as error:  # noqa: BLE001 - whatever the code of a package raises
            self._break(error)

    @property
    def spins(self) -> bool:
        """See Transport. TransportBroke."""
        try:
            return self.inside.spins
        except Exception as error:  # noqa: BLE001
            self._break(error)

    def prepare_sleep(self) -> bool:
        """See Transport. TransportBroke."""
        try:
            return self.inside.prepare_sleep()
        except Exception as error:  # noqa: BLE001
            self._break(error)

    def due(self) -> float | None:
        """See Transport. TransportBroke."""
        try:
            return self.inside.due()
        except Exception as error:  # noqa: BLE001
            self._break(error)

    def close(self) -> None:
        """See Transport. What it raises is logged and no more: nobody waits for it now, and the rest must close."""
        try:
            self.inside.close()
        except Exception as error:  # noqa: BLE001
            self._tell(error)

    def abandon(self) -> None:
        """See Transport."""
        self.inside.abandon()

    def _break(self, error: Exception) -> NoReturn:
        self._tell(error)
        raise TransportFailed(self._blame(error)) from error

    def _tell(self, error: Exception) -> None:
        if not self._told:
            self._told = True
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
    """Every scheme that has a transport, whether or not it can be used here."""
    return tuple(sorted({*_theirs(), *_OURS}))


def is_ours(scheme: str) -> bool:
    """Whether it is one of nexar's own."""
    return scheme in _OURS


def load(scheme: str) -> Factory:
    """What makes a transport of this scheme. UsageError if there is none, or if the package that should have it cannot
    be loaded, which it names; ImportError if one of ours cannot be used here.
    """
    if scheme in _OURS:
        module, _, name = _OURS[scheme].partition(":")
        return cast(Factory, getattr(import_module(module), name))
    theirs = _theirs()
    if scheme not in theirs:
        raise UsageError(f"there is no transport {scheme!r}; there are: {', '.join(schemes())}")
    point = theirs[scheme]
    try:
        factory = point.load()
    except (Exception, SystemExit) as error:  # whatever the code of a package raises: it must not end us unheard
        raise _broken(point, error) from error
    return partial(_make, point, factory)


def blame(scheme: str, error: Exception) -> UsageError:
    """For what a transport of another package raised when it was put to use: the error that names the package."""
    return _broken(_theirs()[scheme], error)


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


def _theirs() -> dict[str, EntryPoint]:
    """Looking through all that is installed takes longer than a cluster may take to form: only who needs it does."""
    from importlib.metadata import entry_points  # noqa: PLC0415

    return {point.name: point for point in entry_points(group=GROUP)}


def log_unhandled(whose: str, fault: Exception) -> str:
    """Log that a message of `whose` raised `fault`. Returns the reason for which its connection ends.

    Call it in the `except` block of the boundary that ends the connection, and nowhere else: a message that raises
    costs its sender the connection, and no other peer anything.
    """
    reason = f"its message could not be handled: {type(fault).__name__}: {fault}"
    _log.error("%s loses its connection: %s", whose, reason, exc_info=fault)
    return reason
