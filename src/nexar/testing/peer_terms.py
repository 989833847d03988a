"""On which terms two processes meet: where they run, over what, and the authority that both believe."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final, TypeAlias

from nexar.config import Config
from nexar.security.authority import Authority
from nexar.security.credentials import Trust
from nexar.testing.peer_messages import Assembly, Start, reference
from nexar.types import NodeId

Function: TypeAlias = str | Callable[..., Any]
LINKED: Final = "nexar.testing.linked_node:LinkedNode"
RAW: Final = "nexar.testing.raw_node:RawNode"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs: the address it listens on, and the command that brings it there (`ip netns exec NAME`)."""

    host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()


HERE: Final = Place()


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
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


class Cluster:
    """An authority and what it admits: all that two processes need to believe each other."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.authority = Authority.create(f"test-{secrets.token_hex(4)}")
        self.trust = Trust(self.authority.certificate_pem)

    def start(self, node: NodeId, peer: NodeId, place: Place, function: Function, arguments: Sequence[Any]) -> Start:
        """What the process of `node` is told."""
        terms = self.terms
        return Start(
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

    def make_node(self, node: NodeId, place: Place) -> Assembly:
        """A node of this very process."""
        module, _, name = self.terms.node_class.partition(":")
        spin = {} if self.terms.spin is None else {"spin": self.terms.spin}
        made: Assembly = getattr(import_module(module), name)(
            self.authority.admit(node),
            self.trust,
            self.terms.schemes,
            host=place.host,
            config=Config(**self.terms.settings),
            **spin,
        )
        return made
