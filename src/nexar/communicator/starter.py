"""`comm.start`: a communicator's non-blocking operations."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from time import monotonic
from typing import TYPE_CHECKING, Any

from nexar.collectives.context import CollectiveContext
from nexar.collectives.requests import PendingCollective
from nexar.communicator.collective_methods import CollectiveMethods
from nexar.communicator.message_methods import MessageMethods
from nexar.communicator.multipart import Run
from nexar.communicator.request import Request
from nexar.communicator.rpc_methods import CallRequest, RpcCallMethods
from nexar.errors import NexarError, UsageError
from nexar.group import deadline_after
from nexar.links.messages import Receive
from nexar.rpc.remote_calls import RemoteCalls
from nexar.types import ANY_SOURCE, Rank

if TYPE_CHECKING:
    from nexar.communicator.successors import ErrorResolver


class Starter(MessageMethods, CollectiveMethods, RpcCallMethods):
    """Each method takes its sequence number and returns a Request at once. It blocks only to open a missing link,
    because the driver must not wait for that.
    """

    def __init__(
        self,
        context: CollectiveContext,
        seconds: Callable[[Any], float],
        resolver: ErrorResolver,
        remote_calls: RemoteCalls,
    ) -> None:
        self._resolver = resolver
        self._can_retract = True
        self._context = context
        self._group = context.group
        self._seconds_of = seconds
        self._remote_calls = remote_calls
        self._linked = False  # to all ranks; written by any thread
        self._finish: Callable[[Any], Any] | None = None  # written by finishing(), before the copy is shared

    def finishing(self, finish: Callable[[Any], Any]) -> Starter:
        """Return a Starter whose results are those of `finish(result)`. The driver calls `finish` before the request is
        done: it must not block.
        """
        other = copy(self)
        other._finish = finish
        return other

    def _seconds(self, timeout: Any) -> float:
        seconds = self._seconds_of(timeout)
        if not self._linked:
            self._open_links(deadline_after(seconds))
            self._linked = True
        return seconds

    def _open_links(self, deadline: float) -> None:
        """Only to current members: messages that former members sent need no link."""
        find, members = self._group.mesh.directory.find, enumerate(self._group.membership.members)
        try:
            self._group.open_links([rank for rank, each in members if find(each.node) is not None], deadline)
        except NexarError as error:
            raise self._resolver.resolve_error(error) from None

    def _deadline(self, timeout: Any) -> float:
        return deadline_after(self._seconds_of(timeout))

    def probe(self, source: Rank = ANY_SOURCE, tag: int | None = None, *, timeout: float | None = None) -> Any:
        """Return a Request for a MessageInfo. `timeout=0` raises UsageError."""
        if timeout == 0:
            raise UsageError(
                "start.probe(timeout=0) would time out at once; call comm.probe(timeout=0) to check without waiting"
            )
        return super().probe(source, tag, timeout=timeout)

    def _run_collective(self, work: PendingCollective, timeout: float) -> Request:
        runner = self._context.runner
        running = runner.start(work if self._finish is None else work.map_result(self._finish))
        self._group.progress.drive_in_background()
        return Request(runner, running, timeout, self._resolver)

    def _call(self, work: PendingCollective, timeout: float) -> Request:
        runner = self._context.runner
        running = runner.start(work)
        self._group.progress.drive_in_background()
        return CallRequest(runner, running, timeout, self._resolver)

    def _run_operation(self, run: Run[Any], deadline: float, taken: list[Receive] | None = None) -> Request:
        work = PendingCollective(run, None, _unchanged)
        if taken is not None:
            work.taken = taken
        return self._run_collective(work, deadline - monotonic())


def _unchanged(error: BaseException | None) -> BaseException | None:
    return error
