"""The dumps of a directory, as the flight recorders of all ranks left them there.

Where one rank is in the calls of one communicator, as its dumps say. Pure.

From the dumps of all ranks to who diverged where. Pure.

Ranks agree on calls by number. So those that are stuck are all in some call, and the question for each such call is
who has not come to it, who came late, and who called something else under its number.

Ranks are told as the world has them, also those of other communicators: one node has one name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from nexar.cluster.membership import WORLD
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.flight_recorder import Dump, DumpedCommunicator, DumpedPeer, RecordedCall, decode_dump
from nexar.errors import UsageError, list_ranks
from nexar.links.mismatch_detector import differ, same_but_for_algorithm
from nexar.observe.rank_files import WorldNode, read_rank_files, world_ranks
from nexar.types import Rank, format_seconds

_LARGEST_BYTES: Final = 1 << 28  # of one file: a dump of hundreds of communicators; more is something else


class Dumps(NamedTuple):
    """What was found."""

    dumps: tuple[Dump, ...]
    """The oldest first."""
    unreadable: dict[str, str]
    """Files that are none, and why."""


def read_dumps(directory: Path) -> Dumps:
    """Of this directory, but not of those in it. UsageError if there is none, or nothing in it."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory; give the one that NEXAR_DUMP_DIR named, with all ranks' dumps")
    dumps, unreadable = read_rank_files(directory, ".json", decode_dump, _LARGEST_BYTES)
    if not dumps:
        others = f"; {len(unreadable)} files there are none" if unreadable else ""
        raise UsageError(
            f"no dumps in {directory}{others}: set NEXAR_DUMP_DIR before the start, or send SIGUSR1 to every rank, and "
            "copy what the ranks of all hosts wrote into one directory"
        )
    return Dumps(tuple(sorted(dumps, key=lambda dump: dump.written_at)), unreadable)


_METHODS: Final = "/nexar/communicator/"
"""Where the methods of communicators are."""
LASTING: Final = 0.5
"""Seconds. Calls that have been in flight for less are on their way: dumps of several ranks are never of one moment."""


class RankPosition:
    """One rank of one generation of one communicator."""

    def __init__(self, dump: Dump, seat: DumpedCommunicator, *, alone: bool, rank: Rank | None = None) -> None:
        """`alone`: its process has no other rank, so the main thread is the rank's. `rank`: what it is called; else
        its rank in this communicator.
        """
        self.dump = dump
        self.seat = seat
        self.rank: Final[Rank] = seat.rank if rank is None else rank
        self._alone = alone
        self.calls: Final[dict[int, RecordedCall]] = {
            call.sequence: call for call in (*seat.last_calls, *seat.in_flight)
        }
        """By sequence: those that are remembered."""

    @property
    def begun(self) -> int:
        """The highest sequence that it has come to; -1 if none."""
        return max(self.calls, default=-1)

    @property
    def finished(self) -> RecordedCall | None:
        """The last call that went well."""
        well = [call for call in self.seat.last_calls if not call.outcome]
        return max(well, key=lambda call: call.sequence, default=None)

    @property
    def stuck(self) -> RecordedCall | None:
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
            return f"it is in {call_text(call)} for {format_seconds(call.began_ago)}"
        elsewhere = [
            (seat, call) for seat in self.dump.communicators if seat is not self.seat for call in seat.in_flight
        ]
        if elsewhere:
            seat, call = max(elsewhere, key=lambda each: each[1].began_ago)
            return (
                f"it is in {call_text(call)} of communicator {seat.communicator} for {format_seconds(call.began_ago)}"
            )
        ended = [call.ended_ago for call in self.seat.last_calls if call.ended_ago is not None]
        since = f" for {format_seconds(min(ended))}" if ended else ""
        return f"it is in {self._method() or 'user code'}{self._line()}{since}"

    def history(self) -> str:
        """`its last finished call is all_reduce #41`."""
        last = self.finished
        return "it has finished no call" if last is None else f"its last finished call is {call_text(last)}"

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


def call_text(call: RecordedCall) -> str:
    """`all_reduce #41`."""
    return f"{call.operation} #{call.sequence}"


