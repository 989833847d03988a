"""Messages between a test and its peer process: JSON lines on the child's stdin and stdout.

Credentials travel in them because every user of the machine can read a command line.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from nexar.config import Config
from nexar.security.authority import Authority
from nexar.security.certificates import Credentials, Trust
from nexar.types import NodeId


class PeerNode(Protocol):
    """A node for a peer process, constructed with (credentials, trust, schemes, host=, config=, spin=).

    Its connection is called a *line*: a Link, a Carrier or a socket.
    """

    def addresses_for(self, peer: NodeId) -> dict[str, str]:
        """The addresses that `peer` can dial, by scheme."""

    def connect(self, peer: NodeId, addresses: Mapping[str, str], timeout: float) -> Any:
        """Dials and returns the line."""

    def accept(self, timeout: float) -> Any:
        """Returns the next line that a peer opened. Raises TimeoutError."""

    def close(self) -> None:
        """Idempotent."""


class PeerStart(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Parent to child, first: identity and task."""

    credentials: Credentials
    trust: Trust
    peer: NodeId
    schemes: list[str]
    host: str
    settings: dict[str, Any]
    node_class: str
    function: str
    arguments: list[Any]
    path: list[str]
    timeout: float
    spin: float | None = None


class ConnectTo(msgspec.Struct, tag=True):
    """Parent to child: dial these addresses; without any, wait for a dial."""

    addresses: dict[str, str] | None = None


class PeerStop(msgspec.Struct, tag=True):
    """Parent to child: close the node and end."""


class PeerReady(msgspec.Struct, tag=True):
    """Child to parent: the addresses it listens on."""

    addresses: dict[str, str]


class PeerResult(msgspec.Struct, tag=True):
    """Child to parent, last: the function's return value or traceback."""

    result: Any = None
    failure: str | None = None


PeerOrder: TypeAlias = PeerStart | ConnectTo | PeerStop
PeerReport: TypeAlias = PeerReady | PeerResult


def reference(thing: str | Callable[..., Any]) -> str:
    """`module:name`, by which another process imports the function. Raises ValueError for a nested function."""
    if isinstance(thing, str):
        return thing
    if "." in thing.__qualname__:
        raise ValueError(f"{thing.__qualname__} is not at the top of its module, so another process cannot import it")
    module = _script_name() if thing.__module__ == "__main__" else thing.__module__
    return f"{module}:{thing.__qualname__}"


def _script_name() -> str:
    """The module name of the running script: other processes import it by its file name."""
    main: ModuleType = __import__("__main__")
    return Path(str(main.__file__)).stem


Function: TypeAlias = str | Callable[..., Any]
LINKED: Final = "nexar_tools.bare_nodes:LinkedNode"
RAW: Final = "nexar_tools.bare_nodes:RawNode"


@dataclass(frozen=True, slots=True)
class HostSpec:
    """A listen address, and the command that enters the host."""

    host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()


HERE: Final = HostSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionTerms:
    """Settings of both ends.

    `raw`: carriers without links. `node_class`: another node class, as `module:name`. `settings`: of `Config`.
    `timeout`: to start and connect.
    """

    schemes: Sequence[str] = ("tls",)
    raw: bool = False
    node_class: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    spin: float | None = None
    timeout: float = 30.0

    @property
    def node_class_name(self) -> str:
        return self.node_class or (RAW if self.raw else LINKED)


class ClusterAuthority:
    """Issues the certificates of both processes."""

    def __init__(self, terms: ConnectionTerms) -> None:
        self.terms = terms
        self.authority = Authority.create(f"test-{secrets.token_hex(4)}")
        self.trust = Trust(self.authority.certificate_pem)

    def start(
        self, node: NodeId, peer: NodeId, place: HostSpec, function: Function, arguments: Sequence[Any]
    ) -> PeerStart:
        terms = self.terms
        return PeerStart(
            credentials=self.authority.admit(node),
            trust=self.trust,
            peer=peer,
            schemes=list(terms.schemes),
            host=place.host,
            settings=dict(terms.settings),
            node_class=terms.node_class_name,
            function=reference(function),
            arguments=list(arguments),
            path=sys.path,
            timeout=terms.timeout,
            spin=terms.spin,
        )

    def make_node(self, node: NodeId, place: HostSpec) -> PeerNode:
        """Creates the node of this process."""
        module, _, name = self.terms.node_class_name.partition(":")
        spin = {} if self.terms.spin is None else {"spin": self.terms.spin}
        made: PeerNode = getattr(import_module(module), name)(
            self.authority.admit(node),
            self.trust,
            self.terms.schemes,
            host=place.host,
            config=Config(**self.terms.settings),
            **spin,
        )
        return made
