"""What turns one membership into the next: the value that members agree on. Pure.

It says what changes, not what stays, so it is small however large the world is, and it means something only to who has
the membership before it. Ranks stay dense: who stays keeps its order, who joins is appended, in the order given.

Laws:
- Applied to one and the same membership, a change gives one and the same membership, everywhere. Encoding is canonical.
- What comes after a communicator follows from the changes alone (`following`), so all its members come to the same
  answer, whenever they look. Votes follow the world; communicators follow what concerns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from nexar.cluster.membership import MAX_MEMBERS, Member, Membership, MembershipError, check_addresses, check_size
from nexar.transport.foreign_text import several_lines
from nexar.types import NodeId, Rank
from nexar.wire.messages import MAX_VALUE_BYTES, Cause

WORLD: Final = 0
"""The id of a cluster's first communicator."""


class Departure(msgspec.Struct, frozen=True, array_like=True):
    """Somebody who is no longer here."""

    node: NodeId
    cause: Cause
    """Why, for people; with its traceback if it raised."""
    willing: bool = False
    """It asked for it."""
    quiet: bool = False
    """It had closed, and nobody needed it: communicators that have it go on, until somebody there does."""


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """The step to one epoch from the one before."""

    epoch: Annotated[int, Meta(ge=2)]
    """Of the membership that it makes."""
    left: Annotated[tuple[Departure, ...], Meta(max_length=MAX_MEMBERS)] = ()
    joined: Annotated[tuple[Member, ...], Meta(max_length=MAX_MEMBERS)] = ()
    severed: tuple[tuple[NodeId, NodeId], ...] = ()
    """Pairs, the lower node first, whose connection broke although both live: what was on it may be lost."""
    renewed: tuple[int, ...] = ()
    """Communicators that go on as they are, but with a successor."""

    def apply(self, membership: Membership) -> Membership:
        """The next membership. MembershipError if this is no change of that one, if nobody would be left, or if the
        result has more members or more bytes than a membership may have, or if a joiner cannot be dialed.
        """
        if self.epoch != membership.epoch + 1:
            raise MembershipError(f"a change to epoch {self.epoch} of a membership of epoch {membership.epoch}")
        gone = self.gone
        if not gone <= {member.node for member in membership.members}:
            raise MembershipError("a change that removes who is no member")
        stay = tuple(member for member in membership.members if member.node not in gone)
        after = Membership(membership.cluster, self.epoch, stay + self.joined, membership.attendants, membership.seed)
        if self.joined:  # without joiners it only gets smaller
            check_addresses(self.joined)
            check_size(after)
        return after

    @property
    def gone(self) -> frozenset[NodeId]:
        """The nodes that left."""
        return frozenset(departure.node for departure in self.left)

    @property
    def loud(self) -> frozenset[NodeId]:
        """Those of them whose communicators end by it."""
        return frozenset(departure.node for departure in self.left if not departure.quiet)

    @property
    def quiet(self) -> frozenset[NodeId]:
        """Those of them who had closed, and disturb nobody."""
        return self.gone - self.loud

    @property
    def ends_world(self) -> bool:
        """Whether the world's communicator gets a successor by it: whoever comes, goes or is severed is a member there.
        Not by who goes quietly, nor by what is renewed elsewhere.
        """
        return bool(self.joined or self.severed or WORLD in self.renewed or self.loud)

    def touches(self, communicator: int, nodes: Sequence[NodeId] | frozenset[NodeId]) -> bool:
        """Whether a communicator of these nodes gets a successor by it."""
        if communicator == WORLD:
            return self.ends_world
        members = frozenset(nodes)
        return (
            communicator in self.renewed
            or not self.loud.isdisjoint(members)
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
        """The change that `encode` wrote. MembershipError for anything else, and for more than a ballot can carry."""
        if len(data) > MAX_VALUE_BYTES:
            raise MembershipError(f"a change of {len(data)} bytes; allowed are {MAX_VALUE_BYTES}")
        try:
            return _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MembershipError(f"not a change: {error}") from None


def following(
    communicator: int, membership: Membership, world: Membership, changes: Sequence[Change]
) -> Membership | None:
    """Who goes on after these changes, in order; None: they do not concern this communicator. `world` is what the last
    of them made; older ones may be missing, if none of them concerned it.

    The epoch is that of the last change that concerns it, and it is without all who were gone by then, also those that
    went quietly: so what does not concern it makes no difference to when somebody looks.
    """
    members = kept = membership.members
    epoch, later = membership.epoch, frozenset[NodeId]()  # who has gone since that epoch
    for change in changes:
        if change.epoch <= membership.epoch:
            continue
        touched = change.touches(communicator, [member.node for member in members])
        came = change.joined if communicator == WORLD else ()
        gone = change.gone
        members, later = tuple(each for each in (*members, *came) if each.node not in gone), later | gone
        if touched:
            kept, epoch, later = members, change.epoch, frozenset()
    if epoch == membership.epoch:
        return None
    stay = tuple(each for each in kept if each.node in later or world.rank_of(each.node) is not None)
    if communicator == WORLD:
        return Membership(membership.cluster, epoch, stay, membership.attendants, membership.seed)
    return Membership(membership.cluster, epoch, stay)


_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")
_decoder: Final = msgspec.msgpack.Decoder(Change)
