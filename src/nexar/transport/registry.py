"""Which transports there are: scheme → what makes one. Nothing is imported before it is asked for.

Others may add theirs with an entry point of the group `nexar.transports`: the name is the scheme, the object a callable
that returns a `nexar.transport.base.Transport`. Our own schemes cannot be replaced that way.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Final, TypeAlias, cast

from nexar.errors import UsageError
from nexar.transport.base import Transport

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
    return tuple(sorted(_known()))


def load(scheme: str) -> Factory:
    """What makes a transport of this scheme. UsageError if there is none; ImportError if it cannot be used here."""
    known = _known()
    if scheme not in known:
        raise UsageError(f"there is no transport {scheme!r}; there are: {', '.join(sorted(known))}")
    return cast(Factory, known[scheme].load())


def _known() -> dict[str, EntryPoint]:
    theirs = {point.name: point for point in entry_points(group=GROUP)}
    ours = {scheme: EntryPoint(scheme, target, GROUP) for scheme, target in _OURS.items()}
    return theirs | ours
