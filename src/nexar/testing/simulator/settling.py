"""How a run must end. When nothing goes wrong any more, and a majority of the present membership lives:

- all its living members are in its epoch, and nobody in it is dead;
- no two of them are cut off from each other;
- every living node that is not in it knows that it was expelled, or that it has lost its majority.

When the majority is lost for good, its living members must know that.

The present membership is the newest that anybody alive is in: what only the dead knew binds nobody.
"""

from __future__ import annotations

from collections.abc import Iterator

from nexar.cluster.membership import Membership
from nexar.testing.simulator.cluster import Cluster
from nexar.testing.simulator.laws import Electorate
from nexar.testing.simulator.member import SimulatedMember
from nexar.types import NodeId


def complaints(cluster: Cluster) -> Iterator[str]:
    """What is not yet as it must be in the end. Nothing: the cluster has settled."""
    present = present_membership(cluster)
    if present is None:
        return
    if majority_lives(cluster, present):
        yield from _of_members(cluster, present)
    else:
        yield from _of_the_stuck(cluster, present)
    yield from _of_strangers(cluster, present)


def present_membership(cluster: Cluster) -> Membership | None:
    """The newest that a living node is in; None: there is nobody left."""
    epochs = [each.epoch for each in cluster.members.values() if each.alive and each.epoch and not each.is_expelled]
    return cluster.world.laws.memberships[max(epochs)] if epochs else None


def majority_lives(cluster: Cluster, present: Membership) -> bool:
    """Whether a membership can still decide what comes next: one of its members lives and reaches a majority of the
    votes that are left.
    """
    electorate, network = Electorate.of(present), cluster.world.network
    votes = [node for node in electorate.voters if _votes(cluster, node)]
    if len(votes) < electorate.majority or not network.cuts:
        return len(votes) >= electorate.majority
    living = (member.node for member in present.members if cluster.members[member.node].alive)
    return any(sum(network.both_ways(node, vote) for vote in votes) >= electorate.majority for node in living)


def _votes(cluster: Cluster, node: NodeId) -> bool:
    member = cluster.members.get(node)
    if member is not None:
        return member.alive
    return cluster.seed is not None and cluster.seed.alive and cluster.seed.may_vote


def _of_members(cluster: Cluster, present: Membership) -> Iterator[str]:
    members = {each.node: cluster.members[each.node] for each in present.members}
    for node, member in members.items():
        if not member.alive:
            yield f"node {node} is dead, and a member of epoch {present.epoch}"
        elif member.epoch != present.epoch:
            yield f"node {node} is in epoch {member.epoch}, and a member of epoch {present.epoch}"
    for one, other in sorted(cluster.world.network.cuts):
        if one in members and other in members:
            yield f"nodes {one} and {other} cannot reach each other, and are members of epoch {present.epoch}"


def _of_the_stuck(cluster: Cluster, present: Membership) -> Iterator[str]:
    for each in present.members:
        member = cluster.members[each.node]
        if member.alive and not _knows(member):
            yield f"node {each.node} does not know that the majority of epoch {member.epoch} is lost"


def _of_strangers(cluster: Cluster, present: Membership) -> Iterator[str]:
    for node, member in cluster.members.items():
        removed = cluster.world.laws.removed.get(node)
        if removed is not None and removed <= present.epoch and member.alive and not _knows(member):
            yield f"node {node} does not know that it was removed in epoch {removed}"


def _knows(member: SimulatedMember) -> bool:
    return member.is_expelled or member.is_stalled or member.epoch == 0
