"""The membership: who is in the cluster at one epoch, in order of rank. The value that everything agrees on.

Pure and immutable: a change makes another membership with a higher epoch. A member's rank is its index, so ranks are
dense by construction. Each member's public key is pinned by its fingerprint: two nodes that hold the same membership
can tell each other from everybody else, without a seed. Attendants (launchers, the seed) are pinned too, but hold no
rank: they may speak to members about the cluster, and are not part of what it computes.

Encoding is canonical: equal memberships have equal bytes.

What turns one membership into the next: the value that members agree on. Pure.

It says what changes, not what stays, so it is small however large the world is, and it means something only to who has
the membership before it. Ranks stay dense: who stays keeps its order, who joins is appended, in the order given.

Laws:
- Applied to one and the same membership, a change gives one and the same membership, everywhere. Encoding is canonical.
- What comes after a communicator follows from the changes alone (`following`), so all its members come to the same
  answer, whenever they look. Votes follow the world; communicators follow what concerns them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

MAX_MEMBERSHIP_BYTES: Final = MAX_JOIN_BYTES - (1 << 10)
"""So that the join message that carries it is not too large."""

MAX_MEMBERS: Final = 4096
"""As many find room in one message with a description of about 190 bytes each."""
_ATTENDANT_BYTES: Final = 64
"""More than one takes: two numbers of the encoding, a node id, a fingerprint."""
_REST_BYTES: Final = 512
"""More than the other fields take: names, cluster, epoch, seed."""


class MembershipError(ValueError):
    """What was given, or read, cannot be a membership."""


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One place of the cluster: who has it, how to reach them, how to know them."""

    node: NodeId
    host: Host
    """Members with the same host id run on the same machine."""
    fingerprint: bytes
    """SHA-256 of the public key: what every handshake with this node is checked against."""
    addresses: Addresses
    """By transport, the best first."""
    capabilities: frozenset[str] = frozenset()
    launcher: NodeId = 0
    """The attendant that started it; 0: nobody here."""


class PinnedNode(msgspec.Struct, frozen=True, array_like=True):
    """A node that is known to the cluster and holds no rank."""

    node: NodeId
    fingerprint: bytes


class _Encoded(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form on the wire and on disk. Fields may be added with a default; names are never reused."""

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
    """The cluster at one epoch. MembershipError if the parts contradict one another."""

    cluster: str
    epoch: int
    members: tuple[Member, ...]
    """The index is the rank."""
    attendants: tuple[PinnedNode, ...] = ()
    """The launchers."""
    seed: PinnedNode | None = None
    _ranks: dict[NodeId, Rank] = field(init=False, repr=False, compare=False)
    _pins: dict[NodeId, bytes] = field(init=False, repr=False, compare=False)
    _on_host: dict[str, tuple[Rank, ...]] = field(init=False, repr=False, compare=False)
    _local_ranks: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check, and build once what is asked for all the time."""
        for member in self.members:
            _check_member(member)
        object.__setattr__(self, "_ranks", {member.node: rank for rank, member in enumerate(self.members)})
        object.__setattr__(self, "_pins", _pins(self._everybody()))
        on_host, local_ranks = _hosts(self.members)
        object.__setattr__(self, "_on_host", on_host)
        object.__setattr__(self, "_local_ranks", local_ranks)
        if self.epoch < 1 or not self.members:
            raise MembershipError(f"a membership of {self.size} members at epoch {self.epoch}; both start at 1")

    def _everybody(self) -> Iterable[Member | PinnedNode]:
        yield from self.members
        yield from self.attendants
        if self.seed is not None:
            yield self.seed

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.members)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host ids, in the order of their first rank."""
        return tuple(self._on_host)

    def member(self, rank: Rank) -> Member:
        """Who has this rank. IndexError if nobody does."""
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} is not in 0..{self.size - 1}")
        return self.members[rank]

    def rank_of(self, node: NodeId) -> Rank | None:
        """The rank of a node; None if it is no member."""
        return self._ranks.get(node)

    def pin(self, node: NodeId) -> bytes | None:
        """The fingerprint that this node's key must have, member or attendant; None: the node is not to be let in."""
        return self._pins.get(node)

    def ranks_on(self, host: str) -> tuple[Rank, ...]:
        """The ranks of one host, ascending; none for a host that is not here."""
        return self._on_host.get(host, ())

    def local_rank(self, rank: Rank) -> int:
        """The place of a rank among those of its host. IndexError if nobody has that rank."""
        self.member(rank)
        return self._local_ranks[rank]

    def local_size(self, rank: Rank) -> int:
        """How many ranks share the host of this one, itself included. IndexError if nobody has that rank."""
        return len(self._on_host[self.member(rank).host])

    def encode(self) -> bytes:
        """Canonical bytes, for the wire and for the disk. MembershipError if no join message could carry them."""
        parts = _Encoded(self.cluster, self.epoch, self.members, self.attendants, self.seed)
        data = _encoder.encode(parts)
        if len(data) > MAX_MEMBERSHIP_BYTES:
            raise MembershipError(
                f"a membership of {self.size} members takes {len(data)} bytes; allowed are {MAX_MEMBERSHIP_BYTES}: "
                "let the nodes advertise fewer addresses"
            )
        return data

    @staticmethod
    def decode(data: bytes | bytearray | memoryview) -> Membership:
        """The membership that `encode` wrote. MembershipError for anything else."""
        if len(data) > MAX_MEMBERSHIP_BYTES:
            raise MembershipError(f"a membership of {len(data)} bytes; allowed are {MAX_MEMBERSHIP_BYTES}")
        try:
            parts = _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MembershipError(f"not a membership: {error}") from None
        check_addresses(parts.members)
        return Membership(parts.cluster, parts.epoch, parts.members, parts.attendants, parts.seed)


