"""shm://<listener's node>:<key>@<path of its socket>. The key makes it a secret of the two nodes; `shown` leaves it
out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from nexar.types import format_node, parse_node

SCHEME: Final = "shm"
_START: Final = f"{SCHEME}://"


@dataclass(frozen=True, slots=True)
class ShmAddress:
    """Where a node listens, and what proves that one may dial it."""

    node: int
    path: str
    key: bytes | None = field(default=None, repr=False)

    @property
    def shown(self) -> str:
        """For people and logs."""
        return f"{_START}{format_node(self.node)}@{self.path}"

    @property
    def secret(self) -> str:
        """For the one peer it is meant for."""
        key = "" if self.key is None else f":{self.key.hex()}"
        return f"{_START}{format_node(self.node)}{key}@{self.path}"


def parse_address(text: str) -> ShmAddress:
    """The address that `secret` or `shown` wrote. ValueError, which does not quote the key."""
    credentials, at, path = text.removeprefix(_START).partition("@")
    node, _, key = credentials.partition(":")
    if not text.startswith(_START) or not at or not path:
        raise ValueError(f"not an address of the form {_START}NODE:KEY@PATH")
    return ShmAddress(parse_node(node), path, bytes.fromhex(key) if key else None)


def listen_directory(text: str) -> str | None:
    """The directory that `listen` is asked for by `shm://DIRECTORY` or `DIRECTORY`; None: the transport chooses."""
    return text.removeprefix(_START).removeprefix(f"{SCHEME}:") or None
