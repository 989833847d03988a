"""Which transports there are: scheme → what makes one. Nothing is imported before it is asked for.

Others may add theirs with an entry point of the group `nexar.transports`: the name is the scheme, the object a callable
that returns a `nexar.transport.base.Transport`. Our own schemes cannot be replaced that way.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from nexar.errors import UsageError
from nexar.transport.base import Transport

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


def load(scheme: str) -> Factory:
    """What makes a transport of this scheme. UsageError if there is none; ImportError if it cannot be used here."""
    if scheme in _OURS:
        module, _, name = _OURS[scheme].partition(":")
        return cast(Factory, getattr(import_module(module), name))
    theirs = _theirs()
    if scheme not in theirs:
        raise UsageError(f"there is no transport {scheme!r}; there are: {', '.join(schemes())}")
    return cast(Factory, theirs[scheme].load())


def _theirs() -> dict[str, EntryPoint]:
    """Looking through all that is installed takes longer than a cluster may take to form: only who needs it does."""
    from importlib.metadata import entry_points  # noqa: PLC0415

    return {point.name: point for point in entry_points(group=GROUP)}
