"""Every verb once more, started instead of waited for: `comm.start.all_reduce(x)` gives a Request."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from time import monotonic
from typing import Any

from nexar.collectives.context import CollectiveContext
from nexar.collectives.requests import PendingCollective
from nexar.communicator.collective_methods import CollectiveMethods
from nexar.communicator.message_methods import MessageMethods
from nexar.communicator.multipart import Run
from nexar.communicator.request import ErrorResolver, Request
from nexar.communicator.rpc_methods import CallRequest, RpcCallMethods
from nexar.errors import NexarError, UsageError
from nexar.group import deadline_after
from nexar.links.messages import Receive
from nexar.rpc.remote_calls import RemoteCalls
from nexar.types import ANY_SOURCE, Rank


class Starter(MessageMethods, CollectiveMethods, RpcCallMethods):
    """The verbs of a communicator: each takes its number now, and returns a Request at once.

    Only a link that is not open yet is waited for: what runs in the background must not have to.
    """

    def __init__(
        self,
        context: CollectiveContext,
        seconds: Callable[[Any], float],
        judge: ErrorResolver,
        remote_calls: RemoteCalls,
    ) -> None:
        """`seconds(timeout)` checks a timeout, and that the communicator is open; `judge`: see Request."""
        self._judge = judge
        self._can_retract = True
        self._context = context
        self._group = context.group
        self._seconds_of = seconds
        self._remote_calls = remote_calls
        self._linked = False  # to all ranks; any thread writes it, once they are
        self._finish: Callable[[Any], Any] | None = None  # see finishing(); written before anybody else has it

    def finishing(self, finish: Callable[[Any], Any]) -> Starter:
        """The same verbs, whose requests end with `finish(result)`, which gives their result. It is run by whoever
        drives the node, before the request is done: it must not block.
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
        """To those who are still there: what others have sent before they left needs none."""
        find, members = self._group.mesh.directory.find, enumerate(self._group.membership.members)
        try:
            self._group.open_links([rank for rank, each in members if find(each.node) is not None], deadline)
        except NexarError as error:
            raise self._judge.judge(error) from None

    def _deadline(self, timeout: Any) -> float:
        return deadline_after(self._seconds_of(timeout))

    def probe(self, source: Rank = ANY_SOURCE, tag: int | None = None, *, timeout: float | None = None) -> Any:
        """A Request for what probe tells; it waits for such a message, and cannot only look."""
        if timeout == 0:
            raise UsageError("start.probe(timeout=0) would give up at once; to only look, call comm.probe(timeout=0)")
        return super().probe(source, tag, timeout=timeout)

    def _conduct(self, work: PendingCollective, timeout: float) -> Request:
        runner = self._context.runner
        running = runner.start(work if self._finish is None else work.map_result(self._finish))
        self._group.progress.drive_in_background()
        return Request(runner, running, timeout, self._judge)

    def _call(self, work: PendingCollective, timeout: float) -> Request:
        runner = self._context.runner
        running = runner.start(work)
        self._group.progress.drive_in_background()
        return CallRequest(runner, running, timeout, self._judge)

    def _carry_out(self, run: Run[Any], deadline: float, taken: list[Receive] | None = None) -> Request:
        work = PendingCollective(run, None, _as_it_is)
        if taken is not None:
            work.taken = taken
        return self._conduct(work, deadline - monotonic())


def _as_it_is(error: BaseException | None) -> BaseException | None:
    return error