def positions_of(
    dumps: Sequence[Dump], communicator: int, generation: int, ranks: Mapping[str, Rank] | None = None
) -> list[RankPosition]:
    """Of those dumps that know it, in the order of ranks: those of this communicator, unless `ranks` has others, by
    node.
    """
    ranks = ranks or {}
    shared = [(dump.host, dump.pid) for dump in {dump.node: dump for dump in dumps}.values()]
    found = [
        RankPosition(dump, seat, alone=shared.count((dump.host, dump.pid)) == 1, rank=ranks.get(dump.node))
        for dump in dumps
        for seat in dump.communicators
        if (seat.communicator, seat.generation) == (communicator, generation)
    ]
    return sorted(found, key=lambda place: place.rank)


FindingKind: TypeAlias = Literal[
    "mismatch", "missing", "late", "stalled", "ahead", "behind", "no dump", "closed", "epochs"
]

_LATE: Final = 1.0  # seconds that the clocks of two hosts may differ without meaning anything
_FAR: Final = 10  # calls
_MOST: Final = 3  # calls in which ranks are stuck that are told of: what follows the first is mostly its consequence


@dataclass(frozen=True, slots=True)
class DumpFinding:
    """One thing that is not as it should be."""

    kind: FindingKind
    communicator: int | None
    """None: it is about the nodes themselves."""
    ranks: tuple[Rank, ...]
    """Whom it is about: ranks of the world. Where no dump says which rank of the world some node has, all of them are
    ranks of the communicator instead, and `text` begins with that."""
    text: str


def analyse(dumps: Sequence[Dump]) -> tuple[DumpFinding, ...]:
    """What the dumps of one run say, given the oldest first. Empty: nothing diverged.

    Of each communicator the last generation counts, and of each node the last dump that knows it: an earlier one has
    what came before a loss. Dumps of other clusters than that of the last one are left out.
    """
    ours = [dump for dump in dumps if dump.cluster == dumps[-1].cluster]
    last = list({dump.node: dump for dump in ours}.values())
    found = list(_epochs(last))
    generations: dict[int, int] = {}
    for seat in sorted((seat for dump in ours for seat in dump.communicators), key=lambda seat: seat.generation):
        generations[seat.communicator] = seat.generation
    for communicator, generation in sorted(generations.items()):
        ranks = _names(ours, communicator, generation)
        found += _Communicator(
            communicator, positions_of(ours, communicator, generation, ranks), last, ranks
        ).findings()
    return tuple(found)


def _names(dumps: Sequence[Dump], communicator: int, generation: int) -> dict[str, Rank] | None:
    """By node: its rank in the world, of all who take part. None: of some that is not known."""
    seats = [(dump.node, seat) for dump in dumps for seat in dump.communicators]
    seen = [
        WorldNode(seat.generation, each, rank)
        for node, seat in seats
        if seat.communicator == WORLD
        for each, rank in _ranks(node, seat).items()
    ]
    found = world_ranks(seen, generation)
    about = [
        _ranks(node, seat) for node, seat in seats if (seat.communicator, seat.generation) == (communicator, generation)
    ]
    return found if all(node in found for ranks in about for node in ranks) else None


def _ranks(node: str, seat: DumpedCommunicator) -> dict[str, Rank]:
    """Of those who take part, by node, as one of them knows."""
    return {node: seat.rank, **{peer.node: peer.rank for peer in seat.peers}}


def _epochs(dumps: Sequence[Dump]) -> Iterator[DumpFinding]:
    by_epoch: dict[int, list[Rank]] = {}
    for dump in sorted(dumps, key=lambda dump: dump.rank):
        by_epoch.setdefault(dump.epoch, []).append(dump.rank)
    if len(by_epoch) > 1:
        each = ", ".join(f"{epoch} on {list_ranks(ranks)}" for epoch, ranks in sorted(by_epoch.items()))
        behind = tuple(rank for epoch, ranks in by_epoch.items() if epoch != max(by_epoch) for rank in ranks)
        yield DumpFinding(
            "epochs", None, behind, f"epochs differ: {each}; who is behind has not heard of the last change"
        )


