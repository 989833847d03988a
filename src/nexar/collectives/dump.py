"""What the flight recorder writes: the last calls of a node, those it is in, and where its threads are.

One file for each node, in JSON, so that people can read it too. Durations are seconds before the dump was written;
they can be compared between hosts, whose clocks cannot.

Nothing here takes a lock: a dump is wanted most when somebody holds one and does not let go. What is read may be a
moment apart, as it always is between ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

from nexar.collectives.entry import Entry
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.journal import Journal
from nexar.collectives.operations import name_of
from nexar.collectives.recorder import Record
from nexar.collectives.stacks import Stack, stacks
from nexar.collectives.voice import Members
from nexar.links.ledger import Call
from nexar.types import format_node

FORMAT: Final = 1
_LINE: Final = 240  # characters
_RECORDS: Final = 1024  # of each communicator: enough to see where ranks parted, and quick to write


class Called(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call of a collective."""

    sequence: int
    operation: str
    what: str
    """`all_reduce of float32[8], sum, by ring`."""
    fingerprint: Call
    began_ago: float
    ended_ago: float | None = None
    """None: it is in flight."""
    outcome: str = ""
    """The name of the error that it ended with."""
    step: int = 0
    """How many of its steps are done, of one in flight."""
    moved_ago: float | None = None
    """Its last step."""


class Peer(msgspec.Struct, frozen=True):
    """What this node knows of another member."""

    rank: int
    node: str
    host: str
    address: str | None = None
    heard_ago: float | None = None
    """When it was last heard of in a collective."""


class Seat(msgspec.Struct, frozen=True):
    """The node's place in one communicator."""

    communicator: int
    generation: int
    epoch: int
    rank: int
    size: int
    in_flight: tuple[Called, ...]
    last_calls: tuple[Called, ...]
    """Those that have ended, in the order of their end."""
    peers: tuple[Peer, ...]


class Dump(msgspec.Struct, frozen=True):
    """One file."""

    format: int
    reason: str
    cluster: str
    rank: int
    """In the first communicator of the node."""
    node: str
    host: str
    pid: int
    epoch: int
    written_at: float
    """Seconds since 1970, by the clock of its host."""
    written: str
    """The same, to be read."""
    monotonic: float
    communicators: tuple[Seat, ...]
    threads: tuple[Stack, ...]


class Flight(Protocol):
    """One communicator that is open."""

    @property
    def group(self) -> Members:
        """Who takes part."""

    @property
    def journal(self) -> Journal:
        """Its calls."""


def describe(flights: Sequence[Flight], reason: str) -> Dump:
    """Of one node, which has these communicators; one at least."""
    now, wall = time.monotonic(), time.time()
    seats = sorted((_seat(flight, now) for flight in flights), key=lambda seat: (seat.communicator, seat.generation))
    first = flights[0].group
    member = first.membership.members[first.rank]
    return Dump(
        format=FORMAT,
        reason=reason,
        cluster=first.membership.cluster,
        rank=seats[0].rank,
        node=format_node(member.node),
        host=member.host,
        pid=os.getpid(),
        epoch=max(seat.epoch for seat in seats),
        written_at=wall,
        written=time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(wall)),
        monotonic=now,
        communicators=tuple(seats),
        threads=stacks(),
    )


def encode(dump: Dump) -> bytes:
    """The content of a file: a line for each call, and for each frame of a thread."""
    return f"{_laid_out(msgspec.to_builtins(dump))}\n".encode()


def decode(data: bytes) -> Dump:
    """What a file says. ValueError if it is no dump, or one of another format."""
    try:
        dump = msgspec.json.decode(data, type=Dump)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is no dump: {error}") from None
    if dump.format != FORMAT:
        raise ValueError(f"its format is {dump.format}; this version reads {FORMAT}")
    return dump


def _seat(flight: Flight, now: float) -> Seat:
    group, journal = flight.group, flight.journal
    return Seat(
        communicator=group.communicator,
        generation=group.matching.generation,
        epoch=group.membership.epoch,
        rank=group.rank,
        size=group.membership.size,
        in_flight=tuple(_flying(entry, now) for entry in journal.in_flight()),
        last_calls=tuple(_ended(record, now) for record in journal.recorder.snapshot()[-_RECORDS:]),
        peers=tuple(_peers(group, now)),
    )


def _flying(entry: Entry, now: float) -> Called:
    return _called(
        entry.sequence, entry.fingerprint, now - entry.began, step=entry.step, moved_ago=_short(now - entry.moved_at)
    )


def _ended(record: Record, now: float) -> Called:
    ended_ago = _short(now - record.ended)
    return _called(record.sequence, record.fingerprint, now - record.began, ended_ago=ended_ago, outcome=record.outcome)


def _called(
    sequence: int,
    fingerprint: Fingerprint,
    began_ago: float,
    *,
    ended_ago: float | None = None,
    outcome: str = "",
    step: int = 0,
    moved_ago: float | None = None,
) -> Called:
    return Called(
        sequence=sequence,
        operation=name_of(fingerprint.operation),
        what=fingerprint.describe(way=True),
        fingerprint=fingerprint,
        began_ago=_short(began_ago),
        ended_ago=ended_ago,
        outcome=outcome,
        step=step,
        moved_ago=moved_ago,
    )


def _peers(group: Members, now: float) -> list[Peer]:
    known, heard = group.matching.peers, group.matching.ledger.heard
    others = [(rank, member) for rank, member in enumerate(group.membership.members) if rank != group.rank]
    return [
        Peer(
            rank=rank,
            node=format_node(member.node),
            host=member.host,
            address=known[member.node].address if member.node in known else None,
            heard_ago=_short(now - heard[member.node]) if member.node in heard else None,
        )
        for rank, member in others
    ]


def _laid_out(value: Any, margin: str = "") -> str:
    """JSON that people can read: what is short stands in one line."""
    flat = msgspec.json.encode(value).decode()
    if len(flat) <= _LINE or not isinstance(value, (dict, list, tuple)):
        return flat
    inner = f"{margin} "
    if isinstance(value, dict):
        parts = [f'{inner}"{key}": {_laid_out(each, inner)}' for key, each in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{margin}}}"
    return "[\n" + ",\n".join(f"{inner}{_laid_out(each, inner)}" for each in value) + f"\n{margin}]"


def _short(seconds: float) -> float:
    """To the microsecond: more digits are noise to who reads them."""
    return round(seconds, 6)
