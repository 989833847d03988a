"""Which transports there are: scheme → what makes one. Nothing is imported before it is asked for.

Others may add theirs with an entry point of the group `nexar.transports`: the name is the scheme, the object a callable
`(waker, credentials, trust)` that returns a `nexar.transport.base.Transport`. It is used by nodes that name it in their
setting `transports`. Our own schemes cannot be replaced that way. What theirs raises is told with the name of the
package: here, or where it is driven (`foreign`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from nexar.errors import UsageError
from nexar.transport.base import Transport
from nexar.transport.foreign import Foreign
from nexar.types import describe_package

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

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
    return Foreign(made, partial(_explain, point))


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
