"""A peer process as its parent knows it: what it was told, what it reported, and how it ended."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from nexar.testing.child_process import ChildEnded, ChildProcess
from nexar.testing.peer_messages import Leave, Outcome, Ready, Report


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

    def order(self, order: msgspec.Struct, deadline: float) -> None:
        try:
            self.process.send(order, deadline)
        except ChildEnded:
            self.outcome(deadline)  # it said why, or this says that it is gone

    def ready(self, deadline: float) -> Ready:
        report = self._hear(deadline)
        if isinstance(report, Outcome):
            self._outcome = report
            self.result(deadline)
        assert isinstance(report, Ready)
        return report

    def outcome(self, deadline: float) -> Outcome:
        if self._outcome is None:
            report = self._hear(deadline)
            assert isinstance(report, Outcome)
            self._outcome = report
        return self._outcome

    def result(self, deadline: float) -> Any:
        outcome = self.outcome(deadline)
        if outcome.failure is not None:
            raise PeerFailed("the peer process raised:", outcome.failure, self.process.stderr())
        return outcome.result

    def _hear(self, deadline: float) -> Report:
        begin = time.monotonic()
        try:
            line = self.process.receive(deadline)
        except ChildEnded:
            raise self.failed(self.process.describe_end()) from None
        except TimeoutError:
            raise self.failed(f"did not report within {max(0.0, deadline - begin):.1f} s") from None
        report: Report = msgspec.json.decode(line, type=Report)
        return report

    def failed(self, how: str) -> PeerFailed:
        code = self.process.exit_code
        return PeerFailed(f"the peer process {self.process.pid} {how}", "", self.process.stderr(), code)

    def glance(self) -> None:
        """Raise if it has failed already."""
        if self._outcome is None and select.select([self.process], [], [], 0)[0]:
            self.result(time.monotonic() + 1)

    def known_failure(self) -> str:
        """What is to be said about it when something else went wrong; empty if it is well."""
        try:
            self.glance()
        except PeerFailed as failure:
            return str(failure)
        return ""

    def end(self, timeout: float, *, strict: bool) -> None:
        """It has ended when this returns; strict: complain if it did not do so by itself and well."""
        try:
            if self.process.exit_code is None:
                self.process.send(Leave(), time.monotonic() + timeout)
        except (ChildEnded, TimeoutError):
            self.process.signal(0)  # what became of it is found out below
        try:
            by_itself = self.process.end(0.0 if self.expendable else timeout)
            if strict and not self.expendable and (not by_itself or self.process.exit_code):
                how = self.process.describe_end() if by_itself else f"did not end within {timeout} s and was ended"
                raise self.failed(f"reported a result, but {how}")
        finally:
            self.process.forget()
