"""Runs the ranks of this host, in one loop in the main thread.

However the loop is left, all its processes have ended and were reaped. If the launcher is killed, the kernel closes
its pipes, and the guard process, which imports no nexar module, ends the ranks.
"""

from __future__ import annotations

import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self, TypeAlias

from nexar.errors import UsageError
from nexar.launch.event_sources import CONTINUE_SIGNAL, DUMP_SIGNAL, STOP_SIGNALS, Mailbox, SignalInbox
from nexar.launch.exit_report import ExitReport
from nexar.launch.output import STREAMS, Console, Stream
from nexar.launch.output_lines import TRACEBACK_SECONDS, exception_name, last_traceback
from nexar.launch.plan import RankPlan
from nexar.launch.process import RankProcess, StandardInput
from nexar.launch.run_result import FailureReport, LaunchResult, RankExit, run_result, signal_name
from nexar.launch.stop_policy import GRACE, Escalation, RankFailure, ReportFailure, StopAction, StopPolicy

if TYPE_CHECKING:
    from nexar.cluster.seed_session import LauncherSession  # at run time it would delay the command

_SCRIPT = Path(__file__).with_name("guard_main.py")
_GUARD_END_TIMEOUT = 5.0


class Guard:
    """Tells the guard process which process groups to end."""

    def __init__(self, mark: str) -> None:
        command = [sys.executable, "-I", "-S", "-E", str(_SCRIPT), mark]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # signals to this process's group or terminal do not end the guard
            )
        except OSError as error:
            raise UsageError(
                f"cannot start the guard process for the ranks ({error.strerror or error}); "
                "see the limits of this shell with `ulimit -a`, and raise the one that is too low"
            ) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, group: int) -> None:
        """Call `forget` before the group's leader is reaped."""
        self._send_line(f"+{group}\n")

    def forget(self, group: int) -> None:
        """The group's id may be reused from now on."""
        self._send_line(f"-{group}\n")

    def close(self) -> None:
        """Waits for the guard. Idempotent."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._send_line("bye\n")
            self._process.stdin.close()
        try:
            self._process.wait(_GUARD_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send_line(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
        except BrokenPipeError:
            return  # the guard was killed; the ranks lose only this protection

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


OnFailure: TypeAlias = Literal["stop", "continue"]
"""What the failure of one rank means for the others."""
_CAUSE_CHARACTERS: Final = 3000
_RAISED_SECONDS: Final = TRACEBACK_SECONDS / 2
"""How long a rank that raised has to end before it counts as failed. Its traceback is still held then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorOptions:
    """The user's options, besides the ranks."""

    shown: frozenset[int]
    """Local ranks whose output goes to the console."""
    log_dir: Path | None = None
    tee: bool = False
    """With `log_dir`: also to the console."""
    on_failure: OnFailure | None = None
    """None: continue if the cluster is elastic, else stop."""
    max_restarts: int = 0
    """How many restarts of failed ranks are allowed, in all."""
    grace: float = GRACE

    def shows(self, plan: RankPlan) -> bool:
        return plan.local_rank in self.shown and (self.log_dir is None or self.tee)


