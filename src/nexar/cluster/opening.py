"""Every link of a small world, opened at once: so that a pair that cannot reach each other is known before anybody
computes.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from nexar.cluster.mesh import Mesh
from nexar.errors import PeerLost
from nexar.types import NodeId

EAGER_WORLD: Final = 8
"""Up to this size every link is opened at once; in larger worlds a link is opened when it is first used."""
_HEAD_START: Final = 3.0
"""Seconds that the lower rank has to open a link, before the higher one dials too; after a dial that failed, the lower
one waits a little longer than that for the other's."""
_OPENERS: Final = 8  # links opened at the same time


def open_all(mesh: Mesh, deadline: float) -> None:
    """Every link to a neighbour that is not open yet. Raises the first failure, when all have ended."""
    circle = mesh.circle
    members, mine = circle.membership.members, circle.rank
    opened = {node for node in mesh.links() if mesh.relaying.link(node) is not None}
    order = [*range(mine + 1, len(members)), *range(mine)]
    wanted = [rank for rank in order if mesh.relaying.wants(members[rank].node)]
    missing = [rank for rank in wanted if members[rank].node not in opened]
    if not missing:
        return
    with ThreadPoolExecutor(min(_OPENERS, len(missing)), thread_name_prefix="nexar-open") as pool:
        openings = [pool.submit(_open, mesh, members[rank].node, rank < mine, deadline) for rank in missing]
    for opening in openings:
        opening.result()


def _open(mesh: Mesh, node: NodeId, lower: bool, deadline: float) -> None:
    """The lower rank dials, so that a small world needs no second dial; where it does not get through, perhaps the
    higher one does.
    """
    if lower and mesh.is_open(node, min(deadline, time.monotonic() + _HEAD_START)):
        return
    try:
        mesh.relink(node, deadline)
    except PeerLost:
        if not mesh.is_open(node, min(deadline, time.monotonic() + 2 * _HEAD_START)):
            raise
