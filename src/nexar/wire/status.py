"""What members tell the seed of themselves, and what the seed shows to those who watch. Pure.

A *bulletin* is one member's own word, once a second. The *board* is all of them beside what the seed knows by itself:
who is lost, and why. Times are ages in seconds: clocks of two hosts cannot be compared, and the way takes less.

Law: every text is one printable line of a bounded length, and every list and number is bounded, so a member that lies
can fill its own row and nothing else.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from nexar.wire.text import ONE_LINE

MAX_PEERS: Final = 64
"""Of which one bulletin tells: those that carried most."""
MAX_LATE: Final = 8
MAX_AWAITED: Final = 16
ROWS_PER_PAGE: Final = 32
"""On one page of the board: what a world of thousands says does not fit into one message."""
MAX_CAUSE_CHARACTERS: Final = 400
MAX_SECONDS: Final = 1e10
"""Three hundred years: no age is more, and infinity could not be shown as JSON."""

_Short: TypeAlias = Annotated[str, Meta(max_length=120, pattern=ONE_LINE)]
_Cause: TypeAlias = Annotated[str, Meta(max_length=MAX_CAUSE_CHARACTERS, pattern=ONE_LINE)]
_Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 20)]
_Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]

State: TypeAlias = Literal["running", "waiting", "stuck", "lost", "left"]
"""Waiting: in a call that does not go on. Stuck: it is connected and says nothing, as where a thread holds the
interpreter or the process is stopped. Left: of its own will."""


class PeerTraffic(msgspec.Struct, frozen=True, array_like=True):
    """What has passed between the member and one peer."""

    rank: _Rank
    carriers: Annotated[str, Meta(max_length=64, pattern=ONE_LINE)]
    """`shm`, `quic+tls`; empty: nothing connects them now."""
    bytes_sent: _Count = 0
    bytes_received: _Count = 0


class LateRank(msgspec.Struct, frozen=True, array_like=True):
    """How late a rank came to collectives, as the member saw it. Seconds."""

    rank: _Rank
    mean: _Seconds
    worst: _Seconds
    times_last: _Count
    share: Annotated[float, Meta(ge=0, le=1)]


class StatusReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of one member. Fields may be added with a default."""

    rank: _Rank
    epoch: _Count
    pid: _Count = 0
    host: _Short = ""
    """The name of its host, for people."""
    operation: _Short = ""
    """The call that it has been in for longest: `all_reduce #12`; empty: it is in none."""
    began: _Seconds = 0.0
    """Seconds ago."""
    moved: _Seconds = 0.0
    """Seconds since its last step."""
    waiting_for: Annotated[tuple[_Rank, ...], Meta(max_length=MAX_AWAITED)] = ()
    finished: _Short = ""
    """The last call that went well."""
    finished_ago: _Seconds = 0.0
    calls: _Count = 0
    """Collectives that have ended, on all its communicators."""
    call_bytes: _Count = 0
    """Of their arrays."""
    seconds_waiting: _Seconds = 0.0
    """Spent in collectives until the last rank had come."""
    errors: _Count = 0
    messages_sent: _Count = 0
    messages_received: _Count = 0
    bytes_sent: _Count = 0
    """Through links; what ranks of one host reduce in shared memory passes through none."""
    bytes_received: _Count = 0
    peers: Annotated[tuple[PeerTraffic, ...], Meta(max_length=MAX_PEERS)] = ()
    late: Annotated[tuple[LateRank, ...], Meta(max_length=MAX_LATE)] = ()
    """The worst first."""


class StatusRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One member on the board, or who was one."""

    node: Annotated[int, Meta(ge=1)]
    rank: _Rank
    """Of one that is gone: the last it had."""
    state: State
    host: Annotated[str, Meta(max_length=255, pattern=ONE_LINE)]
    """The id of its host."""
    former: bool = False
    """It is no member any more, and others may have its rank."""
    cause: _Cause = ""
    """Why it is lost."""
    gone: _Seconds | None = None
    """Seconds since it was seen to be gone."""
    heard: _Seconds | None = None
    """Seconds since its last bulletin; None: there was none."""
    bulletin: StatusReport | None = None
    """The last one."""


class StatusPage(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the seed shows: one page of it."""

    cluster: Annotated[str, Meta(max_length=64, pattern=ONE_LINE)]
    size: _Count
    """Members now; before the cluster has formed: how many are awaited."""
    joined: _Count = 0
    """Members that are connected."""
    epoch: _Count = 0
    """0: the cluster has not formed."""
    rows: Annotated[tuple[StatusRow, ...], Meta(max_length=ROWS_PER_PAGE)] = ()
    """Members by rank, then who is gone, the newest first."""
    first: _Count = 0
    """How many rows come before these."""
    total: _Count = 0
    """Of all rows."""


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(StatusReport)


def encode_status_report(bulletin: StatusReport) -> bytes:
    """As News carries it."""
    return _encoder.encode(bulletin)


def decode_status_report(body: bytes) -> StatusReport | None:
    """None for what is no bulletin that could be shown: nobody loses its place for it."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
