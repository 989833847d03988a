"""Reads the flight recorder dumps of a directory and finds where the ranks diverged.

All ranks number calls alike. For each call with stuck ranks the analysis finds ranks that have not reached it, were
late, or made another call under its number.
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

_LARGEST_BYTES: Final = 1 << 28  # for one file: a dump of hundreds of communicators is smaller


class Dumps(NamedTuple):
    """The dumps of a directory."""

    dumps: tuple[Dump, ...]
    """Oldest first."""
    unreadable: dict[str, str]
    """File name → why it is not a dump."""


def read_dumps(directory: Path) -> Dumps:
    """Ignores subdirectories. Raises UsageError if there is no directory or no dump."""
    if not directory.is_dir():
        raise UsageError(
            f"{directory} is not a directory; pass the directory of NEXAR_DUMP_DIR, with the dumps of all ranks"
        )
    dumps, unreadable = read_rank_files(directory, ".json", decode_dump, _LARGEST_BYTES)
    if not dumps:
        others = f" ({len(unreadable)} other files)" if unreadable else ""
        raise UsageError(
            f"no dumps in {directory}{others}: set NEXAR_DUMP_DIR before the start, or send SIGUSR1 to every rank, and "
            "copy the dumps of all hosts into one directory"
        )
    return Dumps(tuple(sorted(dumps, key=lambda dump: dump.written_at)), unreadable)


_METHODS_PATH: Final = "/nexar/communicator/"
MIN_STUCK_SECONDS: Final = 0.5
"""Seconds. Dumps are never simultaneous, so shorter calls count as progressing."""


class RankPosition:
    """The position of one rank in one generation, from one dump."""

    def __init__(self, dump: Dump, state: DumpedCommunicator, *, alone: bool, rank: Rank | None = None) -> None:
        """`alone`: its process has no other rank. `rank`: replaces the rank in this communicator."""
        self.dump = dump
        self.state = state
        self.rank: Final[Rank] = state.rank if rank is None else rank
        self._alone = alone
        self.calls: Final[dict[int, RecordedCall]] = {
            call.sequence: call for call in (*state.last_calls, *state.in_flight)
        }
        """By sequence number."""

    @property
    def begun(self) -> int:
        """-1 if none."""
        return max(self.calls, default=-1)

    @property
    def finished(self) -> RecordedCall | None:
        succeeded = [call for call in self.state.last_calls if not call.outcome]
        return max(succeeded, key=lambda call: call.sequence, default=None)

    @property
    def stuck(self) -> RecordedCall | None:
        """The first call in which it waits, or else its last call, if that failed."""
        waiting = [call for call in self.state.in_flight if call.began_ago >= MIN_STUCK_SECONDS]
        if waiting:
            return min(waiting, key=lambda call: call.sequence)
        last = max(self.state.last_calls, key=lambda call: call.sequence, default=None)
        return last if last is not None and last.outcome else None

    def arrived_at(self, sequence: int) -> float | None:
        """By its host's clock."""
        call = self.calls.get(sequence)
        return None if call is None else self.dump.written_at - call.began_ago

    def activity(self) -> str:
        """For example `it is in user code (train.py:88) for 12 s`."""
        if self.state.in_flight:
            call = self.state.in_flight[0]
            return f"it is in {call_text(call)} for {format_seconds(call.began_ago)}"
        elsewhere = [
            (state, call) for state in self.dump.communicators if state is not self.state for call in state.in_flight
        ]
        if elsewhere:
            state, call = max(elsewhere, key=lambda each: each[1].began_ago)
            return (
                f"it is in {call_text(call)} of communicator {state.communicator} for {format_seconds(call.began_ago)}"
            )
        ended = [call.ended_ago for call in self.state.last_calls if call.ended_ago is not None]
        since = f" for {format_seconds(min(ended))}" if ended else ""
        return f"it is in {self._method() or 'user code'}{self._line()}{since}"

    def history(self) -> str:
        last = self.finished
        return "it has finished no call" if last is None else f"its last finished call is {call_text(last)}"

    def _method(self) -> str:
        """The nexar method in which the main thread is, or ""."""
        main = next((stack for stack in self.dump.threads if stack.main), None)
        if main is None or not main.at or not self._alone:
            return ""
        lines = [frame.partition(" in ") for frame in main.frames]
        users = [number for number, (where, _, _) in enumerate(lines) if where.endswith(f"/{main.at}")]
        inner = lines[users[-1] + 1 :] if users else []
        where, _, what = inner[0] if inner else ("", "", "")
        return what.partition(":")[0] if _METHODS_PATH in where else ""

    def _line(self) -> str:
        at = next((stack.at for stack in self.dump.threads if stack.main), "")
        return f" ({at})" if at and self._alone else ""


