"""What a doctor has seen: plain values, with no judgement. Pure.

They are shown as JSON as they are, and travel from the doctor of one host to that of another.
"""

from __future__ import annotations

import msgspec

from nexar.types import Rank


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


class Trip(msgspec.Struct, frozen=True):
    """A message there and back, over a connection that was made for it."""

    scheme: str
    round_trip: float | None = None
    """Seconds; None: it did not work, and `problem` says why."""
    problem: str = ""


class Door(msgspec.Struct, frozen=True):
    """Where this process would listen, for UDP and TCP; `problem` if it cannot."""

    address: str = ""
    advertised: tuple[str, ...] = ()
    problem: str = ""


class Room(msgspec.Struct, frozen=True):
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
    door: Door
    trips: tuple[Trip, ...]
    memory: Room | None
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


class Report(msgspec.Struct, frozen=True):
    """What the doctor at one rank has seen."""

    rank: Rank
    machine: Machine
    address: str
    """The most promising of those it told the others, host:port."""
    fixed_port: bool
    """The port was chosen by a setting, so that a firewall can know it."""
    reaches: tuple[Reach, ...]


class Finding(msgspec.Struct, frozen=True):
    """A piece of advice. What is not needed would only help."""

    text: str
    needed: bool = True
