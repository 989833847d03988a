"""What a test and its peer process say to each other: JSON, one message a line, on the child's stdin and stdout.

Credentials travel here and never on the command line, which everybody on the machine can read.

On which terms two processes meet: where they run, over what, and the authority that both believe.
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


class PeerSetup(Protocol):
    """A node as a peer process needs it: `LinkedNode`, `RawNode`, or one that a benchmark brings along.

    Made with (credentials, trust, schemes, host=, config=, spin=). What it connects by is called a *line* here: a Link,
    a Carrier, a socket.
    """

    def addresses_for(self, peer: NodeId) -> dict[str, str]:
        """What the peer must know to dial us, by scheme."""

    def connect(self, peer: NodeId, addresses: Mapping[str, str], timeout: float) -> Any:
        """Dial; gives the line."""

    def accept(self, timeout: float) -> Any:
        """The line that a peer dialed; TimeoutError if none did."""

    def close(self) -> None:
        """Free everything. Idempotent."""


class PeerStart(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Parent to child, first: who you are and what you do."""

    credentials: Credentials
    trust: Trust
    peer: NodeId
    schemes: list[str]
    host: str
    settings: dict[str, Any]
    assembly: str
    function: str
    arguments: list[Any]
    path: list[str]
    timeout: float
    spin: float | None = None


class ConnectTo(msgspec.Struct, tag=True):
    """Parent to child: connect to your peer there; without addresses: wait for it to dial you."""

    addresses: dict[str, str] | None = None


class PeerStop(msgspec.Struct, tag=True):
    """Parent to child: the test is over, close your node and end."""


class PeerReady(msgspec.Struct, tag=True):
    """Child to parent: I listen there."""

    addresses: dict[str, str]


class PeerResult(msgspec.Struct, tag=True):
    """Child to parent, last: what the function returned, or the traceback of what it raised."""

    result: Any = None
    failure: str | None = None


PeerOrder: TypeAlias = PeerStart | ConnectTo | PeerStop
PeerReport: TypeAlias = PeerReady | PeerResult


def reference(thing: str | Callable[..., Any]) -> str:
    """`module:name` of a function or class at module level, so that another process can import it."""
    if isinstance(thing, str):
        return thing
    if "." in thing.__qualname__:
        raise ValueError(f"{thing.__qualname__} is not at the top of its module, so another process cannot import it")
    module = _script_name() if thing.__module__ == "__main__" else thing.__module__
    return f"{module}:{thing.__qualname__}"


def _script_name() -> str:
    """A script is `__main__` only to itself; its folder is on the path, so others can import it under its file name."""
    main: ModuleType = __import__("__main__")
    return Path(str(main.__file__)).stem


Function: TypeAlias = str | Callable[..., Any]
LINKED: Final = "nexar.testing.bare_nodes:LinkedNode"
RAW: Final = "nexar.testing.bare_nodes:RawNode"


@dataclass(frozen=True, slots=True)
class HostSpec:
    """Where a process runs: the address it listens on, and the command that brings it there (`ip netns exec NAME`)."""

    host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()


HERE: Final = HostSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionTerms:
    """What both ends have in common.

    `raw`: carriers without links. `assembly` names the class of both nodes, if it is neither of the two that are here.
    `settings` are fields of `Config`. `spin`: see Progress. `timeout`: for starting and connecting, together.
    """

    schemes: Sequence[str] = ("tls",)
    raw: bool = False
    assembly: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    spin: float | None = None
    timeout: float = 30.0

    @property
    def node_class(self) -> str:
        """Where to find what makes the nodes."""
        return self.assembly or (RAW if self.raw else LINKED)


class ClusterAuthority:
    """An authority and what it admits: all that two processes need to believe each other."""

    def __init__(self, terms: ConnectionTerms) -> None:
        self.terms = terms
        self.authority = Authority.create(f"test-{secrets.token_hex(4)}")
        self.trust = Trust(self.authority.certificate_pem)

    def start(
        self, node: NodeId, peer: NodeId, place: HostSpec, function: Function, arguments: Sequence[Any]
    ) -> PeerStart:
        """What the process of `node` is told."""
        terms = self.terms
        return PeerStart(
            credentials=self.authority.admit(node),
            trust=self.trust,
            peer=peer,
            schemes=list(terms.schemes),
            host=place.host,
            settings=dict(terms.settings),
            assembly=terms.node_class,
            function=reference(function),
            arguments=list(arguments),
            path=sys.path,
            timeout=terms.timeout,
            spin=terms.spin,
        )

    def make_node(self, node: NodeId, place: HostSpec) -> PeerSetup:
        """A node of this very process."""
        module, _, name = self.terms.node_class.partition(":")
        spin = {} if self.terms.spin is None else {"spin": self.terms.spin}
        made: PeerSetup = getattr(import_module(module), name)(
            self.authority.admit(node),
            self.trust,
            self.terms.schemes,
            host=place.host,
            config=Config(**self.terms.settings),
            **spin,
        )
        return made