class Supervisor:
    """`run` may be called once, in the main thread."""

    def __init__(
        self,
        plans: Sequence[RankPlan],
        options: SupervisorOptions,
        *,
        console: Console,
        cluster: LauncherSession,
        mark: str,
        failures: Mailbox[RankFailure],
        alone: bool,
        stops: bool,
    ) -> None:
        """`failures`: chosen by the seed. `alone`: no other launcher. `stops`: the first failure stops the run."""
        self._plans, self._options, self._console, self._cluster, self._mark = plans, options, console, cluster, mark
        self._failures, self._stops_run, self._alone = failures, stops, alone
        self._policy = StopPolicy(alone=alone, grace=options.grace)
        self._report = FailureReport(console)
        self._running: dict[int, RankProcess] = {}
        self._exits: list[RankExit] = []
        self._errors: dict[str, str] = {}
        self._restarts = 0
        self._escalation = Escalation(options.grace)
        self._interrupted: int | None = None

    def run(self) -> LaunchResult:
        """UsageError if a rank cannot be started; then none is left."""
        with ExitStack() as stack:
            self._signals = stack.enter_context(SignalInbox())
            self._guard = stack.enter_context(Guard(self._mark))
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._input = stack.enter_context(StandardInput(self._selector))
            self._selector.register(self._signals, selectors.EVENT_READ)
            self._selector.register(self._failures, selectors.EVENT_READ)
            stack.callback(self._end_all)
            for plan in self._plans:
                self._start(plan)
            while self._running or not self._policy.is_settled(time.monotonic()):
                self._iterate()
        self._perform(self._policy.finish())
        culprit = self._policy.culprit
        return run_result(self._exits, interrupted=self._interrupted) if culprit is None else LaunchResult(culprit.code)

    def errors_of(self, ending: RankExit) -> str:
        return self._errors[ending.who]

    # -- one iteration of the loop

    def _iterate(self) -> None:
        for key, _ in self._selector.select(self._due(time.monotonic())):
            if key.data is not None:
                key.data()
        self._follow_signals()
        if self._console.gone and not self._escalation.asked:
            self._interrupted = signal.SIGPIPE
            self._stop_other_hosts("nobody reads its launcher's output", signal.SIGPIPE)
            self._stop(signal.SIGTERM)
        for failure in self._failures.take():
            if self._stops_run and self._interrupted is None:
                self._perform(self._policy.chosen(failure, time.monotonic()))
        self._tick(time.monotonic())

    def _follow_signals(self) -> None:
        signals = self._signals.take()
        for number in signals:
            if number in STOP_SIGNALS:
                self._interrupt(number)
        if CONTINUE_SIGNAL in signals:
            self._input.resume()
        if DUMP_SIGNAL in signals:
            self._request_dumps()
        if signal.SIGCHLD in signals:
            self._reap_all()

    @property
    def _stops(self) -> bool:
        """Ranks that end when asked have not failed."""
        return self._stops_run and not self._escalation.asked

    @property
    def _ends(self) -> bool:
        """Then tracebacks are held until the ranks have ended."""
        return self._escalation.asked or self._policy.culprit is not None

    def _due(self, now: float) -> float | None:
        shown = () if self._ends else (process.outputs["stderr"].due for process in self._running.values())
        early = (process.raised_at + _RAISED_SECONDS for process in self._raised())
        waits = (max(0.0, at - now) for at in (*shown, *early) if at)
        times = [self._escalation.due(now), self._policy.due(now), *waits]
        return min((each for each in times if each is not None), default=None)

    def _tick(self, now: float) -> None:
        for process in self._raised(until=now - _RAISED_SECONDS):
            self._fail_early(process)
        if not self._ends:
            for output in (process.outputs["stderr"] for process in self._running.values()):
                if output.due is not None and output.due <= now:
                    output.release()
        self._perform(self._policy.tick(now))
        overdue = self._escalation.tick(now)
        if overdue is not None:
            self._send(overdue)

    def _perform(self, actions: Sequence[StopAction]) -> None:
        for action in actions:
            if isinstance(action, ReportFailure):
                self._report.report(action.failure)
            elif self._running and not self._escalation.asked:
                names = [process.plan.name for process in self._running.values()]
                self._report.stopping(names, self._options.grace)
                self._stop(signal.SIGTERM)

    def _read(self, process: RankProcess, stream: Stream) -> None:
        if process.read(stream) == b"":
            self._selector.unregister(process.pipes[stream])

    def _start(self, plan: RankPlan) -> None:
        console = self._console if self._options.shows(plan) else None
        process = RankProcess(plan, console, self._options.log_dir, self._input.descriptor_for(plan))
        self._running[process.pid] = process
        self._guard.watch(process.pid)
        for stream in STREAMS:
            self._selector.register(process.pipes[stream], selectors.EVENT_READ, partial(self._read, process, stream))
        self._selector.register(
            process.exit_pipe.fileno(), selectors.EVENT_READ, partial(self._read_exit_report, process)
        )

    def _read_exit_report(self, process: RankProcess) -> None:
        """Later reports are read when the rank is reaped."""
        self._selector.unregister(process.exit_pipe.fileno())
        report = process.exit_report()
        if report.exception:
            process.drain()
            process.outputs["stderr"].hold_longer(GRACE)
        if report.exception and report.origin == "own":
            process.raised_at = time.monotonic()

    def _raised(self, *, until: float = inf) -> list[RankProcess]:
        """Running ranks that reported an exception by `until` and have not failed yet. None if ranks are restarted,
        which must end first.
        """
        if not self._stops or self._options.max_restarts:
            return []
        waiting = (each for each in self._running.values() if not each.failed and each.raised_at < inf)
        return [each for each in waiting if each.raised_at <= until]

    # -- ends

    def _reap_all(self) -> None:
        ended = [process for process in self._running.values() if process.reap(self._guard.forget)]
        for process in ended:
            del self._running[process.pid]
            self._record_exit(process)

    def _record_exit(self, process: RankProcess) -> None:
        process.drain()
        output = process.outputs["stderr"]
        errors, held, report = last_traceback(output.tail()), output.take_held(), process.exit_report()
        replacement = self._replacement(process)
        ending = self._exit_of(process, report, replaced=replacement is not None)
        self._exits.append(ending)
        self._errors[ending.who] = errors
        if ending.code != 0 and replacement is None and self._stops and not process.failed:
            for first in self._raised(until=process.raised_at):
                self._fail_early(first)
            self._fail(process, str(ending), ending.exit_code, held)
        elif not (ending.stopped and (ending.interrupted or ending.blames_another)):
            output.show(held)
        self._close(process)
        self._report_exit(process.plan, ending, replacement)
        if replacement is not None:
            self._start_again(ending, replacement)

    def _fail_early(self, process: RankProcess) -> None:
        """A thread or exit handler may keep the process running forever."""
        process.drain()
        self._fail(process, f"raised {process.exit_report().exception}", 1, process.outputs["stderr"].take_held())

    def _fail(self, process: RankProcess, cause: str, code: int, held: list[bytes]) -> None:
        """The report shows its traceback once, or never if another failure caused it."""
        process.failed = True
        plan, output, report = process.plan, process.outputs["stderr"], process.exit_report()
        known = self._policy.culprit is not None and not self._policy.culprit.consequence
        consequence = report.origin == "consequence" or (known and report.origin == "perhaps_consequence")
        errors = last_traceback(output.tail())
        failure = RankFailure(plan.rank, plan.name, cause, code, consequence)
        if known and not consequence:
            output.show(held)
            held = []
        text = b"".join(held).decode(errors="replace") if output.is_shown else errors
        self._report.keep(failure, text, report.exception or exception_name(errors))
        if failure.rank is not None:
            self._cluster.report_failure(failure.rank, failure.cause, failure.code, consequence=failure.consequence)
        self._perform(self._policy.failed(failure, time.monotonic()))

    def _exit_of(self, process: RankProcess, report: ExitReport, *, replaced: bool) -> RankExit:
        assert process.returncode is not None
        plan = process.plan
        return RankExit(
            plan.local_rank if plan.rank is None else plan.rank,
            process.returncode,
            stopped=self._escalation.asked,
            blames_another=report.origin == "consequence",
            interrupted=report.origin == "interrupted" or process.returncode == -signal.SIGINT,
            name=plan.name,
            replaced=replaced,
            given_up=not replaced and 0 < self._options.max_restarts <= self._restarts,
            came_too_late=plan.restart > 0 and report.origin == "too_late",
        )

    def _replacement(self, process: RankProcess) -> RankPlan | None:
        """A joiner needs a running member to admit it."""
        no_restart = process.returncode == 0 or self._escalation.asked
        if no_restart or self._restarts >= self._options.max_restarts:
            return None
        formed = self._cluster.formed
        return process.plan.replacement_plan(as_joiner=formed) if self._running or not formed else None

    def _start_again(self, ending: RankExit, plan: RankPlan) -> None:
        self._restarts += 1
        how = f"restart {self._restarts} of {self._options.max_restarts}"
        self._console.write("stderr", f"nexar: {ending.who} {ending}; started again, {how}\n".encode())
        self._start(plan)

    def _report_exit(self, plan: RankPlan, ending: RankExit, replacement: RankPlan | None) -> None:
        """A rank restarted before formation is not missed; a late joiner's rank is unknown here; a user who stops a
        run on one host ends every rank.
        """
        awaited = replacement is not None and not self._cluster.formed
        stopped_by_user = self._alone and self._interrupted is not None
        if awaited or stopped_by_user or plan.rank is None or plan.joins:
            return
        details = self._errors[ending.who][-_CAUSE_CHARACTERS:] if ending.code > 0 else ""
        self._cluster.report(plan.rank, f"{ending}\n{details}".rstrip(), well=ending.code == 0)

    def _close(self, process: RankProcess) -> None:
        registered = self._selector.get_map()
        for pipe in (*process.pipes.values(), process.exit_pipe.fileno()):
            if pipe in registered:
                self._selector.unregister(pipe)
        process.close()

    # -- flight recorder dumps

    def _request_dumps(self) -> None:
        """The signal would kill a rank without a handler."""
        asked = [process.plan.name for process in self._running.values() if process.ask(DUMP_SIGNAL)]
        text = f"sent {DUMP_SIGNAL.name} to {', '.join(asked) or 'no rank'} for a dump of the flight recorder"
        self._console.write("stderr", f"nexar: {text}; ranks handle it once they have called nexar.init()\n".encode())

    # -- stopping

    def _interrupt(self, number: int) -> None:
        if self._interrupted is None:
            self._interrupted = number
            self._report.interrupted(signal_name(number), self._options.grace)
            self._stop_other_hosts(f"its launcher got {signal_name(number)}", number)
        self._stop(number)

    def _stop_other_hosts(self, why: str, number: int) -> None:
        """Their ranks would miss this host's."""
        ranks = [process.plan.rank for process in self._running.values() if process.plan.rank is not None]
        if self._stops and not self._alone and ranks:
            self._cluster.report_failure(ranks[0], f"was stopped: {why}", 128 + number, consequence=False)

    def _stop(self, number: int) -> None:
        self._send(self._escalation.ask(number, time.monotonic()))

    def _send(self, number: int) -> None:
        for process in self._running.values():
            process.signal(number)

    def _end_all(self) -> None:
        self._send(signal.SIGKILL)
        for process in self._running.values():
            while not process.reap(self._guard.forget):
                time.sleep(0.001)  # a killed process ends as soon as the kernel schedules it
            self._close(process)
        self._running.clear()