class _Communicator:
    """One generation of one communicator."""

    def __init__(
        self, communicator: int, places: Sequence[RankPosition], dumps: Sequence[Dump], ranks: Mapping[str, Rank] | None
    ) -> None:
        """`places`: what all dumps say, the oldest of each rank first. `dumps`: the last of each node. `ranks`: in the
        world, by node; None: they are not known.
        """
        self._id = communicator
        self._ranks = ranks
        self._places = {place.rank: place for place in places}
        self._before = places
        self._nodes = {dump.node for dump in dumps}

    def findings(self) -> list[DumpFinding]:
        """The cause first, as far as it can be known."""
        return [*self._mismatch(), *self._stuck(), *self._silent(), *self._behind()]

    def _finding(self, kind: FindingKind, ranks: Sequence[Rank], text: str) -> DumpFinding:
        return DumpFinding(
            kind, self._id, tuple(ranks), text if self._ranks is not None else f"(by its own ranks) {text}"
        )

    def _rank_of(self, peer: DumpedPeer) -> Rank:
        return peer.rank if self._ranks is None else self._ranks[peer.node]

    # -- the same number, another call -------------------------------------------------------------------

    def _mismatch(self) -> Iterator[DumpFinding]:
        """The first one: what follows it is of no interest."""
        sequences = sorted({sequence for place in self._places.values() for sequence in place.calls})
        for sequence in sequences:
            calls = {rank: place.calls[sequence] for rank, place in self._places.items() if sequence in place.calls}
            first = next(iter(calls.values()))
            if any(differ(call.fingerprint, first.fingerprint) for call in calls.values()):
                yield self._differing(sequence, calls)
                return

    def _differing(self, sequence: int, calls: Mapping[Rank, RecordedCall]) -> DumpFinding:
        way = same_but_for_algorithm(call.fingerprint for call in calls.values())
        by_call: dict[str, list[Rank]] = {}
        for rank, call in calls.items():
            by_call.setdefault(Fingerprint(*call.fingerprint).describe(way=way), []).append(rank)
        fewest_first = sorted(by_call.items(), key=lambda each: len(each[1]))
        text = ", ".join(f"{what} on {list_ranks(ranks)}" for what, ranks in fewest_first)
        return self._finding("mismatch", fewest_first[0][1], f"#{sequence} is {text}")

    # -- stuck in a call ---------------------------------------------------------------------------------

    def _stuck(self) -> Iterator[DumpFinding]:
        stuck: dict[int, dict[Rank, RecordedCall]] = {}
        for rank, place in self._places.items():
            call = place.stuck
            if call is not None:
                stuck.setdefault(call.sequence, {})[rank] = call
        for sequence in sorted(stuck)[:_MOST]:
            yield from self._stuck_in(sequence, stuck[sequence])

    def _stuck_in(self, sequence: int, waiting: Mapping[Rank, RecordedCall]) -> Iterator[DumpFinding]:
        absent = [place for place in self._places.values() if place.begun < sequence]
        for place in absent:
            text = f"rank {place.rank} is missing: {place.history()}, {place.whereabouts()}; {_waiting(waiting)}"
            yield self._finding("missing", [place.rank], text)
        if absent or self._missing_nodes():
            return
        late = list(self._late(sequence, waiting))
        yield from late
        gone = [rank for rank, place in self._places.items() if rank not in waiting and sequence in place.calls]
        if gone:
            text = f"{_waiting(waiting)}, which {list_ranks(gone)} {_have(gone)} left behind"
            yield self._finding("ahead", gone, text)
        elif not late:
            yield self._stalled(waiting)

    def _late(self, sequence: int, waiting: Mapping[Rank, RecordedCall]) -> Iterator[DumpFinding]:
        came = {rank: self._places[rank].came_at(sequence) for rank in waiting}
        times = {rank: when for rank, when in came.items() if when is not None}
        first = min(times.values(), default=0.0)
        late = [rank for rank, when in times.items() if when - first > _LATE]
        if len(late) == len(times):
            return
        for rank in late:
            call = waiting[rank]
            text = f"rank {rank} came to {call_text(call)} {format_seconds(times[rank] - first)} after the first"
            where = self._where_before(rank, sequence)
            yield self._finding("late", [rank], f"{text}; {where}" if where else text)

    def _where_before(self, rank: Rank, sequence: int) -> str:
        """What an older dump says, which it wrote while the others waited for it."""
        older = [place for place in self._before if place.rank == rank and place.begun < sequence]
        return f"while the others waited: {older[-1].history()}, {older[-1].whereabouts()}" if older else ""

    def _stalled(self, waiting: Mapping[Rank, RecordedCall]) -> DumpFinding:
        """All who are known are in it."""
        steps = {rank: call.step for rank, call in waiting.items() if call.ended_ago is None}
        fewest = [rank for rank, step in steps.items() if step == min(steps.values())]
        text = _waiting(waiting)
        if steps and len(fewest) < len(steps):
            text += f"; {list_ranks(fewest)} {_have(fewest)} done {min(steps.values())} steps of it, others up to "
            text += str(max(steps.values()))
        return self._finding("stalled", fewest or list(waiting), f"everybody has come, and nobody goes on: {text}")

    # -- who says nothing --------------------------------------------------------------------------------

    def _missing_nodes(self) -> dict[Rank, str]:
        peers = [peer for place in self._places.values() for peer in place.seat.peers]
        return {self._rank_of(peer): peer.node for peer in peers if peer.node not in self._nodes}

    def _silent(self) -> Iterator[DumpFinding]:
        missing = self._missing_nodes()
        for rank in sorted(missing):
            heard = [self._heard(place, rank) for place in self._places.values()]
            known = [ago for ago in heard if ago is not None]
            last = f"; it was last heard of {format_seconds(min(known))} before" if known else ""
            stuck = next((place.stuck for place in self._places.values() if place.stuck is not None), None)
            waits = "" if stuck is None else f"; the others were in {call_text(stuck)}"
            yield self._finding(
                "no dump", [rank], f"rank {rank} wrote none: it died or never got the signal{last}{waits}"
            )
        peers = [peer for place in self._places.values() for peer in place.seat.peers]
        closed = {self._rank_of(peer) for peer in peers if peer.node in self._nodes}
        for rank in sorted(closed - set(self._places)):
            yield self._finding("closed", [rank], f"rank {rank} has closed it, or knows an earlier generation of it")

    def _heard(self, place: RankPosition, rank: Rank) -> float | None:
        return next((peer.heard_ago for peer in place.seat.peers if self._rank_of(peer) == rank), None)

    # -- who is slow -------------------------------------------------------------------------------------

    def _behind(self) -> Iterator[DumpFinding]:
        if any(place.stuck for place in self._places.values()):
            return  # that is why
        most = max(place.begun for place in self._places.values())
        for rank, place in self._places.items():
            if most - place.begun >= _FAR:
                text = f"rank {rank} is {most - place.begun} calls behind: {place.history()}, {place.whereabouts()}"
                yield self._finding("behind", [rank], text)


def _waiting(waiting: Mapping[Rank, RecordedCall]) -> str:
    """`ranks 0 and 1 wait in all_reduce #42 for 12 s; rank 3 left it with CollectiveTimeout`."""
    call = next(iter(waiting.values()))
    inside = [rank for rank, each in waiting.items() if each.ended_ago is None]
    outcomes: dict[str, list[Rank]] = {}
    for rank, each in waiting.items():
        if each.ended_ago is not None:
            outcomes.setdefault(each.outcome, []).append(rank)
    longest = max((waiting[rank].began_ago for rank in inside), default=0.0)
    verb = "waits" if len(inside) == 1 else "wait"
    parts = [f"{list_ranks(inside)} {verb} in {call_text(call)} for {format_seconds(longest)}"] if inside else []
    parts += [f"{list_ranks(ranks)} waited in {call_text(call)} until {error}" for error, ranks in outcomes.items()]
    return ", ".join(parts)


def _have(ranks: Sequence[Rank]) -> str:
    return "has" if len(ranks) == 1 else "have"
