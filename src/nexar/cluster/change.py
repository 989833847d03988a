"""What turns one membership into the next: the value that members agree on. Pure.

It says what changes, not what stays, so it is small however large the world is, and it means something only to who has
the membership before it. Ranks stay dense: who stays keeps its order, who joins is appended, in the order given.

Law: applied to one and the same membership, a change gives one and the same membership, everywhere. Encoding is
canonical.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from nexar.cluster.membership import Member, Membership, MembershipError
from nexar.transport.foreign_text import several_lines
from nexar.types import NodeId, Rank
from nexar.wire.messages import Cause


class Departure(msgspec.Struct, frozen=True, array_like=True):
    """Somebody who is no longer here."""

    node: NodeId
    cause: Cause
    """Why, for people; with its traceback if it raised."""
    willing: bool = False
    """It asked for it."""


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """The step to one epoch from the one before."""

    epoch: Annotated[int, Meta(ge=2)]
    """Of the membership that it makes."""
    left: tuple[Departure, ...] = ()
    joined: tuple[Member, ...] = ()
    severed: tuple[tuple[NodeId, NodeId], ...] = ()
    """Pairs, the lower node first, whose connection broke although both live: what was on it may be lost."""
    renewed: tuple[int, ...] = ()
    """Communicators that go on as they are, but with a successor."""

    def apply(self, membership: Membership) -> Membership:
        """The next membership. MembershipError if this is no change of that one, or nobody would be left."""
        if self.epoch != membership.epoch + 1:
            raise MembershipError(f"a change to epoch {self.epoch} of a membership of epoch {membership.epoch}")
        gone = self.gone
        if not gone <= {member.node for member in membership.members}:
            raise MembershipError("a change that removes who is no member")
        stay = tuple(member for member in membership.members if member.node not in gone)
        return Membership(membership.cluster, self.epoch, stay + self.joined, membership.attendants, membership.seed)

    @property
    def gone(self) -> frozenset[NodeId]:
        """The nodes that left."""
        return frozenset(departure.node for departure in self.left)

    def touches(self, communicator: int, nodes: Sequence[NodeId] | frozenset[NodeId]) -> bool:
        """Whether a communicator of these nodes, other than the world's, gets a successor by it."""
        members = frozenset(nodes)
        return (
            communicator in self.renewed
            or not self.gone.isdisjoint(members)
            or any(members.issuperset(pair) for pair in self.severed)
        )

    def causes(self, membership: Membership) -> dict[Rank, str]:
        """Why each is gone, by its rank in the membership before; those who held none there are left out. Fit to be
        shown, whoever wrote it.
        """
        ranks = {departure.node: membership.rank_of(departure.node) for departure in self.left}
        return {rank: several_lines(each.cause) for each in self.left if (rank := ranks[each.node]) is not None}

    def encode(self) -> bytes:
        """Canonical bytes: what a ballot carries."""
        return _encoder.encode(self)

    @staticmethod
    def decode(data: bytes | bytearray | memoryview) -> Change:
        """The change that `encode` wrote. MembershipError for anything else."""
        try:
            return _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MembershipError(f"not a change: {error}") from None


_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")
_decoder: Final = msgspec.msgpack.Decoder(Change)
