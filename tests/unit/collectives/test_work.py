import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from nexar.collectives.call import Call
from nexar.collectives.entry import Entry
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.collectives.work import Running, Work
from nexar.errors import Cancelled, PeerLost
from nexar.links.progress import Progress
from tests.unit.collectives.posting import LOCK, Posted

REDUCE = Fingerprint(OperationCode.ALL_REDUCE, 11, 8, 0, 1)


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
    """What `end` was told."""

    def __init__(self, instead: BaseException | None = None) -> None:
        self.told: list[BaseException | None] = []
        self.instead = instead

    def __call__(self, error: BaseException | None) -> BaseException | None:
        self.told.append(error)
        return self.instead or error


def start(run: Any, ends: Ends, call: Call | None = None) -> tuple[Running, Later]:
    later = Later()
    return Running(cast(Progress, later), Work(run, call, ends)), later


def waiting(*posted: Posted, result: Any = "result") -> Any:
    for each in posted:
        yield (each,)
    return result


def test_a_run_that_never_waits_is_done_when_it_is_started() -> None:
    ends = Ends()
    running, later = start(waiting(), ends)
    assert running.done
    assert running.result() == "result"
    assert ends.told == [None]
    assert not later.tasks


def test_legs_run_when_what_they_wait_for_is_done_and_by_who_drives() -> None:
    ends, posted = Ends(), [Posted(), Posted()]
    running, later = start(waiting(*posted), ends)
    posted[0].end()
    assert len(later.tasks) == 1
    later.go_on()
    assert not running.done
    assert running.awaited().rank == 7
    posted[1].end()
    later.go_on()
    assert running.result() == "result"
    assert ends.told == [None]


def test_a_leg_goes_on_at_once_over_what_is_done_already() -> None:
    done = Posted()
    done.end()
    running, _ = start(waiting(done, done), Ends())
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
    assert isinstance(ends.told[0], ValueError)


def test_an_error_of_the_run_itself_ends_it() -> None:
    def run() -> Any:
        yield ()
        raise ZeroDivisionError("of a user's function")

    running, _ = start(run(), Ends())
    with pytest.raises(ZeroDivisionError):
        running.result()


def test_what_it_commits_is_written_once_it_is_known_to_have_ended_well_and_else_never() -> None:
    written: list[str] = []

    def commit(ends: Ends, run: Any) -> Running:
        work = Work(run, None, ends).commit(lambda: written.append("done"))
        return Running(cast(Progress, Later()), work)

    ends, posted = Ends(), Posted()
    running = commit(ends, waiting(posted))
    running.cancel()
    assert written == []
    assert commit(Ends(PeerLost(rank=1, cause="gone")), waiting()).error is not None, "what `end` says counts"
    assert written == []
    assert commit(Ends(), waiting()).result() == "result"
    assert written == ["done"]


def test_what_fails_to_be_written_is_what_the_call_raises() -> None:
    running = Running(cast(Progress, Later()), Work(waiting(), None, Ends()).commit(lambda: 1 // 0))  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        running.result()


def test_cancelling_closes_the_run_and_happens_once() -> None:
    ends, posted = Ends(), Posted()
    running, later = start(waiting(posted), ends)
    running.cancel()
    running.cancel()
    with pytest.raises(Cancelled):
        running.result()
    posted.end()
    later.go_on()
    assert len(ends.told) == 1


def test_the_error_of_its_entry_ends_it_whatever_it_waits_for() -> None:
    entry = Entry(LOCK, 3, REDUCE)
    running, later = start(waiting(Posted()), Ends(), Call(entry, REDUCE))
    assert running.name == "all_reduce #3"
    with LOCK:
        entry.finish(Cancelled(rank=2))
    later.go_on()
    with pytest.raises(Cancelled):
        running.result()


def test_a_call_that_a_rank_gave_up_ends_with_the_word_of_who_was_the_first() -> None:
    """Rank 1 gave up because rank 2 did, and shared memory shows rank 1 only."""
    entry, posted, ends = Entry(LOCK, 3, REDUCE), Posted(), Ends()
    running, later = start(waiting(posted), ends, Call(entry, REDUCE))
    posted.end(Cancelled(rank=1))
    later.go_on()
    assert not running.done
    with LOCK:
        entry.finish(Cancelled(rank=2))
    later.go_on()
    assert isinstance(running.error, Cancelled)
    assert running.error.rank == 2
    assert len(ends.told) == 1


def test_a_call_that_a_rank_gave_up_can_still_be_cancelled() -> None:
    entry, posted = Entry(LOCK, 3, REDUCE), Posted()
    running, later = start(waiting(posted), Ends(), Call(entry, REDUCE))
    posted.end(Cancelled(rank=1))
    later.go_on()
    running.cancel()
    assert isinstance(running.error, Cancelled)
    assert running.error.rank is None


def test_a_call_that_was_over_before_it_began_never_runs() -> None:
    entry, ran = Entry(LOCK, 3, REDUCE), []
    with LOCK:
        entry.finish(Cancelled(rank=2))

    def run() -> Any:
        ran.append(1)
        yield ()

    running, _ = start(run(), Ends(), Call(entry, REDUCE))
    assert running.done
    assert ran == []


def test_then_makes_the_result_of_the_result() -> None:
    work = Work(waiting(result=3), None, Ends()).then(lambda found: found + 1).then(lambda found: found * 10)
    assert Running(cast(Progress, Later()), work).result() == 40


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
