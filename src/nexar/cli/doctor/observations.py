"""The observations of a doctor, and the messages between doctors. No I/O.

Messages are bodies of CONTROL frames on their own connection: other nodes close it.
"""

from __future__ import annotations

from typing import Final, TypeAlias, Union

import msgspec

from nexar.types import Rank
from nexar.wire.control import MAX_MESSAGE_BYTES


class Version(msgspec.Struct, frozen=True):
    """The version of a package. A missing one has no `number`; then `problem` may say why."""

    name: str
    number: str | None
    problem: str = ""


class Attachment(msgspec.Struct, frozen=True):
    """A network interface."""

    name: str
    addresses: tuple[str, ...]
    mtu_bytes: int
    up: bool
    loopback: bool


class RoundTrip(msgspec.Struct, frozen=True):
    """A round trip over a new connection."""

    scheme: str
    round_trip: float | None = None
    """Seconds; None: it failed, and `problem` says why."""
    problem: str = ""


class ListenPort(msgspec.Struct, frozen=True):
    """A port for UDP and TCP; `problem` if listening fails."""

    address: str = ""
    advertised: tuple[str, ...] = ()
    problem: str = ""


class FreeSpace(msgspec.Struct, frozen=True):
    """Space in a memory file system."""

    path: str
    size_bytes: int
    free_bytes: int


class Limits(msgspec.Struct, frozen=True):
    """System limits. None: no limit, or unknown."""

    open_files: int | None = None
    most_open_files: int | None = None
    locked_bytes: int | None = None
    receive_buffer_bytes: int | None = None
    """net.core.rmem_max"""
    send_buffer_bytes: int | None = None


class Machine(msgspec.Struct, frozen=True):
    """One host, as a process sees it."""

    name: str
    host: str
    """The host id: equal for ranks on the same machine."""
    wanted: tuple[str, ...]
    """The setting `transports`."""
    versions: tuple[Version, ...]
    interfaces: tuple[Attachment, ...]
    door: ListenPort
    trips: tuple[RoundTrip, ...]
    memory: FreeSpace | None
    limits: Limits
    cpus: int
    load: float
    """Runnable processes, on average over the last minute."""
    clock: float
    """Seconds since 1970."""


class Reach(msgspec.Struct, frozen=True):
    """One rank's dial of another over one transport."""

    source: Rank
    dest: Rank
    scheme: str
    round_trip: float | None = None
    """Seconds; None: not reached, and `problem` says why."""
    problem: str = ""
    mtu_bytes: int | None = None
    """Of the path, if the transport knows it."""
    skew: float | None = None
    """Seconds by which the clock of `dest` is ahead."""
    offered: bool = True
    """False: one side does not have the transport, so it was not dialed and no firewall is to blame."""


class DoctorReport(msgspec.Struct, frozen=True):
    """One rank's observations."""

    rank: Rank
    machine: Machine
    address: str
    """The best one it advertises, host:port."""
    fixed_port: bool
    """A setting fixes the port, so that a firewall can open it."""
    reaches: tuple[Reach, ...]


class DoctorFinding(msgspec.Struct, frozen=True):
    """A change to make. Without `needed` it only helps."""

    text: str
    needed: bool = True


class _Base(msgspec.Struct, frozen=True, tag_field="doctor"):
    pass


class ProbeRequest(_Base, frozen=True, tag="ask"):
    """The peer replies at once with the same number."""

    number: int


class ProbeReply(_Base, frozen=True, tag="answer"):
    """`clock`: the sender's time in seconds since 1970."""

    number: int
    clock: float


class ReportMessage(_Base, frozen=True, tag="hand"):
    """The sender's report, for rank 0."""

    report: DoctorReport


class ConclusionMessage(_Base, frozen=True, tag="conclude"):
    """Sent by rank 0 when it has all reports or stops waiting. Then all may leave."""

    findings: tuple[DoctorFinding, ...]


ProbeMessage: TypeAlias = Union[ProbeRequest, ProbeReply, ReportMessage, ConclusionMessage]  # noqa: UP007 - msgspec reads it at run time

_decoder: Final[msgspec.msgpack.Decoder[ProbeMessage]] = msgspec.msgpack.Decoder(ProbeMessage)


class NotAProbeMessage(ValueError):
    """The bytes are not from a doctor."""


def encode_probe(message: ProbeMessage) -> bytes:
    """Return the body of a frame."""
    return msgspec.msgpack.encode(message)


def decode_probe(body: bytes | bytearray | memoryview) -> ProbeMessage:
    """Raises NotAProbeMessage for other bytes."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise NotAProbeMessage(f"{len(body)} bytes at once")
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise NotAProbeMessage("a message of another kind") from None
