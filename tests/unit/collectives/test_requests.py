import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nexar.collectives.call import Call, RegionCall
from nexar.collectives.call_log import CallLog
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.collectives.requests import BackgroundCall, CallRunner, PendingCollective
from nexar.collectives.shared_region import SharedRegion
from nexar.errors import Cancelled, CollectiveTimeout, OperationTimeout, PeerLost
from nexar.group import Group
from nexar.links.progress import Progress
from tests.unit.collectives.posting import LOCK, Posted

REDUCE = Fingerprint(OperationCode.ALL_REDUCE, 11, 8, 0, 1)
OTHER = Fingerprint(OperationCode.BROADCAST, 11, 8, 1, 0)


class Scene:
    """A group whose waits end as `waits` says: None is well, an error is raised."""

    rank = 0

    def __init__(self, *waits: BaseException | None, region: Any = None) -> None:
        self.local_ranks = (0, 1)
        self.waits = list(waits)
        self.said: list[Any] = []
        self.progress_inquiry = self  # its call log's
        self.runner = CallRunner(cast(Group, self), cast(CallLog, self), cast(SharedRegion, region))

    def wait(self, operations: Sequence[Any], deadline: float, abort_signal: Any = None, *, keep: bool = False) -> None:
        assert keep
        outcome = self.waits.pop(0)
        if outcome is not None:
            raise outcome

    def declare(self, entry: Call) -> None:
        self.said.append("declare")

    def explain(self, late: OperationTimeout, waited: float) -> OperationTimeout:
        self.said.append("explain")
        self.waited = waited
        return late

    def await_notice(self, entry: Call) -> None:
        self.said.append("hear")

    def report_mismatch(self, sequence: int, ours: Any, rank: int, theirs: Any) -> None:
        self.said.append((sequence, rank, theirs))

    def extend(self, entry: Call, late: OperationTimeout, timeout: float) -> float:
        self.said.append("extend")
        if self.said.count("extend") > 1:
            raise CollectiveTimeout(operation="x", sequence=0, waiting_for="y", timeout=timeout)
        return 1e9

    def run_blocking(self, run: Any, entry: Call | None = None) -> tuple[Any, list[Any]]:
        """Its result or error, and the arguments of its end."""
        reported: list[Any] = []

        def end(error: BaseException | None) -> BaseException | None:
            reported.append(error)
            return error

        call = None if entry is None else RegionCall(entry, REDUCE)
        try:
            return self.runner.run_blocking(PendingCollective(run, call, end), 30.0), reported
        except Exception as error:  # noqa: BLE001
            return error, reported


def waiting(*posted: Posted) -> Any:
    for each in posted:
        yield (each,)
    return "result"


def late() -> OperationTimeout:
    return OperationTimeout(operation="x", waiting_for="y", timeout=1.0)


def entry() -> Call:
    return Call(LOCK, 3, REDUCE)


def test_what_is_done_is_not_waited_for() -> None:
    done = Posted()
    done.end()
    assert Scene().run_blocking(waiting(done, done)) == ("result", [None])


def test_it_waits_for_what_is_not_done_and_gives_the_result() -> None:
    assert Scene(None).run_blocking(waiting(Posted())) == ("result", [None])


def test_an_error_ends_it_once_and_is_raised() -> None:
    scene = Scene(ValueError("first"))
    error, reported = scene.run_blocking(waiting(Posted()))
    assert isinstance(error, ValueError)
    assert reported == [error]


def test_a_call_that_was_over_before_it_began_never_runs() -> None:
    over = entry()
    with LOCK:
        over.finish(Cancelled(rank=1))
    error, reported = Scene().run_blocking(waiting(Posted()), over)
    assert isinstance(error, Cancelled)
    assert len(reported) == 1


def test_who_waits_says_what_for_before_its_deadline_and_asks_at_the_deadline() -> None:
    scene = Scene(late(), late(), None)
    assert scene.run_blocking(waiting(Posted()), entry()) == ("result", [None])
    assert scene.said == ["declare", "extend"]