def call_text(call: RecordedCall) -> str:
    """`all_reduce #41`."""
    return f"{call.operation} #{call.sequence}"


def positions_of(
    dumps: Sequence[Dump], communicator: int, generation: int, ranks: Mapping[str, Rank] | None = None
) -> list[RankPosition]:
    """Sorted by rank. `ranks`: node → rank that replaces the communicator's."""
    ranks = ranks or {}
    shared = [(dump.host, dump.pid) for dump in {dump.node: dump for dump in dumps}.values()]
    found = [
        RankPosition(dump, state, alone=shared.count((dump.host, dump.pid)) == 1, rank=ranks.get(dump.node))
        for dump in dumps
        for state in dump.communicators
        if (state.communicator, state.generation) == (communicator, generation)
    ]
    return sorted(found, key=lambda position: position.rank)


FindingKind: TypeAlias = Literal[
    "mismatch", "missing", "late", "stalled", "ahead", "behind", "no dump", "closed", "epochs"
]

_LATE_SECONDS: Final = 1.0  # seconds that the clocks of two hosts may differ
_FAR_BEHIND_CALLS: Final = 10
_MAX_STUCK_CALLS: Final = 3  # stuck calls that are reported: those after the first are mostly consequences of it


@dataclass(frozen=True, slots=True)
class DumpFinding:
    """One divergence."""

    kind: FindingKind
    communicator: int | None
    """None: the finding is about the nodes themselves."""
    ranks: tuple[Rank, ...]
    """Ranks of the world; if one is unknown, all are ranks of the communicator, and `text` says so."""
    text: str


def analyse(dumps: Sequence[Dump]) -> tuple[DumpFinding, ...]:
    """Findings about one run. `dumps`: oldest first.

    For each communicator the last generation counts (earlier ones precede a loss), and for each node the last dump that
    knows it. Ignores dumps of other clusters than the newest dump's.
    """
    ours = [dump for dump in dumps if dump.cluster == dumps[-1].cluster]
    last = list({dump.node: dump for dump in ours}.values())
    found = list(_epochs(last))
    generations: dict[int, int] = {}
    for state in sorted((state for dump in ours for state in dump.communicators), key=lambda state: state.generation):
        generations[state.communicator] = state.generation
    for communicator, generation in sorted(generations.items()):
        ranks = _world_ranks_of(ours, communicator, generation)
        found += _Communicator(
            communicator, positions_of(ours, communicator, generation, ranks), last, ranks
        ).findings()
    return tuple(found)


def _world_ranks_of(dumps: Sequence[Dump], communicator: int, generation: int) -> dict[str, Rank] | None:
    """Node → rank in the world; None if one is unknown."""
    states = [(dump.node, state) for dump in dumps for state in dump.communicators]
    seen = [
        WorldNode(state.generation, each, rank)
        for node, state in states
        if state.communicator == WORLD
        for each, rank in _ranks(node, state).items()
    ]
    found = world_ranks(seen, generation)
    about = [
        _ranks(node, state)
        for node, state in states
        if (state.communicator, state.generation) == (communicator, generation)
    ]
    return found if all(node in found for ranks in about for node in ranks) else None


def _ranks(node: str, state: DumpedCommunicator) -> dict[str, Rank]:
    return {node: state.rank, **{peer.node: peer.rank for peer in state.peers}}


