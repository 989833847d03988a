"""The membership: who is in the cluster at one epoch, in order of rank. The value that everything agrees on.

Pure and immutable: a change makes another membership with a higher epoch. A member's rank is its index, so ranks are
dense by construction. Each member's public key is pinned by its fingerprint: two nodes that hold the same membership
can tell each other from everybody else, without a seed. Attendants (launchers, the seed) are pinned too, but hold no
rank: they may speak to members about the cluster, and are not part of what it computes.

Encoding is canonical: equal memberships have equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from nexar.cluster.addresses import check_told
from nexar.errors import UsageError
from nexar.security.invitation import FINGERPRINT_BYTES
from nexar.types import NodeId, Rank, format_node
from nexar.wire.handshake import MAX_CAPABILITIES
from nexar.wire.joining import MAX_JOIN_BYTES, Addresses, Host, check_node, count_addresses

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


class Attendant(msgspec.Struct, frozen=True, array_like=True):
    """A node that is known to the cluster and holds no rank."""

    node: NodeId
    fingerprint: bytes


class _Encoded(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form on the wire and on disk. Fields may be added with a default; names are never reused."""

    cluster: Annotated[str, Meta(min_length=1, max_length=64)]
    epoch: Annotated[int, Meta(ge=1)]
    members: tuple[Member, ...]
    attendants: tuple[Attendant, ...] = ()
    seed: Attendant | None = None


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
    attendants: tuple[Attendant, ...] = ()
    """The launchers."""
    seed: Attendant | None = None
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

    def _everybody(self) -> Iterable[Member | Attendant]:
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
            check_told(member.addresses)
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


def _pins(everybody: Iterable[Member | Attendant]) -> dict[NodeId, bytes]:
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
