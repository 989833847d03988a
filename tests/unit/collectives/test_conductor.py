from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from nexar.collectives.arena import Arena
from nexar.collectives.call import Call
from nexar.collectives.conductor import Conductor
from nexar.collectives.entry import Entry
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.journal import Journal
from nexar.collectives.operations import OperationCode
from nexar.collectives.work import Work
from nexar.errors import Cancelled, CollectiveTimeout, OperationTimeout
from nexar.group import Group
from tests.unit.collectives.posting import LOCK, Posted

REDUCE = Fingerprint(OperationCode.ALL_REDUCE, 11, 8, 0, 1)
OTHER = Fingerprint(OperationCode.BROADCAST, 11, 8, 1, 0)


class Scene:
    """A group whose waits end as `waits` says: None is well, an error is raised."""

    rank = 0

    def __init__(self, *waits: BaseException | None, arena: Any = None) -> None:
        self.local_ranks = (0, 1)
        self.waits = list(waits)
        self.said: list[Any] = []
        self.patience = self  # its journal's
        self.conductor = Conductor(cast(Group, self), cast(Journal, self), cast(Arena, arena))

    def wait(self, operations: Sequence[Any], deadline: float, alarm: Any = None, *, keep: bool = False) -> None:
        assert keep
        outcome = self.waits.pop(0)
        if outcome is not None:
            raise outcome

    def declare(self, entry: Entry) -> None:
        self.said.append("declare")

    def explain(self, late: OperationTimeout, waited: float) -> OperationTimeout:
        self.said.append("explain")
        self.waited = waited
        return late

    def hear(self, entry: Entry) -> None:
        self.said.append("hear")

    def disagree(self, sequence: int, ours: Any, rank: int, theirs: Any) -> None:
        self.said.append((sequence, rank, theirs))

    def extend(self, entry: Entry, late: OperationTimeout, timeout: float) -> float:
        self.said.append("extend")
        if self.said.count("extend") > 1:
            raise CollectiveTimeout(operation="x", sequence=0, waiting_for="y", timeout=timeout)
        return 1e9

    def perform(self, run: Any, entry: Entry | None = None) -> tuple[Any, list[Any]]:
        """Its result or error, and what its end was told."""
        told: list[Any] = []

        def end(error: BaseException | None) -> BaseException | None:
            told.append(error)
            return error

        call = None if entry is None else Call(entry, REDUCE)
        try:
            return self.conductor.perform(Work(run, call, end), 30.0), told
        except Exception as error:  # noqa: BLE001
            return error, told


def waiting(*posted: Posted) -> Any:
    for each in posted:
        yield (each,)
    return "result"


def late() -> OperationTimeout:
    return OperationTimeout(operation="x", waiting_for="y", timeout=1.0)


def entry() -> Entry:
    return Entry(LOCK, 3, REDUCE)


def test_what_is_done_is_not_waited_for() -> None:
    done = Posted()
    done.end()
    assert Scene().perform(waiting(done, done)) == ("result", [None])


def test_it_waits_for_what_is_not_done_and_gives_the_result() -> None:
    assert Scene(None).perform(waiting(Posted())) == ("result", [None])


def test_an_error_ends_it_once_and_is_raised() -> None:
    scene = Scene(ValueError("first"))
    error, told = scene.perform(waiting(Posted()))
    assert isinstance(error, ValueError)
    assert told == [error]


def test_a_call_that_was_over_before_it_began_never_runs() -> None:
    over = entry()
    with LOCK:
        over.finish(Cancelled(rank=1))
    error, told = Scene().perform(waiting(Posted()), over)
    assert isinstance(error, Cancelled)
    assert len(told) == 1


def test_who_waits_says_what_for_before_its_deadline_and_asks_at_the_deadline() -> None:
    scene = Scene(late(), late(), None)
    assert scene.perform(waiting(Posted()), entry()) == ("result", [None])
    assert scene.said == ["declare", "extend"]


def test_nobody_makes_progress_any_more() -> None:
    scene = Scene(late(), late(), late())
    error, _ = scene.perform(waiting(Posted()), entry())
    assert isinstance(error, CollectiveTimeout)


def test_what_is_no_collective_has_its_own_deadline() -> None:
    scene = Scene(late(), late())
    error, _ = scene.perform(waiting(Posted()))
    assert isinstance(error, OperationTimeout)
    assert scene.said == ["explain"], "who was waited for may say where it is"
    assert round(scene.waited) == 30, "all of it, and not only since it declared itself"


def test_who_waits_looks_what_the_others_of_its_host_have_announced() -> None:
    arena = SimpleNamespace(disagreement=lambda sequence: (1, OTHER) if sequence == 3 else None)
    scene = Scene(late(), None, arena=arena)
    scene.perform(waiting(Posted()), entry())
    assert scene.said == ["declare", (3, 1, OTHER)]


def test_a_call_that_another_gave_up_listens_why() -> None:
    scene = Scene(Cancelled(rank=1))
    error, _ = scene.perform(waiting(Posted()), entry())
    assert isinstance(error, Cancelled)
    assert scene.said == ["hear"]