def _epochs(dumps: Sequence[Dump]) -> Iterator[DumpFinding]:
    by_epoch: dict[int, list[Rank]] = {}
    for dump in sorted(dumps, key=lambda dump: dump.rank):
        by_epoch.setdefault(dump.epoch, []).append(dump.rank)
    if len(by_epoch) > 1:
        each = ", ".join(f"{epoch} on {list_ranks(ranks)}" for epoch, ranks in sorted(by_epoch.items()))
        behind = tuple(rank for epoch, ranks in by_epoch.items() if epoch != max(by_epoch) for rank in ranks)
        yield DumpFinding(
            "epochs", None, behind, f"epochs differ: {each}; ranks with a lower epoch do not know the last change"
        )


class _Communicator:
    def __init__(
        self,
        communicator: int,
        positions: Sequence[RankPosition],
        dumps: Sequence[Dump],
        ranks: Mapping[str, Rank] | None,
    ) -> None:
        """`positions`: all, oldest first. `dumps`: the last per node. `ranks`: node → rank in the world."""
        self._id = communicator
        self._ranks = ranks
        self._positions = {position.rank: position for position in positions}
        self._all_positions = positions
        self._nodes = {dump.node for dump in dumps}

    def findings(self) -> list[DumpFinding]:
        """Causes first."""
        return [*self._mismatch(), *self._stuck(), *self._without_dump(), *self._behind()]

    def _finding(self, kind: FindingKind, ranks: Sequence[Rank], text: str) -> DumpFinding:
        return DumpFinding(
            kind, self._id, tuple(ranks), text if self._ranks is not None else f"(ranks of the communicator) {text}"
        )

    def _rank_of(self, peer: DumpedPeer) -> Rank:
        return peer.rank if self._ranks is None else self._ranks[peer.node]

    # -- different calls under one number -----------------------------------------------------------------

    def _mismatch(self) -> Iterator[DumpFinding]:
        """Only the first mismatch: later ones are consequences."""
        sequences = sorted({sequence for position in self._positions.values() for sequence in position.calls})
        for sequence in sequences:
            calls = {
                rank: position.calls[sequence]
                for rank, position in self._positions.items()
                if sequence in position.calls
            }
            first = next(iter(calls.values()))
            if any(differ(call.fingerprint, first.fingerprint) for call in calls.values()):
                yield self._differing(sequence, calls)
                return

    def _differing(self, sequence: int, calls: Mapping[Rank, RecordedCall]) -> DumpFinding:
        with_algorithm = same_but_for_algorithm(call.fingerprint for call in calls.values())
        by_call: dict[str, list[Rank]] = {}
        for rank, call in calls.items():
            by_call.setdefault(Fingerprint(*call.fingerprint).describe(with_algorithm=with_algorithm), []).append(rank)
        fewest_first = sorted(by_call.items(), key=lambda each: len(each[1]))
        text = ", ".join(f"{what} on {list_ranks(ranks)}" for what, ranks in fewest_first)
        return self._finding("mismatch", fewest_first[0][1], f"#{sequence} is {text}")

    # -- stuck in a call ---------------------------------------------------------------------------------

    def _stuck(self) -> Iterator[DumpFinding]:
        stuck: dict[int, dict[Rank, RecordedCall]] = {}
        for rank, position in self._positions.items():
            call = position.stuck
            if call is not None:
                stuck.setdefault(call.sequence, {})[rank] = call
        for sequence in sorted(stuck)[:_MAX_STUCK_CALLS]:
            yield from self._stuck_in(sequence, stuck[sequence])

    def _stuck_in(self, sequence: int, waiting: Mapping[Rank, RecordedCall]) -> Iterator[DumpFinding]:
        absent = [position for position in self._positions.values() if position.begun < sequence]
        for position in absent:
            text = f"rank {position.rank} is missing: {position.history()}, {position.activity()}; {_waiting(waiting)}"
            yield self._finding("missing", [position.rank], text)
        if absent or self._missing_nodes():
            return
        late = list(self._late(sequence, waiting))
        yield from late
        gone = [
            rank for rank, position in self._positions.items() if rank not in waiting and sequence in position.calls
        ]
        if gone:
            text = f"{_waiting(waiting)}, which {list_ranks(gone)} {_have(gone)} already left"
            yield self._finding("ahead", gone, text)
        elif not late:
            yield self._stalled(waiting)

    def _late(self, sequence: int, waiting: Mapping[Rank, RecordedCall]) -> Iterator[DumpFinding]:
        came = {rank: self._positions[rank].arrived_at(sequence) for rank in waiting}
        times = {rank: when for rank, when in came.items() if when is not None}
        first = min(times.values(), default=0.0)
        late = [rank for rank, when in times.items() if when - first > _LATE_SECONDS]
        if len(late) == len(times):
            return
        for rank in late:
            call = waiting[rank]
            text = f"rank {rank} reached {call_text(call)} {format_seconds(times[rank] - first)} after the first"
            where = self._where_before(rank, sequence)
            yield self._finding("late", [rank], f"{text}; {where}" if where else text)

    def _where_before(self, rank: Rank, sequence: int) -> str:
        older = [position for position in self._all_positions if position.rank == rank and position.begun < sequence]
        return f"while the others waited: {older[-1].history()}, {older[-1].activity()}" if older else ""

    def _stalled(self, waiting: Mapping[Rank, RecordedCall]) -> DumpFinding:
        steps = {rank: call.step for rank, call in waiting.items() if call.ended_ago is None}
        fewest = [rank for rank, step in steps.items() if step == min(steps.values())]
        text = _waiting(waiting)
        if steps and len(fewest) < len(steps):
            text += f"; {list_ranks(fewest)} {_have(fewest)} done {min(steps.values())} steps of it, others up to "
            text += str(max(steps.values()))
        return self._finding(
            "stalled", fewest or list(waiting), f"all ranks have arrived and none makes progress: {text}"
        )

    # -- ranks without a dump ----------------------------------------------------------------------------

    def _missing_nodes(self) -> dict[Rank, str]:
        peers = [peer for position in self._positions.values() for peer in position.state.peers]
        return {self._rank_of(peer): peer.node for peer in peers if peer.node not in self._nodes}

    def _without_dump(self) -> Iterator[DumpFinding]:
        missing = self._missing_nodes()
        for rank in sorted(missing):
            heard = [self._last_heard(position, rank) for position in self._positions.values()]
            known = [ago for ago in heard if ago is not None]
            last = f"; last contact was {format_seconds(min(known))} before" if known else ""
            stuck = next((position.stuck for position in self._positions.values() if position.stuck is not None), None)
            waits = "" if stuck is None else f"; the others were in {call_text(stuck)}"
            yield self._finding(
                "no dump", [rank], f"rank {rank} wrote no dump: it died or never got the signal{last}{waits}"
            )
        peers = [peer for position in self._positions.values() for peer in position.state.peers]
        closed = {self._rank_of(peer) for peer in peers if peer.node in self._nodes}
        for rank in sorted(closed - set(self._positions)):
            yield self._finding(
                "closed", [rank], f"rank {rank} has closed the communicator, or has an earlier generation of it"
            )

    def _last_heard(self, position: RankPosition, rank: Rank) -> float | None:
        return next((peer.heard_ago for peer in position.state.peers if self._rank_of(peer) == rank), None)

    # -- slow ranks --------------------------------------------------------------------------------------

    def _behind(self) -> Iterator[DumpFinding]:
        if any(position.stuck for position in self._positions.values()):
            return  # the stuck call explains it
        most = max(position.begun for position in self._positions.values())
        for rank, position in self._positions.items():
            if most - position.begun >= _FAR_BEHIND_CALLS:
                text = (
                    f"rank {rank} is {most - position.begun} calls behind: {position.history()}, {position.activity()}"
                )
                yield self._finding("behind", [rank], text)


def _waiting(waiting: Mapping[Rank, RecordedCall]) -> str:
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
