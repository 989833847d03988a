"""A world of threads in one process, on the memory transport.

A local seed voter replaces the seed, so membership changes follow the same rules. One process cannot be partitioned:
remaining ranks can always continue.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from nexar.cluster.control_loop import SerialQueue
from nexar.cluster.decisions.membership_events import (
    Loss,
    LossKind,
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
from nexar.cluster.seed_session import SeedLink
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
    """Return a random seed for a local membership."""
    return PinnedNode(secrets.randbelow(MAX_NODE) + 1, bytes(FINGERPRINT_BYTES))


_FORGOTTEN: Final = Loss(LossKind.LEFT, "it has left")


class LocalSeedVoter:
    """The seed's vote in a local world. Any thread."""

    def __init__(self, membership: Membership) -> None:
        self._lock = threading.Lock()
        self._machine = SeedVoter(membership)  # under the lock
        self._receivers: dict[NodeId, Callable[[Message], None]] = {}  # dict methods are atomic
        self._queue = SerialQueue(self._do)  # filled under the lock

    def link(self, node: NodeId) -> SeedLink:

        def send(message: Message) -> bool:
            if isinstance(message, MembershipMessage):
                self._put(MessageReceived(node, message))
            return True

        return SeedLink(send, lambda _, done: done(True))

    def introduce(self, node: NodeId, receive: Callable[[Message], None]) -> None:
        self._receivers[node] = receive

    def forget(self, node: NodeId) -> None:
        """Probes of this node now fail."""
        self._receivers.pop(node, None)

    def _put(self, event: MembershipInput) -> None:
        with self._lock:
            self._queue.post(self._machine.step(event, time.monotonic()))
        self._queue.drain()

    def _do(self, action: MembershipAction) -> None:
        if isinstance(action, SendMessage):
            receive = self._receivers.get(action.node)
            if receive is not None:
                receive(action.message)
        elif isinstance(action, StartProbe):
            self._put(ProbeFinished(action.node, None if action.node in self._receivers else _FORGOTTEN))


_CLUSTER: Final = "local"
# Nodes of one process use no certificates.
_NO_KEY: Final = bytes(FINGERPRINT_BYTES)


@contextmanager
def local_communicators(
    size: Any, config: Config, beside: Callable[[NodeRuntime, Rank], Callable[[], None]] | None = None
) -> Iterator[list[Communicator]]:
    """Yield a communicator per rank, each for its own thread; close all at the end. `beside` is called with each node,
    its result first on close.
    """
    number = whole(size)
    if number is None or number < 1:
        raise UsageError(f"a world cannot have {size!r} ranks; give a whole number of at least 1")
    with ExitStack() as undo:
        network = MemoryNetwork()
        nodes = [undo.enter_context(Node(config, network)) for _ in range(number)]
        members = [Member(node.id, node.host, _NO_KEY, node.addresses(), node.schemes) for node in nodes]
        membership = Membership(_CLUSTER, 1, tuple(members), seed=local_seed())
        seed_voter = LocalSeedVoter(membership)
        ends = [ExitStack() for _ in nodes]
        runtimes = [_runtime(node, membership, seed_voter, each) for node, each in zip(nodes, ends, strict=True)]
        made = [_communicator(runtime, membership, each.close) for runtime, each in zip(runtimes, ends, strict=True)]
        for communicator in made:
            undo.callback(communicator.close)
        if number <= EAGER_WORLD:
            _open_all([runtime.mesh for runtime in runtimes], time.monotonic() + config.formation_timeout)
        if beside is not None:
            for rank, runtime in enumerate(runtimes):
                undo.callback(beside(runtime, rank))
        yield made


def _open_all(meshes: list[Mesh], deadline: float) -> None:
    with ThreadPoolExecutor(max_workers=len(meshes), thread_name_prefix="nexar-local") as pool:
        for opened in [pool.submit(open_all, mesh, deadline) for mesh in meshes]:
            opened.result()


def _runtime(node: Node, membership: Membership, seed_voter: LocalSeedVoter, ends: ExitStack) -> NodeRuntime:
    """`ends` closes it."""
    mesh = open_mesh(node)
    wrap = communicator_factory(ends.close)
    runtime = NodeRuntime(node, mesh, membership, seed=seed_voter.link(node.id), wrap=wrap)
    seed_voter.introduce(node.id, runtime.seed_message)
    mesh.adopt(membership)
    ends.callback(mesh.close)
    ends.callback(runtime.close)
    ends.callback(seed_voter.forget, node.id)
    return runtime


def _communicator(runtime: NodeRuntime, membership: Membership, close: Callable[[], None]) -> Communicator:
    world = runtime.successors.begin(membership, WORLD, time.monotonic() + runtime.node.config.formation_timeout)
    return Communicator(world, runtime, close)
