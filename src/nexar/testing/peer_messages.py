"""What a test and its peer process say to each other: JSON, one message a line, on the child's stdin and stdout.

Credentials travel here and never on the command line, which everybody on the machine can read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import msgspec

from nexar.security.credentials import Credentials, Trust
from nexar.types import NodeId


class Assembly(Protocol):
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


class Start(msgspec.Struct, tag=True, forbid_unknown_fields=True):
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


class Dial(msgspec.Struct, tag=True):
    """Parent to child: connect to your peer there; without addresses: wait for it to dial you."""

    addresses: dict[str, str] | None = None


class Leave(msgspec.Struct, tag=True):
    """Parent to child: the test is over, close your node and end."""


class Ready(msgspec.Struct, tag=True):
    """Child to parent: I listen there."""

    addresses: dict[str, str]


class Outcome(msgspec.Struct, tag=True):
    """Child to parent, last: what the function returned, or the traceback of what it raised."""

    result: Any = None
    failure: str | None = None


Order: TypeAlias = Start | Dial | Leave
Report: TypeAlias = Ready | Outcome


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
