"""n ranks as threads of this process, on memory: for notebooks and tests. The same code above the transport."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from nexar.cluster.membership import FINGERPRINT_BYTES, Member, Membership
from nexar.cluster.mesh import Mesh
from nexar.cluster.node import Node
from nexar.communicator.communicator import Communicator
from nexar.config import Config
from nexar.errors import UsageError
from nexar.group import Group
from nexar.transport.memory import MemoryNetwork

_CLUSTER: Final = "local"
_NO_KEY: Final = bytes(FINGERPRINT_BYTES)
"""Nodes of one process show no certificates: there is nobody in between."""


@contextmanager
def local_communicators(size: Any, config: Config) -> Iterator[list[Communicator]]:
    """One communicator for each rank; give each to a thread of its own. All are closed at the end."""
    if not isinstance(size, int) or size < 1:
        raise UsageError(f"a world of {size!r} ranks cannot be; give a whole number from 1")
    with ExitStack() as undo:
        network = MemoryNetwork()
        nodes = [undo.enter_context(Node(config, network)) for _ in range(size)]
        members = [Member(node.id, node.host, _NO_KEY, node.addresses(), node.capabilities) for node in nodes]
        membership = Membership(_CLUSTER, 1, tuple(members))
        made = [_communicator(node, membership, config) for node in nodes]
        for communicator, mesh in made:
            undo.callback(mesh.close)
            undo.callback(communicator.close)
        deadline = time.monotonic() + config.formation_timeout
        with ThreadPoolExecutor(max_workers=size, thread_name_prefix="nexar-local") as pool:
            for opened in [pool.submit(mesh.open_all, deadline) for _, mesh in made]:
                opened.result()
        yield [communicator for communicator, _ in made]


def _communicator(node: Node, membership: Membership, config: Config) -> tuple[Communicator, Mesh]:
    mesh = Mesh(node)
    node.listen(mesh)
    mesh.adopt(membership)
    group = Group(node, mesh, membership)

    def close() -> None:
        group.close()
        mesh.close()

    return Communicator(group, config, close), mesh
