"""Rings of nodes on a memory network, whose ranks talk to each other over one another."""

from nexar.links.matching import Matching
from nexar.testing.faults import RefuseDial
from nexar.wire.frame import Space
from tests.ranks import on_every
from tests.unit.cluster.memory_mesh import Meshes, eventually, soon

TALK = 7
NUMBERED = [b"%d" % number for number in range(300)]


class Ring(Meshes):
    """Each has a connection to the next and the last, and all can talk."""

    def __init__(self, size: int, *, adopt: bool = True) -> None:
        super().__init__(size, topology="k_regular:2", adopt=adopt)
        self.talks: list[Matching] = [mesh.router.open(TALK) for mesh in self.meshes]

    def close_ring(self) -> None:
        """Every connection that there is."""
        size = len(self.nodes)
        pairs = [(rank, (rank + 1) % size) for rank in range(size)]
        on_every(pairs, lambda pair: self.link(*pair))
        eventually(lambda: all(self.linked(*pair) for pair in pairs), "the accepting ends are open too")

    def send(self, rank: int, to: int, *messages: bytes) -> None:
        link = self.link(rank, to)
        going = [link.post_send(TALK, memoryview(each)) for each in messages]
        self.nodes[rank].progress.wait(going, soon())

    def receive(self, rank: int, source: int, count: int = 1) -> list[bytes]:
        node = self.nodes[source].id
        found = []
        for _ in range(count):
            posted = self.talks[rank].post(None, source=node, space=Space.UNTAGGED, tag=0)
            self.nodes[rank].progress.wait([posted], soon())
            found.append(bytes(posted.into or b""))
        return found

    def refuse_dials(self, one: int, other: int) -> None:
        self.faults.add(self.on_way(RefuseDial, one, other), self.on_way(RefuseDial, other, one))

    def relayed_by(self, rank: int) -> int:
        return self.meshes[rank].relay_routes.relay.forwarded

    def route(self, rank: int, to: int) -> list[int]:
        """Ranks, as the link goes now."""
        (carrier,) = (self.meshes[rank].links()[self.nodes[to].id]._state.carriers[each] for each in ("relay",))
        ids = [node.id for node in self.nodes]
        return [ids.index(node) for node in carrier.route]  # type: ignore[attr-defined]