def test_nobody_makes_progress_any_more() -> None:
    scene = Scene(late(), late(), late())
    error, _ = scene.run_blocking(waiting(Posted()), entry())
    assert isinstance(error, CollectiveTimeout)


def test_what_is_no_collective_has_its_own_deadline() -> None:
    scene = Scene(late(), late())
    error, _ = scene.run_blocking(waiting(Posted()))
    assert isinstance(error, OperationTimeout)
    assert scene.said == ["explain"], "who was waited for may say where it is"
    assert round(scene.waited) == 30, "all of it, and not only since it declared itself"


def test_who_waits_looks_what_the_others_of_its_host_have_announced() -> None:
    region = SimpleNamespace(disagreement=lambda sequence: (1, OTHER) if sequence == 3 else None)
    scene = Scene(late(), None, region=region)
    scene.run_blocking(waiting(Posted()), entry())
    assert scene.said == ["declare", (3, 1, OTHER)]


def test_a_call_that_another_gave_up_listens_why() -> None:
    scene = Scene(Cancelled(rank=1))
    error, _ = scene.run_blocking(waiting(Posted()), entry())
    assert isinstance(error, Cancelled)
    assert scene.said == ["hear"]


class Later:
    """Runs nothing by itself."""

    lock = LOCK

    def __init__(self) -> None:
        self.tasks: list[Callable[[], None]] = []

    def run_soon(self, task: Callable[[], None]) -> None:
        self.tasks.append(task)

    def rouse(self) -> None:
        """Nobody sleeps."""

    def go_on(self) -> None:
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            task()


class Ends:
    """The arguments of `end`."""

    def __init__(self, instead: BaseException | None = None) -> None:
        self.reported: list[BaseException | None] = []
        self.instead = instead

    def __call__(self, error: BaseException | None) -> BaseException | None:
        self.reported.append(error)
        return self.instead or error


def start(run: Any, ends: Ends, call: RegionCall | None = None) -> tuple[BackgroundCall, Later]:
    later = Later()
    return BackgroundCall(cast(Progress, later), PendingCollective(run, call, ends)), later


def waiting_work(*posted: Posted, result: Any = "result") -> Any:
    for each in posted:
        yield (each,)
    return result


def test_a_run_that_never_waits_is_done_when_it_is_started() -> None:
    ends = Ends()
    running, later = start(waiting_work(), ends)
    assert running.done
    assert running.result() == "result"
    assert ends.reported == [None]
    assert not later.tasks


def test_legs_run_when_what_they_wait_for_is_done_and_by_who_drives() -> None:
    ends, posted = Ends(), [Posted(), Posted()]
    running, later = start(waiting_work(*posted), ends)
    posted[0].end()
    assert len(later.tasks) == 1
    later.go_on()
    assert not running.done
    assert running.awaited().rank == 7
    posted[1].end()
    later.go_on()
    assert running.result() == "result"
    assert ends.reported == [None]


def test_a_leg_goes_on_at_once_over_what_is_done_already() -> None:
    done = Posted()
    done.end()
    running, _ = start(waiting_work(done, done), Ends())
    assert running.done


def test_the_first_failure_ends_it_and_what_end_returns_is_raised() -> None:
    lost = PeerLost(rank=1, cause="gone")
    posted, ends = [Posted(), Posted()], Ends(lost)
    closed = []

    def run() -> Any:
        try:
            yield posted
        finally:
            closed.append(1)

    running, later = start(run(), ends)
    posted[1].end(ValueError("first"))
    later.go_on()
    with pytest.raises(PeerLost):
        running.result()
    assert closed == [1]
    assert isinstance(ends.reported[0], ValueError)


def test_an_error_of_the_run_itself_ends_it() -> None:
    def run() -> Any:
        yield ()
        raise ZeroDivisionError("of a user's function")

    running, _ = start(run(), Ends())
    with pytest.raises(ZeroDivisionError):
        running.result()


