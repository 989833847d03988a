"""The transports by scheme, and the wrapper around third-party transports.

Other packages add a transport with an entry point of the group `nexar.transports`. Its name is the scheme; its object
is a callable `(waker, credentials, trust)` that returns a `nexar.transport.base.Transport`. Nodes whose setting
`transports` names it use it. Built-in schemes cannot be replaced.

If it raises while driven, all waiting calls of the node raise TransportFailed: the lost data is unknown, and a link
uses all its carriers as one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, cast

from nexar.errors import UsageError
from nexar.native import native_installed
from nexar.security.certificates import Credentials, Trust
from nexar.transport.base import Acceptor, Carrier, Expected, Transport, TransportCapabilities
from nexar.types import describe_package

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


_log = logging.getLogger(__name__)


class TransportFailed(UsageError):
    """A third-party transport raised while it was driven; `__cause__` has the exception."""


class ThirdPartyTransport(Transport):
    """Logs the first exception of a third-party transport and raises TransportFailed for each. Carriers are not
    wrapped.
    """

    def __init__(
        self, inside: Transport, capabilities: TransportCapabilities, explain: Callable[[BaseException], str]
    ) -> None:
        """`explain` returns a message that names the package."""
        self.scheme = inside.scheme
        self.capabilities = capabilities
        self.inside = inside
        self._explain = explain
        self._logged = False  # written by the driver or the closing thread

    @property
    def address(self) -> str | None:  # type: ignore[override]  # the inner transport knows where it listens
        return self.inside.address

    def replace_credentials(self, credentials: Credentials, trust: Trust) -> None:
        self.inside.replace_credentials(credentials, trust)

    def expect_peers(self, count: int) -> None:
        self.inside.expect_peers(count)

    def lose_at_exit(self, enabled: bool) -> None:
        self.inside.lose_at_exit(enabled)

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
        """Only logs exceptions: the other transports must close."""
        try:
            self.inside.close()
        except Exception as error:  # noqa: BLE001
            self._log_once(error)

    def abandon(self) -> None:
        self.inside.abandon()

    def _raise_failed(self, error: Exception) -> NoReturn:
        self._log_once(error)
        raise TransportFailed(self._explain(error)) from error

    def _log_once(self, error: Exception) -> None:
        if not self._logged:
            self._logged = True
            _log.error("%s", self._explain(error), exc_info=error)


Factory: TypeAlias = Callable[..., Transport]

GROUP: Final = "nexar.transports"


@dataclass(frozen=True, slots=True)
class _BuiltinTransport:
    number: int  # of its frames: the wire format, below FIRST_THIRD_PARTY
    factory: str  # module:name, imported when it is needed
    capabilities: TransportCapabilities
    not_opened: str | None = None  # what the user should do instead, if a node never opens it on request
    needs_native: bool = False
    why_unavailable: str | None = None  # module:name of a function without arguments; None: it can always be used


FIRST_THIRD_PARTY: Final = 16
"""The first number of third-party schemes; 5 is a relayed carrier."""
# In order of preference. Never change a number.
_BUILTIN: Final = {
    "memory": _BuiltinTransport(
        0,
        "nexar.transport.memory.transport:MemoryTransport",
        TransportCapabilities(in_process=True, has_certificates=False, closes_on_death=True),
        not_opened="memory connects nodes of one process, in tests only: leave it out",
    ),
    "shm": _BuiltinTransport(
        1,
        "nexar.transport.shm.transport:ShmTransport",
        TransportCapabilities(shares_memory=True, has_certificates=False, closes_on_death=True),
        why_unavailable="nexar.transport.shm.ring:missing_support",
    ),
    "quic": _BuiltinTransport(
        2,
        "nexar.transport.quic.transport:QuicTransport",
        TransportCapabilities(node_port="UDP", shows_life=True),
        needs_native=True,
        why_unavailable="nexar.transport.quic:missing_support",
    ),
    "tls": _BuiltinTransport(
        3,
        "nexar.transport.tls.transport:TlsTransport",
        TransportCapabilities(node_port="TCP", closes_on_death=True),
    ),
    # Not a port of its own: the peer's TLS transport accepts its connections and stops encrypting them.
    "tcp": _BuiltinTransport(
        4,
        "nexar.transport.tls.transport:PlainTransport",
        TransportCapabilities(encrypts=False, closes_on_death=True),
        not_opened="tcp is used only for large payloads: leave it out, and set NEXAR_ENCRYPT_BULK_TRANSPORT=0",
    ),
}
_UNKNOWN: Final = TransportCapabilities()
_declared: Final = {
    scheme: builtin.capabilities for scheme, builtin in _BUILTIN.items()
}  # third-party ones are added when made


def schemes() -> tuple[str, ...]:
    """Return every scheme, usable here or not."""
    return tuple(sorted({*_third_party(), *_BUILTIN}))


def is_builtin(scheme: str) -> bool:
    """Whether nexar itself has the scheme."""
    return scheme in _BUILTIN


def builtin_numbers() -> dict[str, int]:
    """Return the number of each built-in scheme in frames, preferred schemes first."""
    return {scheme: builtin.number for scheme, builtin in _BUILTIN.items()}


def opened_on_request() -> tuple[str, ...]:
    """Return the built-in schemes that the setting `transports` may name."""
    return tuple(scheme for scheme, builtin in _BUILTIN.items() if builtin.not_opened is None)


def why_not_opened(scheme: str) -> str | None:
    """Return what to do instead of naming this built-in scheme in the setting; None if it may be named."""
    return _BUILTIN[scheme].not_opened


def capabilities_of(scheme: str) -> TransportCapabilities:
    """Return the capabilities of this scheme, the defaults if this process does not know it. Fast."""
    return _declared.get(scheme, _UNKNOWN)


def node_port_schemes() -> dict[str, str]:
    """Return the schemes that listen at the node's port, each with "UDP" or "TCP"."""
    return {
        scheme: builtin.capabilities.node_port for scheme, builtin in _BUILTIN.items() if builtin.capabilities.node_port
    }


