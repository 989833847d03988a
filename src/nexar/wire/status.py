"""Status reports of members to the seed, and the pages of the seed's status board.

Times are ages in seconds, because clocks of two hosts cannot be compared. Every text, list and number is bounded, and
text is one printable line, so a lying member can fill only its own row.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from nexar.wire.text import ONE_LINE

MAX_PEERS: Final = 64  # peers in one report: those with the most traffic
MAX_LATE: Final = 8
MAX_AWAITED: Final = 16
ROWS_PER_PAGE: Final = 32  # rows of one page: a board of thousands of members does not fit into one message
MAX_CAUSE_CHARACTERS: Final = 400
MAX_SECONDS: Final = 1e10  # three hundred years; JSON cannot represent infinity

_Short: TypeAlias = Annotated[str, Meta(max_length=120, pattern=ONE_LINE)]
_Cause: TypeAlias = Annotated[str, Meta(max_length=MAX_CAUSE_CHARACTERS, pattern=ONE_LINE)]
_Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 20)]
_Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]

# waiting: in a call that makes no progress; stuck: connected but silent, because a thread holds the interpreter or the
# process is stopped; left: intentionally
State: TypeAlias = Literal["running", "waiting", "stuck", "lost", "left"]


class PeerTraffic(msgspec.Struct, frozen=True, array_like=True):
    """Traffic with one peer."""

    rank: _Rank
    carriers: Annotated[str, Meta(max_length=64, pattern=ONE_LINE)]
    """`shm`, `quic+tls`; empty if not connected."""
    bytes_sent: _Count = 0
    bytes_received: _Count = 0


class LateRank(msgspec.Struct, frozen=True, array_like=True):
    """How late a rank joined collectives, in seconds, measured by the member."""

    rank: _Rank
    mean: _Seconds
    worst: _Seconds
    times_last: _Count
    share: Annotated[float, Meta(ge=0, le=1)]


class StatusReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """The report of one member. New fields need a default."""

    rank: _Rank
    epoch: _Count
    pid: _Count = 0
    host: _Short = ""
    """Host name, for people."""
    operation: _Short = ""
    """The oldest call that the member is in, such as `all_reduce #12`; empty for none."""
    began: _Seconds = 0.0
    """Seconds since the call began."""
    moved: _Seconds = 0.0
    """Seconds since its last step."""
    waiting_for: Annotated[tuple[_Rank, ...], Meta(max_length=MAX_AWAITED)] = ()
    finished: _Short = ""
    """The last successful call."""
    finished_ago: _Seconds = 0.0
    calls: _Count = 0
    """Collectives that ended, on all communicators."""
    call_bytes: _Count = 0
    """Bytes of their arrays."""
    seconds_waiting: _Seconds = 0.0
    """Time spent in collectives until the last rank arrived."""
    errors: _Count = 0
    messages_sent: _Count = 0
    messages_received: _Count = 0
    bytes_sent: _Count = 0
    """On links only, so without reductions in shared memory."""
    bytes_received: _Count = 0
    peers: Annotated[tuple[PeerTraffic, ...], Meta(max_length=MAX_PEERS)] = ()
    late: Annotated[tuple[LateRank, ...], Meta(max_length=MAX_LATE)] = ()
    """Worst first."""


class StatusRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One present or former member."""

    node: Annotated[int, Meta(ge=1)]
    rank: _Rank
    """The last rank of a former member."""
    state: State
    host: Annotated[str, Meta(max_length=255, pattern=ONE_LINE)]
    """The id of its host."""
    former: bool = False
    """No longer a member; another may have its rank."""
    cause: _Cause = ""
    """Why it is lost."""
    gone: _Seconds | None = None
    """Seconds since its loss was detected."""
    heard: _Seconds | None = None
    """Seconds since its last report; None if there was none."""
    bulletin: StatusReport | None = None
    """The last report."""


class StatusPage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One page of the status board."""

    cluster: Annotated[str, Meta(max_length=64, pattern=ONE_LINE)]
    size: _Count
    """Members now, or expected ranks before the cluster has formed."""
    joined: _Count = 0
    """Members that are connected."""
    epoch: _Count = 0
    """0 before the cluster has formed."""
    rows: Annotated[tuple[StatusRow, ...], Meta(max_length=ROWS_PER_PAGE)] = ()
    """Members by rank, then former members, newest first."""
    first: _Count = 0
    """Index of the first row of this page."""
    total: _Count = 0
    """Number of all rows."""


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(StatusReport)


def encode_status_report(report: StatusReport) -> bytes:
    """Return the body of a StatusUpdate."""
    return _encoder.encode(report)


def decode_status_report(body: bytes) -> StatusReport | None:
    """Return None for invalid bytes: they do not end the member's session."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
