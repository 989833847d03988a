"""The membership at one epoch, and the change that leads to the next. Pure and immutable.

Ranks are indices, so they are dense. Keys are pinned by fingerprint: members recognise each other without the seed.
Launchers and the seed are pinned too but hold no rank.

Invariants:
- Encodings are canonical: equal values have equal bytes.
- A change holds only differences. Applied to equal memberships it gives equal ones. Remaining members keep their order;
  joiners are appended.
- The next generation of a communicator follows from the changes alone, so all its members compute the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from nexar.cluster.addresses import check_advertised
from nexar.errors import UsageError
from nexar.security.invitation import FINGERPRINT_BYTES
from nexar.types import NodeId, Rank, format_node
from nexar.wire.control import MAX_VALUE_BYTES, Cause
from nexar.wire.hello import MAX_CAPABILITIES
from nexar.wire.join import MAX_JOIN_BYTES, Addresses, Host, check_node, count_addresses
from nexar.wire.text import foreign_lines

MAX_MEMBERSHIP_BYTES: Final = MAX_JOIN_BYTES - (1 << 10)  # fits into a join message

MAX_MEMBERS: Final = 4096  # they fit into one message at about 190 bytes each
_ATTENDANT_BYTES: Final = 64  # upper bound: two encoded numbers, a node id, a fingerprint
_REST_BYTES: Final = 512  # upper bound of the other fields


class MembershipError(ValueError):
    """Not a valid membership."""


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A member: node, addresses and key."""

    node: NodeId
    host: Host  # equal on one machine
    fingerprint: bytes  # SHA-256 of the public key, checked in every handshake
    addresses: Addresses  # by scheme, best first
    capabilities: frozenset[str] = frozenset()  # names of its schemes, as in its hello
    launcher: NodeId = 0  # that started it; 0 if none


class PinnedNode(msgspec.Struct, frozen=True, array_like=True):
    """A known node without a rank."""

    node: NodeId
    fingerprint: bytes


class _Encoded(msgspec.Struct, frozen=True, omit_defaults=True):
    """On wire and disk. New fields need a default; names are never reused."""

    cluster: Annotated[str, Meta(min_length=1, max_length=64)]
    epoch: Annotated[int, Meta(ge=1)]
    members: tuple[Member, ...]
    attendants: tuple[PinnedNode, ...] = ()
    seed: PinnedNode | None = None


_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")
_decoder: Final = msgspec.msgpack.Decoder(_Encoded)
_member_decoder: Final = msgspec.msgpack.Decoder(Member)


