"""What stands in front of a frame that travels over other nodes: its route, and its place in an end-to-end order.

The body of a RELAY frame is this header, the route, and what is carried. The route names nodes, never ranks: whatever
becomes of the membership on the way, nothing can arrive at somebody else. It names every node, both ends included, and
none twice: so nothing can go round in circles, and how far it has come is its place in the route. The first node is the
source, the last one the destination.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

from nexar.types import NodeId
from nexar.wire.frame import FrameError

Bytes: TypeAlias = bytes | bytearray | memoryview

MOST_HOPS: Final = 4096
# kind, hops, nodes in the route, number of the link, epoch, sequence, ack
_LAYOUT: Final = struct.Struct("<BxHHxxIQQQ")
_HOPS: Final = struct.Struct("<H")
_HOPS_AT: Final = 2
_NODE: Final = struct.Struct("<Q")


class RelayKind(IntEnum):
    """What is carried. Numbers are the wire format: never reuse one."""

    FRAME = 1  # number `sequence` of the link's frames
    ACK = 2  # all below `ack` have arrived; `sequence` is 1 in answer to a PROBE
    PROBE = 3  # what has arrived?
    BROKEN = 4  # the sender cannot reach the node in the body, which a route of yours names behind it
    RESET = 5  # the link is over on this side; the body says why


class RelayHeader(NamedTuple):
    """See the module."""

    kind: int
    hops: int
    """How many hops it has travelled when it arrives: the receiver is `route[hops]`."""
    number: int
    """Which link of the two ends it belongs to."""
    epoch: int
    """Of the source's membership."""
    sequence: int
    ack: int
    """The source has everything below this number."""
    route: tuple[NodeId, ...]

    @property
    def source(self) -> NodeId:
        return self.route[0]

    @property
    def destination(self) -> NodeId:
        return self.route[-1]

    @property
    def is_there(self) -> bool:
        """Whether this is its destination."""
        return self.hops == len(self.route) - 1


def encode_relay(header: RelayHeader) -> bytes:
    """The bytes in front of what is carried."""
    kind, hops, number, epoch, sequence, ack, route = header
    return _LAYOUT.pack(kind, hops, len(route), number, epoch, sequence, ack) + struct.pack(f"<{len(route)}Q", *route)


def decode_relay(body: Bytes) -> tuple[RelayHeader, memoryview]:
    """The header, and what is carried. Raises FrameError: too short, or a route that is none.

    Unknown kinds pass: dropping them is the destination's decision.
    """
    view = memoryview(body)
    if len(view) < _LAYOUT.size:
        raise FrameError("body", len(view), f"at least {_LAYOUT.size} bytes of a relayed frame")
    kind, hops, nodes, number, epoch, sequence, ack = _LAYOUT.unpack_from(view)
    end = _LAYOUT.size + 8 * nodes
    if not 2 <= nodes <= MOST_HOPS + 1 or end > len(view):
        raise FrameError("route", nodes, f"2 to {MOST_HOPS + 1} nodes, all of them in the body")
    route = struct.unpack_from(f"<{nodes}Q", view, _LAYOUT.size)
    if not 1 <= hops < nodes:
        raise FrameError("hops", hops, f"1 to {nodes - 1} on a route of {nodes} nodes")
    if len(set(route)) != nodes:
        raise FrameError("route", nodes, "nodes that are all different, or it would go round in circles")
    return RelayHeader(kind, hops, number, epoch, sequence, ack, route), view[end:]


def advance(body: bytearray, hops: int) -> None:
    """The same body, one hop on: it has travelled `hops` when it arrives next."""
    _HOPS.pack_into(body, _HOPS_AT, hops)


def encode_node(node: NodeId) -> bytes:
    """The body of BROKEN."""
    return _NODE.pack(node)


def decode_node(body: Bytes) -> NodeId:
    """The node that BROKEN names. Raises FrameError."""
    if len(body) != _NODE.size:
        raise FrameError("body", len(body), f"the {_NODE.size} bytes of a node")
    return int(_NODE.unpack_from(body)[0])