def encode_member(member: Member) -> bytes:
    """Canonical bytes of one member."""
    return _encoder.encode(member)


def decode_member(data: bytes) -> Member:
    """The member that `encode_member` wrote. MembershipError for anything else."""
    try:
        member = _member_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MembershipError(f"not a member: {error}") from None
    _check_member(member)
    _pins([member])
    check_addresses([member])
    return member


def check_addresses(members: Iterable[Member]) -> None:
    """MembershipError if one of them has an address that nobody can dial. Asked of members that come from a message;
    those of a membership that was checked need no second look.
    """
    for member in members:
        try:
            check_advertised(member.addresses)
        except UsageError as error:
            raise MembershipError(f"node {format_node(member.node)} cannot be dialed: {error}") from None


def check_size(membership: Membership) -> None:
    """MembershipError if it has more members than a cluster may have, or more bytes than a join message carries."""
    if membership.size > MAX_MEMBERS:
        raise MembershipError(f"a membership of {membership.size} members; allowed are {MAX_MEMBERS}")
    membership.encode()


def share_bytes(member: Member) -> int:
    """What this member adds to the size of an encoded membership."""
    return len(encode_member(member))


def allowed_share_bytes(size: int) -> int:
    """The most a member may add in a world of this size, so that there is room for all, and for as many attendants."""
    return (MAX_MEMBERSHIP_BYTES - _REST_BYTES) // size - _ATTENDANT_BYTES


def _check_member(member: Member) -> None:
    try:
        count_addresses(member.addresses)
        check_node(member.launcher or 1)
    except ValueError as error:
        raise MembershipError(f"a member in disorder: {error}") from None
    if len(member.capabilities) > MAX_CAPABILITIES:
        raise MembershipError(f"a member with {len(member.capabilities)} capabilities; allowed: {MAX_CAPABILITIES}")


def _pins(everybody: Iterable[Member | PinnedNode]) -> dict[NodeId, bytes]:
    """Fingerprints by node: each node once, each with a whole fingerprint."""
    pins: dict[NodeId, bytes] = {}
    for present in everybody:
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
    """The ranks of each host, hosts in order of their first rank; and the local rank of each rank."""
    on_host: dict[str, list[Rank]] = {}
    local_ranks = []
    for rank, member in enumerate(members):
        neighbours = on_host.setdefault(member.host, [])
        local_ranks.append(len(neighbours))
        neighbours.append(rank)
    return {host: tuple(ranks) for host, ranks in on_host.items()}, tuple(local_ranks)


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
    def ending_departures(self) -> frozenset[NodeId]:
        """Those of them whose communicators end by it."""
        return frozenset(departure.node for departure in self.left if not departure.quiet)

    @property
    def quiet(self) -> frozenset[NodeId]:
        """Those of them who had closed, and disturb nobody."""
        return self.gone - self.ending_departures

    @property
    def concerns_world(self) -> bool:
        """Whether the world's communicator gets a successor by it: whoever comes, goes or is severed is a member there.
        Not by who goes quietly, nor by what is renewed elsewhere.
        """
        return bool(self.joined or self.severed or WORLD in self.renewed or self.ending_departures)

    def concerns(self, communicator: int, nodes: Sequence[NodeId] | frozenset[NodeId]) -> bool:
        """Whether a communicator of these nodes gets a successor by it."""
        if communicator == WORLD:
            return self.concerns_world
        members = frozenset(nodes)
        return (
            communicator in self.renewed
            or not self.ending_departures.isdisjoint(members)
            or any(members.issuperset(pair) for pair in self.severed)
        )

    def causes(self, membership: Membership) -> dict[Rank, str]:
        """Why each is gone, by its rank in the membership before; those who held none there are left out. Fit to be
        shown, whoever wrote it.
        """
        ranks = {departure.node: membership.rank_of(departure.node) for departure in self.left}
        return {rank: foreign_lines(each.cause) for each in self.left if (rank := ranks[each.node]) is not None}

    def encode(self) -> bytes:
        """Canonical bytes: what a ballot carries."""
        return _change_encoder.encode(self)

    @staticmethod
    def decode(data: bytes | bytearray | memoryview) -> Change:
        """The change that `encode` wrote. MembershipError for anything else, and for more than a ballot can carry."""
        if len(data) > MAX_VALUE_BYTES:
            raise MembershipError(f"a change of {len(data)} bytes; allowed are {MAX_VALUE_BYTES}")
        try:
            return _change_decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MembershipError(f"not a change: {error}") from None


def next_generation(
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
