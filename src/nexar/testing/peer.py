"""A peer process as its parent knows it: what it was told, what it reported, and how it ended."""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import msgspec

from nexar.testing.child_process import ChildEnded, ChildProcess
from nexar.testing.peer_messages import Leave, Order, Outcome, Ready, Report

_ENDING = 10.0  # seconds it gets to close its node and end
_HURRYING = 1.0  # the same after a failure


class PeerFailed(RuntimeError):
    """The peer process raised, died, said nothing in time, or did not end.

    The text holds its traceback and its standard error.
    """

    def __init__(self, what: str, traceback: str = "", stderr: str = "", exit_code: int | None = None) -> None:
        """`what` happened, and all that is known about it."""
        parts = [what, traceback.strip(), f"its standard error:\n{stderr}" if stderr else ""]
        super().__init__("\n".join(part for part in parts if part))
        self.traceback = traceback
        self.stderr = stderr
        self.exit_code = exit_code


class Peer:
    """A peer process and the conversation with it."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        self.process = ChildProcess("nexar.testing.peer_main", prefix)
        self.expendable = False  # it was killed or stopped on purpose
        self._outcome: Outcome | None = None

    def order(self, order: Order, deadline: float) -> None:
        """Tell it something. Raises PeerFailed if it is gone."""
        try:
            self.process.send(order, deadline)
        except ChildEnded:
            self.result(deadline)  # it said why, or this says that it is gone

    def ready(self, deadline: float) -> Ready:
        """What it says once its node is made; PeerFailed if it says something else."""
        report = self._hear(deadline)
        if isinstance(report, Outcome):
            self._outcome = report
            self.result(deadline)
        assert isinstance(report, Ready)
        return report

    def result(self, deadline: float) -> Any:
        """What its function returned. PeerFailed if it raised, died or says nothing."""
        outcome = self._outcome
        if outcome is None:
            report = self._hear(deadline)
            assert isinstance(report, Outcome)
            self._outcome = outcome = report
        if outcome.failure is not None:
            raise PeerFailed("the peer process raised:", outcome.failure, self.process.stderr())
        return outcome.result

    def _hear(self, deadline: float) -> Report:
        begin = time.monotonic()
        try:
            line = self.process.receive(deadline)
        except ChildEnded:
            raise self._failed(self.process.describe_end()) from None
        except TimeoutError:
            raise self._failed(f"did not report within {max(0.0, deadline - begin):.1f} s") from None
        report: Report = msgspec.json.decode(line, type=Report)
        return report

    def _failed(self, how: str) -> PeerFailed:
        code = self.process.exit_code
        return PeerFailed(f"the peer process {self.process.pid} {how}", "", self.process.stderr(), code)

    def glance(self) -> None:
        """Raise if it has failed already."""
        if self._outcome is None and select.select([self.process], [], [], 0)[0]:
            self.result(time.monotonic() + 1)

    def part(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave it, as `__exit__` does. What went wrong there is noted on what went wrong here."""
        if error is not None and not isinstance(error, PeerFailed) and (known := self.known_failure()):
            error.add_note(f"meanwhile in the other process: {known}")
        self._end(_ENDING if error is None else _HURRYING, strict=error is None)

    def known_failure(self) -> str:
        """What is to be said about it when something else went wrong; empty if it is well."""
        try:
            self.glance()
        except PeerFailed as failure:
            return str(failure)
        return ""

    def _end(self, timeout: float, *, strict: bool) -> None:
        """It has ended when this returns; strict: complain if it did not do so by itself and well.

        Without being told to leave it takes the end of its orders for our death, and ends at once.
        """
        if self.expendable:
            self.process.signal(signal.SIGKILL)
        elif strict:
            self._tell_to_leave(timeout)
        try:
            by_itself = self.process.end(timeout)
            if strict and not self.expendable and (not by_itself or self.process.exit_code):
                how = self.process.describe_end() if by_itself else f"did not end within {timeout} s and was ended"
                raise self._failed(f"reported a result, but {how}")
        finally:
            self.process.forget()

    def _tell_to_leave(self, timeout: float) -> None:
        try:
            self.process.send(Leave(), time.monotonic() + timeout)
        except (ChildEnded, TimeoutError):
            return  # it has ended, or does not listen: `end` finds out which