@dataclass(frozen=True, slots=True)
class Membership:
    """A membership. Raises MembershipError if its parts are inconsistent."""

    cluster: str
    epoch: int
    members: tuple[Member, ...]  # index = rank
    attendants: tuple[PinnedNode, ...] = ()  # launchers
    seed: PinnedNode | None = None
    _ranks: dict[NodeId, Rank] = field(init=False, repr=False, compare=False)
    _pins: dict[NodeId, bytes] = field(init=False, repr=False, compare=False)
    _on_host: dict[str, tuple[Rank, ...]] = field(init=False, repr=False, compare=False)
    _local_ranks: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for member in self.members:
            _check_member(member)
        object.__setattr__(self, "_ranks", {member.node: rank for rank, member in enumerate(self.members)})
        object.__setattr__(self, "_pins", _pins(self._all_nodes()))
        on_host, local_ranks = _hosts(self.members)
        object.__setattr__(self, "_on_host", on_host)
        object.__setattr__(self, "_local_ranks", local_ranks)
        if self.epoch < 1 or not self.members:
            raise MembershipError(f"a membership of {self.size} members at epoch {self.epoch}; both start at 1")

    def _all_nodes(self) -> Iterable[Member | PinnedNode]:
        yield from self.members
        yield from self.attendants
        if self.seed is not None:
            yield self.seed

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def nodes(self) -> KeysView[NodeId]:
        """The members, by rank, with the operations of a set."""
        return self._ranks.keys()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host ids in order of their first rank."""
        return tuple(self._on_host)

    def member(self, rank: Rank) -> Member:
        """Raises IndexError for an unused rank."""
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} is not in 0..{self.size - 1}")
        return self.members[rank]

    def rank_of(self, node: NodeId) -> Rank | None:
        """None if it is not a member."""
        return self._ranks.get(node)

    def ranks_on(self, host: str) -> tuple[Rank, ...]:
        """In ascending order; empty for an unknown host."""
        return self._on_host.get(host, ())

    def local_rank(self, rank: Rank) -> int:
        """Index among the ranks of its host. Raises IndexError."""
        self.member(rank)
        return self._local_ranks[rank]

    def local_size(self, rank: Rank) -> int:
        """Raises IndexError."""
        return len(self._on_host[self.member(rank).host])


def encode_membership(membership: Membership) -> bytes:
    """Canonical bytes. Raises MembershipError if they exceed a join message."""
    parts = _Encoded(membership.cluster, membership.epoch, membership.members, membership.attendants, membership.seed)
    data = _encoder.encode(parts)
    if len(data) > MAX_MEMBERSHIP_BYTES:
        raise MembershipError(
            f"a membership of {membership.size} members takes {len(data)} bytes; allowed are {MAX_MEMBERSHIP_BYTES}: "
            "let the nodes advertise fewer addresses"
        )
    return data


def decode_membership(data: bytes | bytearray | memoryview) -> Membership:
    """Raises MembershipError."""
    if len(data) > MAX_MEMBERSHIP_BYTES:
        raise MembershipError(f"a membership of {len(data)} bytes; allowed are {MAX_MEMBERSHIP_BYTES}")
    try:
        parts = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MembershipError(f"not a membership: {error}") from None
    check_addresses(parts.members)
    return Membership(parts.cluster, parts.epoch, parts.members, parts.attendants, parts.seed)


def pin_of(membership: Membership, node: NodeId) -> bytes | None:
    """The required fingerprint of a member, launcher or seed, or None."""
    return membership._pins.get(node)


def encode_member(member: Member) -> bytes:
    """Canonical."""
    return _encoder.encode(member)


def decode_member(data: bytes) -> Member:
    """Raises MembershipError."""
    try:
        member = _member_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MembershipError(f"not a member: {error}") from None
    _check_member(member)
    _pins([member])
    check_addresses([member])
    return member


def check_addresses(members: Iterable[Member]) -> None:
    """Raises MembershipError for an undialable address. Only members from messages need this check."""
    for member in members:
        try:
            check_advertised(member.addresses)
        except UsageError as error:
            raise MembershipError(f"node {format_node(member.node)} cannot be dialed: {error}") from None


def check_size(membership: Membership) -> None:
    """Raises MembershipError for too many members or bytes."""
    if membership.size > MAX_MEMBERS:
        raise MembershipError(f"a membership of {membership.size} members; allowed are {MAX_MEMBERS}")
    encode_membership(membership)


def share_bytes(member: Member) -> int:
    """The member's share of an encoded membership."""
    return len(encode_member(member))


def allowed_share_bytes(size: int) -> int:
    """The share with which all members, and as many launchers, fit."""
    return (MAX_MEMBERSHIP_BYTES - _REST_BYTES) // size - _ATTENDANT_BYTES


def _check_member(member: Member) -> None:
    try:
        count_addresses(member.addresses)
        check_node(member.launcher or 1)
    except ValueError as error:
        raise MembershipError(f"invalid member: {error}") from None
    if len(member.capabilities) > MAX_CAPABILITIES:
        raise MembershipError(f"a member with {len(member.capabilities)} capabilities; allowed: {MAX_CAPABILITIES}")


def _pins(nodes_with_keys: Iterable[Member | PinnedNode]) -> dict[NodeId, bytes]:
    """Raises MembershipError for duplicates and wrong lengths."""
    pins: dict[NodeId, bytes] = {}
    for present in nodes_with_keys:
        try:
            node = check_node(present.node)
        except ValueError as error:
            raise MembershipError(str(error)) from None
        if node in pins:
            raise MembershipError(f"node {format_node(node)} is in the membership twice")
        if len(present.fingerprint) != FINGERPRINT_BYTES:
            raise MembershipError(f"node {format_node(node)} has a fingerprint of {len(present.fingerprint)} bytes")
        pins[node] = present.fingerprint
    return pins


def _hosts(members: Iterable[Member]) -> tuple[dict[str, tuple[Rank, ...]], tuple[int, ...]]:
    on_host: dict[str, list[Rank]] = {}
    local_ranks = []
    for rank, member in enumerate(members):
        neighbours = on_host.setdefault(member.host, [])
        local_ranks.append(len(neighbours))
        neighbours.append(rank)
    return {host: tuple(ranks) for host, ranks in on_host.items()}, tuple(local_ranks)


