"""The header of a relayed frame: its route, and its position in an end-to-end order.

A RELAY frame's body is this header, the route and the carried bytes. The route lists every node from source to
destination, none twice, so a frame cannot loop. It names nodes, because ranks may change.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

from nexar.types import NodeId
from nexar.wire.frame import FrameError

Bytes: TypeAlias = bytes | bytearray | memoryview

MAX_HOPS: Final = 4096
# kind, hops, nodes in the route, number of the link, epoch, sequence, ack
_LAYOUT: Final = struct.Struct("<BxHHxxIQQQ")
_HOPS: Final = struct.Struct("<H")
_HOPS_AT: Final = 2
_NODE: Final = struct.Struct("<Q")


class RelayKind(IntEnum):
    """Numbers are the wire format: never reuse one."""

    FRAME = 1  # number `sequence` of the link's frames
    ACK = 2  # all frames below `ack` have arrived; `sequence` is 1 in answer to a PROBE
    PROBE = 3  # asks which frames have arrived
    BROKEN = 4  # the sender cannot reach the node in the body, which follows it in your route
    RESET = 5  # the link is over on this side; the body is the reason


class RelayHeader(NamedTuple):
    """The decoded header."""

    kind: int
    hops: int
    """Hops travelled when it arrives: the receiver is `route[hops]`."""
    number: int
    """Number of the link between the two ends."""
    epoch: int
    """Epoch of the source's membership."""
    sequence: int
    ack: int
    """The source has received every frame below this number."""
    route: tuple[NodeId, ...]

    @property
    def source(self) -> NodeId:
        return self.route[0]

    @property
    def destination(self) -> NodeId:
        return self.route[-1]

    @property
    def is_at_destination(self) -> bool:
        return self.hops == len(self.route) - 1


def encode_relay(header: RelayHeader) -> bytes:
    """Return the bytes in front of the carried frame."""
    kind, hops, number, epoch, sequence, ack, route = header
    return _LAYOUT.pack(kind, hops, len(route), number, epoch, sequence, ack) + struct.pack(f"<{len(route)}Q", *route)


def decode_relay(body: Bytes) -> tuple[RelayHeader, memoryview]:
    """Return the header and the carried bytes. Raise FrameError for a short body or an invalid route.

    Unknown kinds pass: the destination drops them.
    """
    view = memoryview(body)
    if len(view) < _LAYOUT.size:
        raise FrameError("body", len(view), f"at least {_LAYOUT.size} bytes of a relayed frame")
    kind, hops, nodes, number, epoch, sequence, ack = _LAYOUT.unpack_from(view)
    end = _LAYOUT.size + 8 * nodes
    if not 2 <= nodes <= MAX_HOPS + 1 or end > len(view):
        raise FrameError("route", nodes, f"2 to {MAX_HOPS + 1} nodes, all of them in the body")
    route = struct.unpack_from(f"<{nodes}Q", view, _LAYOUT.size)
    if not 1 <= hops < nodes:
        raise FrameError("hops", hops, f"1 to {nodes - 1} on a route of {nodes} nodes")
    if len(set(route)) != nodes:
        raise FrameError("route", nodes, "no node twice")
    return RelayHeader(kind, hops, number, epoch, sequence, ack, route), view[end:]


def advance(body: bytearray, hops: int) -> None:
    """Set the hop count in the body."""
    _HOPS.pack_into(body, _HOPS_AT, hops)


def encode_node(node: NodeId) -> bytes:
    """Return the body of BROKEN."""
    return _NODE.pack(node)


def decode_node(body: Bytes) -> NodeId:
    """Return the node in a BROKEN. Raise FrameError."""
    if len(body) != _NODE.size:
        raise FrameError("body", len(body), f"{_NODE.size} bytes, the id of a node")
    return int(_NODE.unpack_from(body)[0])
