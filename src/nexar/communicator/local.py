"""n ranks as threads of this process, on memory: for notebooks and tests. The same code above the transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from nexar.cluster.change import WORLD
from nexar.cluster.membership import Member, Membership
from nexar.cluster.mesh import Mesh
from nexar.cluster.node import Node
from nexar.cluster.opening import EAGER_WORLD, open_all
from nexar.communicator.bootstrap import connected, wrapper
from nexar.communicator.communicator import Communicator
from nexar.communicator.local_witness import LocalWitness, local_seed
from nexar.communicator.presence import Presence
from nexar.config import Config
from nexar.errors import UsageError
from nexar.security.invitation import FINGERPRINT_BYTES
from nexar.transport.memory import MemoryNetwork
from nexar.types import Rank, whole

_CLUSTER: Final = "local"
_NO_KEY: Final = bytes(FINGERPRINT_BYTES)
"""Nodes of one process show no certificates: there is nobody in between."""


@contextmanager
def local_communicators(
    size: Any, config: Config, beside: Callable[[Presence, Rank], Callable[[], None]] | None = None
) -> Iterator[list[Communicator]]:
    """One communicator for each rank; give each to a thread of its own. All are closed at the end. `beside` is told of
    each node; what it returns is called first then.
    """
    number = whole(size)
    if number is None or number < 1:
        raise UsageError(f"a world of {size!r} ranks cannot be; give a whole number from 1")
    with ExitStack() as undo:
        network = MemoryNetwork()
        nodes = [undo.enter_context(Node(config, network)) for _ in range(number)]
        members = [Member(node.id, node.host, _NO_KEY, node.addresses(), node.capabilities) for node in nodes]
        membership = Membership(_CLUSTER, 1, tuple(members), seed=local_seed())
        witness = LocalWitness(membership)
        places = [_presence(node, membership, witness) for node in nodes]
        made = [_communicator(presence, membership, witness) for presence in places]
        for communicator in made:
            undo.callback(communicator.close)
        if number <= EAGER_WORLD:
            _open_all([presence.mesh for presence in places], time.monotonic() + config.formation_timeout)
        if beside is not None:
            for rank, presence in enumerate(places):
                undo.callback(beside(presence, rank))
        yield made


def _open_all(meshes: list[Mesh], deadline: float) -> None:
    with ThreadPoolExecutor(max_workers=len(meshes), thread_name_prefix="nexar-local") as pool:
        for opened in [pool.submit(open_all, mesh, deadline) for mesh in meshes]:
            opened.result()


def _presence(node: Node, membership: Membership, witness: LocalWitness) -> Presence:
    mesh, board = connected(node)
    presence = Presence(node, mesh, board, membership)
    presence.tell_seed = witness.introduce(node.id, presence.seed_said)
    mesh.adopt(membership)
    return presence


def _communicator(presence: Presence, membership: Membership, witness: LocalWitness) -> Communicator:
    def close() -> None:
        witness.forget(presence.node.id)
        presence.close()
        presence.mesh.close()

    presence.lineage.wrap = wrapper(presence, close)
    world = presence.lineage.begin(membership, WORLD, time.monotonic() + presence.node.config.formation_timeout)
    return Communicator(world, presence, close)
