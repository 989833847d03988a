"""From the dumps of all ranks to who diverged where. Pure.

Ranks agree on calls by number. So those that are stuck are all in some call, and the question for each such call is
who has not come to it, who came late, and who called something else under its number.

Ranks are told as the world has them, also those of other communicators: one node has one name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from nexar.cluster.change import WORLD
from nexar.collectives.dump import Called, Dump, Peer, Seat
from nexar.collectives.fingerprint import Fingerprint
from nexar.errors.base import list_ranks
from nexar.links.ledger import differ, same_but_for_the_way
from nexar.observe.place import Place, name, places_of
from nexar.observe.world_ranks import Seen, world_ranks
from nexar.types import Rank, format_seconds

Kind: TypeAlias = Literal["mismatch", "missing", "late", "stalled", "ahead", "behind", "no dump", "closed", "epochs"]

_LATE: Final = 1.0  # seconds that the clocks of two hosts may differ without meaning anything
_FAR: Final = 10  # calls
_MOST: Final = 3  # calls in which ranks are stuck that are told of: what follows the first is mostly its consequence


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    kind: Kind
    communicator: int | None
    """None: it is about the nodes themselves."""
    ranks: tuple[Rank, ...]
    """Whom it is about: ranks of the world. Where no dump says which rank of the world some node has, all of them are
    ranks of the communicator instead, and `text` begins with that."""
    text: str


def analyse(dumps: Sequence[Dump]) -> tuple[Finding, ...]:
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
        found += _Communicator(communicator, places_of(ours, communicator, generation, ranks), last, ranks).findings()
    return tuple(found)


def _names(dumps: Sequence[Dump], communicator: int, generation: int) -> dict[str, Rank] | None:
    """By node: its rank in the world, of all who take part. None: of some that is not known."""
    seats = [(dump.node, seat) for dump in dumps for seat in dump.communicators]
    seen = [
        Seen(seat.generation, each, rank)
        for node, seat in seats
        if seat.communicator == WORLD
        for each, rank in _ranks(node, seat).items()
    ]
    found = world_ranks(seen, generation)
    about = [
        _ranks(node, seat) for node, seat in seats if (seat.communicator, seat.generation) == (communicator, generation)
    ]
    return found if all(node in found for ranks in about for node in ranks) else None


def _ranks(node: str, seat: Seat) -> dict[str, Rank]:
    """Of those who take part, by node, as one of them knows."""
    return {node: seat.rank, **{peer.node: peer.rank for peer in seat.peers}}


def _epochs(dumps: Sequence[Dump]) -> Iterator[Finding]:
    by_epoch: dict[int, list[Rank]] = {}
    for dump in sorted(dumps, key=lambda dump: dump.rank):
        by_epoch.setdefault(dump.epoch, []).append(dump.rank)
    if len(by_epoch) > 1:
        each = ", ".join(f"{epoch} on {list_ranks(ranks)}" for epoch, ranks in sorted(by_epoch.items()))
        behind = tuple(rank for epoch, ranks in by_epoch.items() if epoch != max(by_epoch) for rank in ranks)
        yield Finding("epochs", None, behind, f"epochs differ: {each}; who is behind has not heard of the last change")


class _Communicator:
    """One generation of one communicator."""

    def __init__(
        self, communicator: int, places: Sequence[Place], dumps: Sequence[Dump], ranks: Mapping[str, Rank] | None
    ) -> None:
        """`places`: what all dumps say, the oldest of each rank first. `dumps`: the last of each node. `ranks`: in the
        world, by node; None: they are not known.
        """
        self._id = communicator
        self._ranks = ranks
        self._places = {place.rank: place for place in places}
        self._before = places
        self._nodes = {dump.node for dump in dumps}

    def findings(self) -> list[Finding]:
        """The cause first, as far as it can be known."""
        return [*self._mismatch(), *self._stuck(), *self._silent(), *self._behind()]

    def _finding(self, kind: Kind, ranks: Sequence[Rank], text: str) -> Finding:
        return Finding(kind, self._id, tuple(ranks), text if self._ranks is not None else f"(by its own ranks) {text}")

    def _rank_of(self, peer: Peer) -> Rank:
        return peer.rank if self._ranks is None else self._ranks[peer.node]

    # -- the same number, another call -------------------------------------------------------------------

    def _mismatch(self) -> Iterator[Finding]:
        """The first one: what follows it is of no interest."""
        sequences = sorted({sequence for place in self._places.values() for sequence in place.calls})
        for sequence in sequences:
            calls = {rank: place.calls[sequence] for rank, place in self._places.items() if sequence in place.calls}
            first = next(iter(calls.values()))
            if any(differ(call.fingerprint, first.fingerprint) for call in calls.values()):
                yield self._differing(sequence, calls)
                return

    def _differing(self, sequence: int, calls: Mapping[Rank, Called]) -> Finding:
        way = same_but_for_the_way(call.fingerprint for call in calls.values())
        by_call: dict[str, list[Rank]] = {}
        for rank, call in calls.items():
            by_call.setdefault(Fingerprint(*call.fingerprint).describe(way=way), []).append(rank)
        fewest_first = sorted(by_call.items(), key=lambda each: len(each[1]))
        text = ", ".join(f"{what} on {list_ranks(ranks)}" for what, ranks in fewest_first)
        return self._finding("mismatch", fewest_first[0][1], f"#{sequence} is {text}")

    # -- stuck in a call ---------------------------------------------------------------------------------

    def _stuck(self) -> Iterator[Finding]:
        stuck: dict[int, dict[Rank, Called]] = {}
        for rank, place in self._places.items():
            call = place.stuck
            if call is not None:
                stuck.setdefault(call.sequence, {})[rank] = call
        for sequence in sorted(stuck)[:_MOST]:
            yield from self._stuck_in(sequence, stuck[sequence])

    def _stuck_in(self, sequence: int, waiting: Mapping[Rank, Called]) -> Iterator[Finding]:
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

    def _late(self, sequence: int, waiting: Mapping[Rank, Called]) -> Iterator[Finding]:
        came = {rank: self._places[rank].came_at(sequence) for rank in waiting}
        times = {rank: when for rank, when in came.items() if when is not None}
        first = min(times.values(), default=0.0)
        late = [rank for rank, when in times.items() if when - first > _LATE]
        if len(late) == len(times):
            return
        for rank in late:
            call = waiting[rank]
            text = f"rank {rank} came to {name(call)} {format_seconds(times[rank] - first)} after the first"
            where = self._where_before(rank, sequence)
            yield self._finding("late", [rank], f"{text}; {where}" if where else text)

    def _where_before(self, rank: Rank, sequence: int) -> str:
        """What an older dump says, which it wrote while the others waited for it."""
        older = [place for place in self._before if place.rank == rank and place.begun < sequence]
        return f"while the others waited: {older[-1].history()}, {older[-1].whereabouts()}" if older else ""

    def _stalled(self, waiting: Mapping[Rank, Called]) -> Finding:
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

    def _silent(self) -> Iterator[Finding]:
        missing = self._missing_nodes()
        for rank in sorted(missing):
            heard = [self._heard(place, rank) for place in self._places.values()]
            known = [ago for ago in heard if ago is not None]
            last = f"; it was last heard of {format_seconds(min(known))} before" if known else ""
            stuck = next((place.stuck for place in self._places.values() if place.stuck is not None), None)
            waits = "" if stuck is None else f"; the others were in {name(stuck)}"
            yield self._finding(
                "no dump", [rank], f"rank {rank} wrote none: it died or never got the signal{last}{waits}"
            )
        peers = [peer for place in self._places.values() for peer in place.seat.peers]
        closed = {self._rank_of(peer) for peer in peers if peer.node in self._nodes}
        for rank in sorted(closed - set(self._places)):
            yield self._finding("closed", [rank], f"rank {rank} has closed it, or knows an earlier generation of it")

    def _heard(self, place: Place, rank: Rank) -> float | None:
        return next((peer.heard_ago for peer in place.seat.peers if self._rank_of(peer) == rank), None)

    # -- who is slow -------------------------------------------------------------------------------------

    def _behind(self) -> Iterator[Finding]:
        if any(place.stuck for place in self._places.values()):
            return  # that is why
        most = max(place.begun for place in self._places.values())
        for rank, place in self._places.items():
            if most - place.begun >= _FAR:
                text = f"rank {rank} is {most - place.begun} calls behind: {place.history()}, {place.whereabouts()}"
                yield self._finding("behind", [rank], text)


def _waiting(waiting: Mapping[Rank, Called]) -> str:
    """`ranks 0 and 1 wait in all_reduce #42 for 12 s; rank 3 left it with CollectiveTimeout`."""
    call = next(iter(waiting.values()))
    inside = [rank for rank, each in waiting.items() if each.ended_ago is None]
    outcomes: dict[str, list[Rank]] = {}
    for rank, each in waiting.items():
        if each.ended_ago is not None:
            outcomes.setdefault(each.outcome, []).append(rank)
    longest = max((waiting[rank].began_ago for rank in inside), default=0.0)
    verb = "waits" if len(inside) == 1 else "wait"
    parts = [f"{list_ranks(inside)} {verb} in {name(call)} for {format_seconds(longest)}"] if inside else []
    parts += [f"{list_ranks(ranks)} waited in {name(call)} until {error}" for error, ranks in outcomes.items()]
    return ", ".join(parts)


def _have(ranks: Sequence[Rank]) -> str:
    return "has" if len(ranks) == 1 else "have"
