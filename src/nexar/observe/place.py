"""Where one rank is in the calls of one communicator, as its dumps say. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from nexar.collectives.dump import Called, Dump, Seat
from nexar.types import Rank, format_seconds

_METHODS: Final = "/nexar/communicator/"
"""Where the methods of communicators are."""
LASTING: Final = 0.5
"""Seconds. Calls that have been in flight for less are on their way: dumps of several ranks are never of one moment."""


class Place:
    """One rank of one generation of one communicator."""

    def __init__(self, dump: Dump, seat: Seat, *, alone: bool, rank: Rank | None = None) -> None:
        """`alone`: its process has no other rank, so the main thread is the rank's. `rank`: what it is called; else
        its rank in this communicator.
        """
        self.dump = dump
        self.seat = seat
        self.rank: Final[Rank] = seat.rank if rank is None else rank
        self._alone = alone
        self.calls: Final[dict[int, Called]] = {call.sequence: call for call in (*seat.last_calls, *seat.in_flight)}
        """By sequence: those that are remembered."""

    @property
    def begun(self) -> int:
        """The highest sequence that it has come to; -1 if none."""
        return max(self.calls, default=-1)

    @property
    def finished(self) -> Called | None:
        """The last call that went well."""
        well = [call for call in self.seat.last_calls if not call.outcome]
        return max(well, key=lambda call: call.sequence, default=None)

    @property
    def stuck(self) -> Called | None:
        """The first call that it is in and does not get out of; or that it left last, without its result."""
        waiting = [call for call in self.seat.in_flight if call.began_ago >= LASTING]
        if waiting:
            return min(waiting, key=lambda call: call.sequence)
        last = max(self.seat.last_calls, key=lambda call: call.sequence, default=None)
        return last if last is not None and last.outcome else None

    def came_at(self, sequence: int) -> float | None:
        """When it came to that call, by the clock of its host."""
        call = self.calls.get(sequence)
        return None if call is None else self.dump.written_at - call.began_ago

    def whereabouts(self) -> str:
        """What it did when the dump was written: `it is in user code (train.py:88) for 12 s`."""
        if self.seat.in_flight:
            call = self.seat.in_flight[0]
            return f"it is in {name(call)} for {format_seconds(call.began_ago)}"
        elsewhere = [
            (seat, call) for seat in self.dump.communicators if seat is not self.seat for call in seat.in_flight
        ]
        if elsewhere:
            seat, call = max(elsewhere, key=lambda each: each[1].began_ago)
            return f"it is in {name(call)} of communicator {seat.communicator} for {format_seconds(call.began_ago)}"
        ended = [call.ended_ago for call in self.seat.last_calls if call.ended_ago is not None]
        since = f" for {format_seconds(min(ended))}" if ended else ""
        return f"it is in {self._method() or 'user code'}{self._line()}{since}"

    def history(self) -> str:
        """`its last finished call is all_reduce #41`."""
        last = self.finished
        return "it has finished no call" if last is None else f"its last finished call is {name(last)}"

    def _method(self) -> str:
        """The method of nexar's that the main thread has called and is in; empty: none."""
        main = next((stack for stack in self.dump.threads if stack.main), None)
        if main is None or not main.at or not self._alone:
            return ""
        lines = [frame.partition(" in ") for frame in main.frames]
        users = [number for number, (where, _, _) in enumerate(lines) if where.endswith(f"/{main.at}")]
        inner = lines[users[-1] + 1 :] if users else []
        where, _, what = inner[0] if inner else ("", "", "")
        return what.partition(":")[0] if _METHODS in where else ""

    def _line(self) -> str:
        at = next((stack.at for stack in self.dump.threads if stack.main), "")
        return f" ({at})" if at and self._alone else ""


def name(call: Called) -> str:
    """`all_reduce #41`."""
    return f"{call.operation} #{call.sequence}"


def places_of(
    dumps: Sequence[Dump], communicator: int, generation: int, ranks: Mapping[str, Rank] | None = None
) -> list[Place]:
    """Of those dumps that know it, in the order of ranks: those of this communicator, unless `ranks` has others, by
    node.
    """
    ranks = ranks or {}
    shared = [(dump.host, dump.pid) for dump in {dump.node: dump for dump in dumps}.values()]
    found = [
        Place(dump, seat, alone=shared.count((dump.host, dump.pid)) == 1, rank=ranks.get(dump.node))
        for dump in dumps
        for seat in dump.communicators
        if (seat.communicator, seat.generation) == (communicator, generation)
    ]
    return sorted(found, key=lambda place: place.rank)
