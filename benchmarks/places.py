"""Where transports are measured: on loopback, and between two network namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nexar_tools.network_namespaces import NetworkNamespaces, permitted
from nexar_tools.peer_protocol import HERE, HostSpec

LOOPBACK = "loopback"
NAMES = {LOOPBACK: "on loopback", "mtu1500": "between namespaces, MTU 1500", "mtu9000": "between namespaces, MTU 9000"}


def refused(name: str) -> str | None:
    """Why this place cannot be used here; None if it can."""
    return None if name == LOOPBACK else permitted()


@contextmanager
def opened(name: str) -> Iterator[tuple[HostSpec, HostSpec]]:
    """The two ends."""
    if name == LOOPBACK:
        yield HERE, HERE
        return
    with NetworkNamespaces(mtu=int(name.removeprefix("mtu"))) as network:
        yield network.place(0), network.place(1)
