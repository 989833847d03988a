"""The seed's vote in a world of threads: the same machine, without a line in between.

A world of one process cannot be cut in two, so whoever is left may always go on; with the witness it does so by the
same rules as everywhere else.

n ranks as threads of this process, on memory: for notebooks and tests. The same code above the transport.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from nexar.cluster.control_threads import SerialQueue
from nexar.cluster.decisions.membership_events import (
    MembershipAction,
    MembershipInput,
    MembershipMessage,
    MessageReceived,
    ProbeFinished,
    SendMessage,
    StartProbe,
)
from nexar.cluster.decisions.seed_voter import SeedVoter
from nexar.cluster.membership import WORLD, Member, Membership, PinnedNode
from nexar.cluster.mesh import EAGER_WORLD, Mesh, open_all
from nexar.cluster.node import Node
from nexar.communicator.bootstrap import communicator_factory, open_mesh
from nexar.communicator.communicator import Communicator
from nexar.communicator.runtime import NodeRuntime
from nexar.config import Config
from nexar.errors import UsageError
from nexar.security.invitation import FINGERPRINT_BYTES
from nexar.transport.memory import MemoryNetwork
from nexar.types import MAX_NODE, NodeId, Rank, whole
from nexar.wire.control import Message


def local_seed() -> PinnedNode:
    """As the membership names it."""
    return PinnedNode(secrets.randbelow(MAX_NODE) + 1, bytes(FINGERPRINT_BYTES))


class LocalSeedVoter:
    """Of one world. Any thread."""

    def __init__(self, membership: Membership) -> None:
        self._lock = threading.Lock()
        self._machine = SeedVoter(membership)  # under the lock
        self._receivers: dict[NodeId, Callable[[Message], None]] = {}  # those that are here; dict methods are atomic
        self._queue = SerialQueue(self._do)  # filled under the lock

    def introduce(self, node: NodeId, hear: Callable[[Message], None]) -> Callable[[Message], bool]:
        """`hear` gets what it says to this node. Returns what tells it something."""
        self._receivers[node] = hear

        def tell(message: Message) -> bool:
            if isinstance(message, MembershipMessage):
                self._put(MessageReceived(node, message))
            return True

        return tell

    def forget(self, node: NodeId) -> None:
        """It has left: whoever asks is told so."""
        self._receivers.pop(node, None)

    def _put(self, event: MembershipInput) -> None:
        with self._lock:
            self._queue.add(self._machine.step(event, time.monotonic()))
        self._queue.run()

    def _do(self, action: MembershipAction) -> None:
        if isinstance(action, SendMessage):
            hear = self._receivers.get(action.node)
            if hear is not None:
                hear(action.message)
        elif isinstance(action, StartProbe):
            self._put(ProbeFinished(action.node, None if action.node in self._receivers else "it has left"))


_CLUSTER: Final = "local"
_NO_KEY: Final = bytes(FINGERPRINT_BYTES)
"""Nodes of one process show no certificates: there is nobody in between."""


@contextmanager
def local_communicators(
    size: Any, config: Config, beside: Callable[[NodeRuntime, Rank], Callable[[], None]] | None = None
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
        seed_voter = LocalSeedVoter(membership)
        places = [_runtime(node, membership, seed_voter) for node in nodes]
        made = [_communicator(runtime, membership, seed_voter) for runtime in places]
        for communicator in made:
            undo.callback(communicator.close)
        if number <= EAGER_WORLD:
            _open_all([runtime.mesh for runtime in places], time.monotonic() + config.formation_timeout)
        if beside is not None:
            for rank, runtime in enumerate(places):
                undo.callback(beside(runtime, rank))
        yield made


def _open_all(meshes: list[Mesh], deadline: float) -> None:
    with ThreadPoolExecutor(max_workers=len(meshes), thread_name_prefix="nexar-local") as pool:
        for opened in [pool.submit(open_all, mesh, deadline) for mesh in meshes]:
            opened.result()


def _runtime(node: Node, membership: Membership, seed_voter: LocalSeedVoter) -> NodeRuntime:
    mesh, board = open_mesh(node)
    runtime = NodeRuntime(node, mesh, board, membership)
    runtime.send_to_seed = seed_voter.introduce(node.id, runtime.seed_message)
    mesh.adopt(membership)
    return runtime


def _communicator(runtime: NodeRuntime, membership: Membership, seed_voter: LocalSeedVoter) -> Communicator:
    def close() -> None:
        seed_voter.forget(runtime.node.id)
        runtime.close()
        runtime.mesh.close()

    runtime.successors.wrap = communicator_factory(runtime, close)
    world = runtime.successors.begin(membership, WORLD, time.monotonic() + runtime.node.config.formation_timeout)
    return Communicator(world, runtime, close)
