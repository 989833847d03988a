"""Starts the ranks of this host, passes their output on, watches them and ends with them.

One loop in the main thread waits for everything at once: output, ends, signals, and the moment when asking turns into
killing. Whatever way it is left, every process it started has ended and was reaped.
"""

import selectors
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from nexar.launch.escalation import GRACE, Escalation
from nexar.launch.guard import Guard
from nexar.launch.lines import blames_another, last_traceback
from nexar.launch.output import STREAMS, Console, Stream
from nexar.launch.plan import RankPlan
from nexar.launch.process import RankProcess
from nexar.launch.signals import STOPPING, SignalInbox
from nexar.launch.verdict import Ending, Verdict, judge
from nexar.types import Rank

Report: TypeAlias = Callable[[Rank, str], None]
"""Tells the cluster of the end of a rank: which, and how. It does not raise when nobody can be told: the members notice
the death by themselves."""

_CAUSE_CHARACTERS = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user wants of a run, besides the ranks."""

    shown: frozenset[int]
    """Local ranks whose output goes to the console."""
    log_dir: Path | None = None
    tee: bool = False
    """With `log_dir`: also to the console."""
    abort: bool = False
    """The end of a rank that did not end well ends all."""
    grace: float = GRACE

    def shows(self, plan: RankPlan) -> bool:
        """Whether the console gets what this rank writes."""
        return plan.local_rank in self.shown and (self.log_dir is None or self.tee)


class Supervisor:
    """One run. `run` may be called once, in the main thread."""

    def __init__(
        self, plans: Sequence[RankPlan], wishes: Wishes, *, console: Console, report: Report, mark: str
    ) -> None:
        self._plans, self._wishes, self._console, self._report, self._mark = plans, wishes, console, report, mark
        self._running: dict[int, RankProcess] = {}
        self._endings: list[Ending] = []
        self._errors: dict[Rank, str] = {}
        self._escalation = Escalation(wishes.grace)
        self._interrupted: int | None = None
        self._aborted = False

    def run(self) -> Verdict:
        """Start all, wait for all. UsageError if a rank cannot be started; then none is left."""
        with ExitStack() as stack:
            self._signals = stack.enter_context(SignalInbox())
            self._guard = stack.enter_context(Guard(self._mark))
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._selector.register(self._signals, selectors.EVENT_READ)
            stack.callback(self._end_all)
            for plan in self._plans:
                self._start(plan)
            while self._running:
                self._turn()
        return judge(self._endings, interrupted=self._interrupted, aborted=self._aborted)

    def errors_of(self, rank: Rank) -> str:
        """The traceback, or the last lines, that a rank wrote to standard error before it ended."""
        return self._errors[rank]

    # -- one turn of the loop

    def _turn(self) -> None:
        now = time.monotonic()
        for key, _ in self._selector.select(self._escalation.due(now)):
            if key.fileobj is not self._signals:
                process, stream = key.data
                self._read(process, stream)
        signals = self._signals.take()
        for number in signals:
            if number in STOPPING:
                self._interrupted = self._interrupted or number
                self._stop(number)
        if signal.SIGCHLD in signals:
            self._reap_all()
        if self._console.gone and not self._escalation.asked:
            self._interrupted = signal.SIGPIPE
            self._stop(signal.SIGTERM)
        overdue = self._escalation.tick(time.monotonic())
        if overdue is not None:
            self._send(overdue)

    def _read(self, process: RankProcess, stream: Stream) -> None:
        if process.read(stream) == b"":
            self._selector.unregister(process.pipes[stream])

    def _start(self, plan: RankPlan) -> None:
        console = self._console if self._wishes.shows(plan) else None
        process = RankProcess(plan, console, self._wishes.log_dir)
        self._running[process.pid] = process
        self._guard.watch(process.pid)
        for stream in STREAMS:
            self._selector.register(process.pipes[stream], selectors.EVENT_READ, (process, stream))

    # -- ends

    def _reap_all(self) -> None:
        ended = [process for process in self._running.values() if process.reap(self._guard.forget)]
        for process in ended:
            del self._running[process.pid]
            self._bury(process)

    def _bury(self, process: RankProcess) -> None:
        """Its last words, its end on record, and the news to those who have to know."""
        process.drain()
        self._close(process)
        assert process.returncode is not None
        errors = last_traceback(process.outputs["stderr"].tail())
        ending = Ending(
            process.plan.rank,
            process.returncode,
            stopped=self._escalation.asked,
            blames_another=blames_another(errors),
        )
        self._endings.append(ending)
        self._errors[ending.rank] = errors
        self._tell(ending)
        if self._wishes.abort and ending.code != 0 and not self._escalation.asked:
            self._aborted = True
            self._stop(signal.SIGTERM)

    def _tell(self, ending: Ending) -> None:
        """Tell the cluster of a death. A rank that ended well has left the cluster itself."""
        if ending.code == 0:
            return
        details = self._errors[ending.rank][-_CAUSE_CHARACTERS:] if ending.code > 0 else ""
        self._report(ending.rank, f"{ending}\n{details}".rstrip())

    def _close(self, process: RankProcess) -> None:
        registered = self._selector.get_map()
        for pipe in process.pipes.values():
            if pipe in registered:
                self._selector.unregister(pipe)
        process.close()

    # -- stopping

    def _stop(self, number: int) -> None:
        self._send(self._escalation.ask(number, time.monotonic()))

    def _send(self, number: int) -> None:
        for process in self._running.values():
            process.signal(number)

    def _end_all(self) -> None:
        """For a run that is left by an error: nobody stays."""
        self._send(signal.SIGKILL)
        for process in self._running.values():
            while not process.reap(self._guard.forget):
                time.sleep(0.001)  # a killed process ends as soon as the kernel gets to it
            self._close(process)
        self._running.clear()
