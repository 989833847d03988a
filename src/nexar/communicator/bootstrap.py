"""From settings and an invitation to a communicator: node, worker, mesh, group."""

from __future__ import annotations

import time
from contextlib import ExitStack

from nexar.cluster.join_line import JoinLine
from nexar.cluster.mesh import Mesh
from nexar.cluster.node import Node
from nexar.cluster.opening import EAGER_WORLD, open_all
from nexar.cluster.standing import Standing
from nexar.cluster.worker import Joined, Place, Worker
from nexar.communicator.communicator import Communicator
from nexar.communicator.maker import WORLD, Maker
from nexar.config import Config
from nexar.errors import UsageError
from nexar.security.invitation import Invitation
from nexar.types import UNKNOWN_NODE, NodeId, Rank


def bootstrap(
    config: Config,
    invitation: Invitation,
    *,
    rank: Rank | None = None,
    launcher: NodeId = UNKNOWN_NODE,
    size: int | None = None,
) -> Communicator:
    """Join, and return when everybody is there and can be reached. The caller closes the communicator.

    `rank`, `launcher`, `size`: what whoever started this process said; the cluster must agree. JoinRefused,
    SeedUnreachable, FormationTimeout, PeerLost; nothing is left behind then.
    """
    deadline = time.monotonic() + config.formation_timeout
    with ExitStack() as undo:
        node = undo.enter_context(Node(config))
        mesh = Mesh(node)
        undo.callback(mesh.close)
        node.listen(mesh)
        place = Place(rank, launcher)
        joined = Worker(node, invitation, timeout=config.formation_timeout).join(place)
        standing = _stand(node, invitation, place, joined, config)
        undo.callback(standing.close)
        _check_size(joined, size)
        mesh.adopt(joined.membership)
        maker = Maker(node, mesh, config)
        undo.callback(maker.close)
        if joined.membership.size <= EAGER_WORLD:
            open_all(mesh, deadline)
        assembly, _ = maker.make(joined.membership, WORLD, deadline)
        ends = undo.pop_all()
    return Communicator(assembly, maker, ends.close)


def _stand(node: Node, invitation: Invitation, place: Place, joined: Joined, config: Config) -> Standing:
    def knock() -> JoinLine:
        return Worker(node, invitation, timeout=config.join_auth_timeout).rejoin(place).line

    return Standing(node, joined.line, joined.welcome, knock)


def _check_size(joined: Joined, size: int | None) -> None:
    if size is not None and size != joined.membership.size:
        raise UsageError(
            f"this process was started as one of {size}, but the cluster has {joined.membership.size} members; "
            "give the seed and the launcher the same size"
        )