def test_what_it_commits_is_written_once_it_is_known_to_have_ended_well_and_else_never() -> None:
    written: list[str] = []

    def commit(ends: Ends, run: Any) -> BackgroundCall:
        work = PendingCollective(run, None, ends).commit(lambda: written.append("done"))
        return BackgroundCall(cast(Progress, Later()), work)

    ends, posted = Ends(), Posted()
    running = commit(ends, waiting_work(posted))
    running.cancel()
    assert written == []
    assert commit(Ends(PeerLost(rank=1, cause="gone")), waiting_work()).error is not None, "what `end` says counts"
    assert written == []
    assert commit(Ends(), waiting_work()).result() == "result"
    assert written == ["done"]


def test_what_fails_to_be_written_is_what_the_call_raises() -> None:
    running = BackgroundCall(
        cast(Progress, Later()), PendingCollective(waiting_work(), None, Ends()).commit(lambda: 1 // 0)
    )  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        running.result()


def test_cancelling_closes_the_run_and_happens_once() -> None:
    ends, posted = Ends(), Posted()
    running, later = start(waiting_work(posted), ends)
    running.cancel()
    running.cancel()
    with pytest.raises(Cancelled):
        running.result()
    posted.end()
    later.go_on()
    assert len(ends.reported) == 1


def test_the_error_of_its_entry_ends_it_whatever_it_waits_for() -> None:
    entry = Call(LOCK, 3, REDUCE)
    running, later = start(waiting_work(Posted()), Ends(), RegionCall(entry, REDUCE))
    assert running.name == "all_reduce #3"
    with LOCK:
        entry.finish(Cancelled(rank=2))
    later.go_on()
    with pytest.raises(Cancelled):
        running.result()


def test_a_call_that_a_rank_gave_up_ends_with_the_reason_of_the_first_rank() -> None:
    """Rank 1 gave up because rank 2 did, and shared memory shows rank 1 only."""
    entry, posted, ends = Call(LOCK, 3, REDUCE), Posted(), Ends()
    running, later = start(waiting_work(posted), ends, RegionCall(entry, REDUCE))
    posted.end(Cancelled(rank=1))
    later.go_on()
    assert not running.done
    with LOCK:
        entry.finish(Cancelled(rank=2))
    later.go_on()
    assert isinstance(running.error, Cancelled)
    assert running.error.rank == 2
    assert len(ends.reported) == 1


def test_a_call_that_a_rank_gave_up_can_still_be_cancelled() -> None:
    entry, posted = Call(LOCK, 3, REDUCE), Posted()
    running, later = start(waiting_work(posted), Ends(), RegionCall(entry, REDUCE))
    posted.end(Cancelled(rank=1))
    later.go_on()
    running.cancel()
    assert isinstance(running.error, Cancelled)
    assert running.error.rank is None


def test_work_of_a_call_that_ended_before_it_began_never_runs() -> None:
    entry, ran = Call(LOCK, 3, REDUCE), []
    with LOCK:
        entry.finish(Cancelled(rank=2))

    def run() -> Any:
        ran.append(1)
        yield ()

    running, _ = start(run(), Ends(), RegionCall(entry, REDUCE))
    assert running.done
    assert ran == []


def test_then_makes_the_result_of_the_result() -> None:
    work = (
        PendingCollective(waiting_work(result=3), None, Ends())
        .map_result(lambda found: found + 1)
        .map_result(lambda found: found * 10)
    )
    assert BackgroundCall(cast(Progress, Later()), work).result() == 40


def test_legs_are_never_run_by_two_threads_at_once() -> None:
    """Here a leg is cancelled while it runs: that waits for the leg to end."""
    begun, go = threading.Event(), threading.Event()
    gate = Posted()

    def run() -> Any:
        yield (gate,)
        begun.set()
        assert go.wait(20)
        yield (Posted(),)

    running, later = start(run(), Ends())
    gate.end()
    leg = threading.Thread(target=later.go_on)
    leg.start()
    assert begun.wait(20)
    cancelling = threading.Thread(target=running.cancel)
    cancelling.start()
    assert not running.done
    go.set()
    leg.join(20)
    cancelling.join(20)
    assert isinstance(running.error, Cancelled)
