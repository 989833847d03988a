"""What a doctor has seen: plain values, with no judgement. Pure.

They are shown as JSON as they are, and travel from the doctor of one host to that of another.

What two doctors say to each other: bodies of CONTROL frames on a connection of their own. Pure.

They are not the messages of links: a doctor's connection never becomes one, and a node that is no doctor hangs up at
the first of these.
"""

from __future__ import annotations

from typing import Final, TypeAlias, Union

import msgspec

from nexar.types import Rank
from nexar.wire.control import MAX_MESSAGE_BYTES


class Version(msgspec.Struct, frozen=True):
    """A piece of software. `number` is None where it is missing; then `problem` may say why."""

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
    """A message there and back, over a connection that was made for it."""

    scheme: str
    round_trip: float | None = None
    """Seconds; None: it did not work, and `problem` says why."""
    problem: str = ""


class ListenPort(msgspec.Struct, frozen=True):
    """Where this process would listen, for UDP and TCP; `problem` if it cannot."""

    address: str = ""
    advertised: tuple[str, ...] = ()
    problem: str = ""


class FreeSpace(msgspec.Struct, frozen=True):
    """Space in a file system of memory."""

    path: str
    size_bytes: int
    free_bytes: int


class Limits(msgspec.Struct, frozen=True):
    """What the system lets this process have; None: no limit, or not known on this system."""

    open_files: int | None = None
    most_open_files: int | None = None
    locked_bytes: int | None = None
    receive_buffer_bytes: int | None = None
    """The most that a socket may ask for: net.core.rmem_max."""
    send_buffer_bytes: int | None = None


class Machine(msgspec.Struct, frozen=True):
    """One host, as seen by a process on it."""

    name: str
    host: str
    """The host id: ranks with the same one share the machine."""
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
    """Processes that want a CPU, on average over the last minute."""
    clock: float
    """Seconds since 1970."""


class Reach(msgspec.Struct, frozen=True):
    """One rank has dialed another, over one transport."""

    source: Rank
    dest: Rank
    scheme: str
    round_trip: float | None = None
    """Seconds; None: not reached, and `problem` says why."""
    problem: str = ""
    mtu_bytes: int | None = None
    """Of the path, where the transport knows it."""
    skew: float | None = None
    """Seconds by which the clock of `dest` is ahead."""


class DoctorReport(msgspec.Struct, frozen=True):
    """What the doctor at one rank has seen."""

    rank: Rank
    machine: Machine
    address: str
    """The most promising of those it told the others, host:port."""
    fixed_port: bool
    """The port was chosen by a setting, so that a firewall can know it."""
    reaches: tuple[Reach, ...]


class DoctorFinding(msgspec.Struct, frozen=True):
    """A piece of advice. What is not needed would only help."""

    text: str
    needed: bool = True


class _Base(msgspec.Struct, frozen=True, tag_field="doctor"):
    """What all share; the name of the tag keeps them apart from everybody else's."""


class ProbeRequest(_Base, frozen=True, tag="ask"):
    """Answer at once, with the same number."""

    number: int


class ProbeReply(_Base, frozen=True, tag="answer"):
    """The answer to Ask, and what time it is there: seconds since 1970."""

    number: int
    clock: float


class ReportMessage(_Base, frozen=True, tag="hand"):
    """Everything the sender has seen, for rank 0."""

    report: DoctorReport


class ConclusionMessage(_Base, frozen=True, tag="conclude"):
    """From rank 0, when it has all reports or waits no longer: what is to be changed. Everybody may leave."""

    findings: tuple[DoctorFinding, ...]


ProbeMessage: TypeAlias = Union[ProbeRequest, ProbeReply, ReportMessage, ConclusionMessage]  # noqa: UP007 - msgspec reads it at run time

_decoder: Final[msgspec.msgpack.Decoder[ProbeMessage]] = msgspec.msgpack.Decoder(ProbeMessage)


class NotAProbeMessage(ValueError):
    """Whatever that was, no doctor says it."""


def encode_probe(said: ProbeMessage) -> bytes:
    """The body of a frame."""
    return msgspec.msgpack.encode(said)


def decode_probe(body: bytes | bytearray | memoryview) -> ProbeMessage:
    """NotADoctor for anything that `encode` did not write."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise NotAProbeMessage(f"{len(body)} bytes at once")
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise NotAProbeMessage("a message of another kind") from None