WORLD: Final = 0  # id of the first communicator


class Departure(msgspec.Struct, frozen=True, array_like=True):
    """A removed member."""

    node: NodeId
    cause: Cause  # for users; with the traceback if it raised
    willing: bool = False  # it asked to leave
    quiet: bool = False  # it had closed: communicators continue until one of their members needs it


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """The difference between two consecutive epochs."""

    epoch: Annotated[int, Meta(ge=2)]  # of the resulting membership
    left: Annotated[tuple[Departure, ...], Meta(max_length=MAX_MEMBERS)] = ()
    joined: Annotated[tuple[Member, ...], Meta(max_length=MAX_MEMBERS)] = ()
    severed: tuple[tuple[NodeId, NodeId], ...] = ()
    """Pairs of live members, lower node first, whose connection broke: data on it may be lost."""
    renewed: tuple[int, ...] = ()  # communicators that get a successor with the same members

    def apply(self, membership: Membership) -> Membership:
        """Raises MembershipError if the change does not fit this membership, leaves no member, exceeds a limit, or has
        an undialable joiner.
        """
        if self.epoch != membership.epoch + 1:
            raise MembershipError(f"a change to epoch {self.epoch} of a membership of epoch {membership.epoch}")
        gone = self.gone
        if not gone <= membership.nodes:
            raise MembershipError("a change that removes a node that is not a member")
        stay = tuple(member for member in membership.members if member.node not in gone)
        after = Membership(membership.cluster, self.epoch, stay + self.joined, membership.attendants, membership.seed)
        if self.joined:  # otherwise it only shrinks
            check_addresses(self.joined)
            check_size(after)
        return after

    @property
    def gone(self) -> frozenset[NodeId]:
        return frozenset(departure.node for departure in self.left)

    @property
    def ending_departures(self) -> frozenset[NodeId]:
        """Departures that end their communicators."""
        return frozenset(departure.node for departure in self.left if not departure.quiet)

    @property
    def quiet(self) -> frozenset[NodeId]:
        return self.gone - self.ending_departures

    @property
    def concerns_world(self) -> bool:
        # Quiet departures and renewals elsewhere give the world no successor.
        return bool(self.joined or self.severed or WORLD in self.renewed or self.ending_departures)

    def concerns(self, communicator: int, nodes: Sequence[NodeId] | frozenset[NodeId]) -> bool:
        """Whether a communicator of these nodes gets a successor."""
        if communicator == WORLD:
            return self.concerns_world
        members = frozenset(nodes)
        return (
            communicator in self.renewed
            or not self.ending_departures.isdisjoint(members)
            or any(members.issuperset(pair) for pair in self.severed)
        )

    def causes(self, membership: Membership) -> dict[Rank, str]:
        """Causes by previous rank, safe to print."""
        ranks = {departure.node: membership.rank_of(departure.node) for departure in self.left}
        return {rank: foreign_lines(each.cause) for each in self.left if (rank := ranks[each.node]) is not None}

    def encode(self) -> bytes:
        return _change_encoder.encode(self)

    @staticmethod
    def decode(data: bytes | bytearray | memoryview) -> Change:
        """Raises MembershipError, also above the limit of a ballot."""
        if len(data) > MAX_VALUE_BYTES:
            raise MembershipError(f"a change of {len(data)} bytes; allowed are {MAX_VALUE_BYTES}")
        try:
            return _change_decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MembershipError(f"not a change: {error}") from None


def next_generation(
    communicator: int, membership: Membership, world: Membership, changes: Sequence[Change]
) -> Membership | None:
    """The next generation after these changes; None if they do not concern the communicator.

    `world` is the result of the last change. Older changes that do not concern the communicator may be missing. The
    epoch is that of the last change that does. Members gone by then are left out, so the result does not depend on when
    it is computed.
    """
    members = kept = membership.members
    epoch, later = membership.epoch, frozenset[NodeId]()  # departed since that epoch
    for change in changes:
        if change.epoch <= membership.epoch:
            continue
        touched = change.concerns(communicator, [member.node for member in members])
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


_change_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")
_change_decoder: Final = msgspec.msgpack.Decoder(Change)