def tcp_scheme(schemes: Iterable[str]) -> str | None:
    """Return the scheme that listens at the node's TCP port, or None."""
    return next((scheme for scheme in schemes if capabilities_of(scheme).node_port == "TCP"), None)


def is_installed(scheme: str) -> bool:
    """Return False if the scheme needs the native package and it is not installed."""
    return scheme not in _BUILTIN or not _BUILTIN[scheme].needs_native or native_installed()


def why_unavailable(scheme: str) -> str | None:
    """Return why this process cannot use the scheme; None if it can, or if only making its transport shows it."""
    check = _BUILTIN[scheme].why_unavailable if scheme in _BUILTIN else None
    return None if check is None else cast(str | None, _import(check)())


def load(scheme: str) -> Factory:
    """Return the factory of this scheme's transport. Raises UsageError if the scheme is unknown or its package cannot
    be loaded, ImportError if a built-in one cannot be used.
    """
    if scheme in _BUILTIN:
        return cast(Factory, _import(_BUILTIN[scheme].factory))
    third_party = _third_party()
    if scheme not in third_party:
        raise UsageError(f"unknown transport {scheme!r}; available: {', '.join(schemes())}")
    point = third_party[scheme]
    try:
        factory = point.load()
    except (Exception, SystemExit) as error:  # third-party code may raise anything; name its package
        raise _broken(point, error) from error
    return partial(_make, point, factory)


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def package_error(scheme: str, error: Exception) -> UsageError:
    """Return the error that names the package whose transport raised `error`."""
    return _broken(_third_party()[scheme], error)


def _make(point: EntryPoint, factory: Any, *arguments: Any, **settings: Any) -> Transport:
    try:
        made = factory(*arguments, **settings)
        declared = getattr(made, "capabilities", None)  # read once: it is the package's code
    except (Exception, SystemExit) as error:
        raise _broken(point, error) from error
    if not isinstance(made, Transport) or made.scheme != point.name:
        raise _broken(point, TypeError(f"it made {made!r}, which is no Transport of that scheme"))
    _declared[point.name] = capabilities = _checked(point, declared)
    return ThirdPartyTransport(made, capabilities, partial(_explain, point))


# The others are reserved: all members must know them, also those without the package, and every peer is encrypted and
# shows the certificate that the membership names.
_DECLARABLE: Final = ("closes_on_death", "shows_life")


def _checked(point: EntryPoint, declared: object) -> TransportCapabilities:
    """Raises UsageError for another type, and for capabilities reserved for built-in transports."""
    if not isinstance(declared, TransportCapabilities):
        raise _broken(point, TypeError(f"its capabilities are {declared!r}, not a TransportCapabilities"))
    given = {name: getattr(declared, name) for name in _DECLARABLE}
    if not all(isinstance(value, bool) for value in given.values()):
        raise _broken(point, TypeError(f"{' and '.join(_DECLARABLE)} must be True or False; it declares {given}"))
    if declared != TransportCapabilities(**given):
        allowed = " and ".join(_DECLARABLE)
        raise _broken(point, TypeError(f"it declares {declared!r}; a transport of another package may set {allowed}"))
    return declared


def _broken(point: EntryPoint, error: BaseException) -> UsageError:
    return UsageError(_explain(point, error))


def _explain(point: EntryPoint, error: BaseException) -> str:
    return (
        f"the transport {point.name!r} of {describe_package(point)} cannot be used ({type(error).__name__}: {error}); "
        f"repair that package, or take {point.name!r} out of the transports"
    )


def _third_party() -> dict[str, EntryPoint]:
    """Slow: scans all installed packages."""
    from importlib.metadata import entry_points  # noqa: PLC0415

    return {point.name: point for point in entry_points(group=GROUP)}


def log_unhandled(whose: str, fault: Exception) -> str:
    """Log that a message of `whose` raised `fault`. Returns the reason for ending its connection.

    Only for the `except` block that ends the connection, so that the message affects no other peer.
    """
    reason = f"its message could not be handled: {type(fault).__name__}: {fault}"
    _log.error("%s loses its connection: %s", whose, reason, exc_info=fault)
    return reason
