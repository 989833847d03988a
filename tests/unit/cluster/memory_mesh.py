"""Meshes on a memory network, the lower node id first."""

import time
from collections.abc import Callable
from contextlib import ExitStack

from nexar.cluster.membership import Member, Membership
from nexar.cluster.mesh import Mesh
from nexar.cluster.node import Node
from nexar.config import Config
from nexar.links.link import Link
from nexar.testing.faults import Fault, Faults
from nexar.transport.memory import MemoryNetwork
from tests.ranks import EVENT_TIMEOUT


def soon(seconds: float = EVENT_TIMEOUT) -> float:
    return time.monotonic() + seconds


class Meshes:
    """`size` nodes, ranks in the order of their ids. Close it."""

    def __init__(self, size: int, *, adopt: bool = True, topology: str = "full_mesh") -> None:
        self.network = MemoryNetwork()
        self.faults = Faults(self.network)
        config = Config(topology=topology)
        self.nodes = sorted((Node(config, self.network) for _ in range(size)), key=lambda node: node.id)
        self.refused: list[str] = []
        self.membership = Membership("ours", 1, tuple(member_of(node) for node in self.nodes))
        self.meshes = [Mesh(node, on_refused=lambda _, reason: self.refused.append(reason)) for node in self.nodes]
        for node, mesh in zip(self.nodes, self.meshes, strict=True):
            node.listen(mesh)
            if adopt:
                mesh.adopt(self.membership)

    def link(self, rank: int, to: int, timeout: float = EVENT_TIMEOUT) -> Link:
        return self.meshes[rank].link(self.nodes[to].id, soon(timeout))

    def linked_to(self, rank: int, other: int) -> Link:
        """The link that a rank has to another."""
        return self.meshes[rank].links()[self.nodes[other].id]

    def on_way(self, kind: Callable[..., Fault], rank: int, to: int, **facts: int) -> Fault:
        """A fault from one rank to another."""
        return kind(source=self.nodes[rank].id, destination=self.nodes[to].id, **facts)

    def linked(self, one: int, other: int) -> bool:
        """Whether the two have one link and nothing is wrong with it, at both ends."""
        ends = [
            self.meshes[one].links().get(self.nodes[other].id),
            self.meshes[other].links().get(self.nodes[one].id),
        ]
        return all(end is not None and end.failure is None and end.schemes == ("memory",) for end in ends)

    def close(self) -> None:
        with ExitStack() as undo:
            for node in self.nodes:
                undo.callback(node.close)
            for mesh in self.meshes:
                undo.callback(mesh.close)


def member_of(node: Node, *, node_id: int | None = None) -> Member:
    return Member(node_id or node.id, node.host, bytes(32), node.addresses(), node.schemes)


def eventually(true: Callable[[], object], what: str) -> None:
    deadline = soon()
    while not true():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.002)
