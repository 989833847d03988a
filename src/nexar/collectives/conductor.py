"""Runs work: in the thread that called, or in the background; and judges, when its time is over, who is to blame."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any, Final

from nexar.collectives.arena import Arena
from nexar.collectives.entry import Entry
from nexar.collectives.journal import Journal
from nexar.collectives.work import Running, Work
from nexar.errors import Cancelled, OperationTimeout
from nexar.group import Group, deadline_after
from nexar.links.operation import Operation

DECLARE: Final = 0.2
"""Seconds after which a call that waits tells the others what it is: two ranks that wait for each other in different
calls learn of it then, not at their deadlines."""


class Conductor:
    """Of one communicator. Any thread."""

    def __init__(self, group: Group, journal: Journal, arena: Arena | None) -> None:
        self._group = group
        self._journal = journal
        self._arena = arena

    def perform(self, work: Work, timeout: float) -> Any:
        """Run it to its end in this thread. CollectiveTimeout when nobody has made progress for `timeout` seconds."""
        if work.call is not None:
            work.call.spin = True
        try:
            result = self._run(work, timeout)
        except BaseException as error:
            if isinstance(error, Cancelled) and error.rank is not None and work.alarm is not None:
                self._journal.patience.hear(work.alarm)  # who gave it up is about to say why
            final = work.finish(error) or error
            if final is error:
                raise
            raise final from None  # it says all that the first one did, and more
        difference = work.finish(None)
        if difference is not None:
            raise difference
        return result

    def _run(self, work: Work, timeout: float) -> Any:
        entry = work.alarm
        if entry is not None and entry.error is not None:
            raise entry.error  # it was over before it began
        try:
            while True:
                operations = next(work.run)
                for operation in operations:
                    if not operation.done or operation.error is not None:
                        self._wait(operations, entry, deadline_after(timeout), timeout)
                        break
        except StopIteration as stop:
            return stop.value

    def start(self, work: Work) -> Running:
        """Run it in the background."""
        return Running(self._group.progress, work)

    def wait(self, running: Running, timeout: float) -> None:
        """For its end, at most so many seconds: OperationTimeout then, and it goes on."""
        self._wait((running,), None, deadline_after(timeout), timeout, final=True)

    def attend(self, running: Running, timeout: float, *, waited: float = 0.0) -> None:
        """Wait until it is done, well or not. When nobody has made progress for `timeout` seconds, of which `waited`
        are over, that is its end: with CollectiveTimeout, of a message OperationTimeout.
        """
        try:
            self._wait((running,), None, deadline_after(max(timeout - waited, 0.0)), timeout)
        except Exception as error:  # noqa: BLE001 - if it is not the operation's yet, it is now
            running.fail(error)

    def _wait(
        self,
        operations: Sequence[Operation],
        entry: Entry | None,
        deadline: float,
        timeout: float,
        *,
        final: bool = False,
    ) -> None:
        """`final`: the deadline is the last, whoever makes progress. `entry`: of the call that these are part of."""
        early = min(deadline, monotonic() + DECLARE)
        while True:
            try:
                self._group.wait(operations, early, entry, keep=True)
            except OperationTimeout as late:
                call = entry or _entry_of(operations)
                if call is not None and call.error is not None:
                    raise  # not late: over
                if early < deadline:
                    early = deadline
                    if call is not None:
                        call.awaits = operations
                    self.declare(call)
                elif final or call is None:
                    raise self._journal.patience.explain(late, timeout) from None
                else:
                    call.moved_at = max([call.moved_at, *(each.last_moved() for each in operations)])
                    early = deadline = self._journal.patience.extend(call, late, timeout)
            else:
                return

    def declare(self, entry: Entry | None) -> None:
        """What this rank does, to those on other ways; and look what those of this host have written down. Nothing of
        what is no collective. Never blocks.
        """
        if entry is None:
            return
        self._journal.patience.declare(entry)
        found = None if self._arena is None else self._arena.disagreement(entry.sequence)
        if found is not None:
            self._journal.disagree(entry.sequence, entry.fingerprint, self._group.local_ranks[found[0]], found[1])


def _entry_of(operations: Sequence[Operation]) -> Entry | None:
    """Of the first call that is waited for."""
    running = (each for each in operations if isinstance(each, Running) and not each.done)
    return next((each.entry for each in running), None)
