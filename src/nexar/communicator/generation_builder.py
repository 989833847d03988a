"""Builds generations of communicators, together with their other members.

A build is a run (`collectives.executor.Run`) that never blocks, so the driver can advance it and no thread waits for
it. `GenerationBuilder.make` runs one in the calling thread instead. The members agree on completed calls and on shared
memory at the same time: neither needs the other's result.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final

from nexar.cluster.decisions.completion import (
    UNCONSTRAINED,
    CompletedCalls,
    CompletionExchange,
    CompletionNews,
    SendNews,
)
from nexar.cluster.membership import WORLD, Membership
from nexar.cluster.mesh import EAGER_WORLD, Mesh, is_open_to_all, open_all, open_first
from nexar.cluster.node import Node
from nexar.collectives.call_log import CallLog
from nexar.collectives.context import CollectiveContext
from nexar.collectives.executor import Run
from nexar.collectives.requests import BackgroundCall, PendingCollective
from nexar.collectives.statistics import KEPT, TRACED
from nexar.collectives.trace_writer import TraceWriter
from nexar.communicator.generation import Generation
from nexar.communicator.shared_memory_setup import SharedMemorySetup, may_share
from nexar.communicator.status import NodeActivity
from nexar.errors import OperationTimeout, PeerLost, PeerMisbehaved
from nexar.group import BlockingTask, Group
from nexar.links.messages import collective_tag
from nexar.links.operation import cancelling
from nexar.links.sending import MessageHeader
from nexar.topology import FULL_MESH
from nexar.types import AwaitedPeer, NodeId
from nexar.wire.frame import Space
from nexar.wire.text import foreign_lines

# Users limit the making of a first or next communicator by a setting (nexar.errors), of others by `timeout`.
_FIRST: Final = "making the first communicator"
_NEXT: Final = "making the next communicator"
_OTHER: Final = "making the communicator"
_MISSING: Final = "its part in it: it has not made the same init, split or group, or it waits for another rank itself"


def run_blocking(group: Group, run: Run, deadline: float) -> Any:
    """Return its result, in this thread. Raises OperationTimeout at the deadline (time.monotonic)."""
    try:
        while True:
            operations = next(run)
            if not all(each.done and each.error is None for each in operations):
                group.wait(operations, deadline)
    except StopIteration as stop:
        return stop.value
    except OperationTimeout as late:
        raise build_timeout(_operation(group), late.waiting_for, late.timeout) from late
    finally:
        run.close()


def _operation(group: Group) -> str:
    """Of a call that waits for a build: a build in the background makes the next generation of any communicator."""
    if group.communicator != WORLD:
        return _OTHER
    return _FIRST if group.matching.generation == 1 else _NEXT


def build_timeout(operation: str, waiting_for: Sequence[AwaitedPeer] | str, timeout: float) -> OperationTimeout:
    """Return the error of the user's call."""
    if not isinstance(waiting_for, str):
        waiting_for = [replace(peer, missing=_MISSING) for peer in waiting_for]
    return OperationTimeout(operation=operation, waiting_for=waiting_for, timeout=timeout)


# -- completed calls


# No collective has this number.
SEQUENCE: Final = (1 << 64) - 2
_NEWS: Final = struct.Struct("<qqq")


def exchange_completed(group: Group, mine: CompletedCalls, deadline: float) -> Run:
    """The run returns CompletionExchange's result, the last call that all members completed."""
    exchange = CompletionExchange(group.rank, group.size, mine)
    sends = exchange.start()
    while sends:  # one for each step
        news = yield from _exchange(group, sends[0], deadline)
        sends = exchange.received(sends[0].step, news)
    assert exchange.result is not None
    return exchange.result


def _exchange(group: Group, sent: SendNews, deadline: float) -> Run:
    yield (group.post_open([sent.rank], deadline),)
    step = sent.step
    receive = group.post_receive(sent.source, None, space=Space.COLLECTIVE, tag=collective_tag(SEQUENCE, step))
    with cancelling([receive]):
        about = MessageHeader(space=Space.COLLECTIVE, sequence=SEQUENCE, step=step)
        yield group.post_send(sent.rank, memoryview(_NEWS.pack(*sent.news)), deadline, about=about), receive
    received = bytes(receive.into or b"")
    if len(received) != _NEWS.size:
        raise PeerMisbehaved(rank=sent.source, what="it sent an invalid message while the communicator was made")
    return CompletionNews(*_NEWS.unpack(received))


# -- generations


class GenerationBuilder:
    """Builds this node's generations. Any thread."""

    def __init__(self, node: Node, mesh: Mesh) -> None:
        self.config: Final = node.config
        self.me: Final = node.id
        self._node = node
        self._mesh = mesh
        self._activity = NodeActivity(node.progress)

    def lose(self, node: NodeId, cause: str) -> None:
        """Fail operations that wait for a former member. Its earlier messages can still be received. While more may
        arrive, the operations wait; the end of its link fails them.
        """
        if self._mesh.quiet_leavers.has(node):
            return
        router = self._mesh.router
        with router.lock:
            router.lose(node, PeerLost(node=node, cause=foreign_lines(cause)))
        router.deferred_io.flush()
        self._node.progress.wake()  # a waiter may be the driver, asleep

    def group(self, membership: Membership, communicator: int) -> Group:
        """Open the group of a generation to be built, which is numbered by the membership's epoch. Closing it aborts
        the build. The caller closes it if it does not start the build.
        """
        return Group(self._node, self._mesh, membership, communicator, membership.epoch)

    def make(
        self,
        membership: Membership,
        communicator: int,
        deadline: float,
        completed: CompletedCalls | None = None,
        begun: Callable[[Group], None] | None = None,
    ) -> tuple[Generation, int]:
        """Build it in this thread; returns the result of `run`. `begun` gets the group first. Raises PeerLost or
        OperationTimeout.
        """
        group = self._begun_group(membership, communicator, begun)
        made: tuple[Generation, int] = run_blocking(group, self.run(group, deadline, completed), deadline)
        return made

    def _begun_group(self, membership: Membership, communicator: int, begun: Callable[[Group], None] | None) -> Group:
        group = self.group(membership, communicator)
        try:
            if begun is not None:
                begun(group)
        except BaseException:
            group.close()
            raise
        return group

    def start(
        self,
        membership: Membership,
        communicator: int,
        completed: CompletedCalls,
        *,
        timeout: float,
        begun: Callable[[Group], None],
        finished: Callable[[Generation, int], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Build it in the background. `begun` gets the group. Then this thread, the driver or the control loop calls
        `finished` with the result of `run`, or `failed`, at the latest after `timeout` seconds with OperationTimeout.
        No callback may block.
        """
        group, deadline = self._begun_group(membership, communicator, begun), time.monotonic() + timeout
        builds: list[BackgroundCall] = []

        def end(error: BaseException | None) -> BaseException | None:
            timer.cancel()
            if error is not None:
                failed(error)
            return error

        def expire(_: float) -> None:
            for build in builds:
                build.fail(build_timeout(_NEXT, build.awaited_peers(), timeout))

        timer = self._node.control_loop.call_at(deadline, expire)
        work = PendingCollective(self.run(group, deadline, completed), None, end, _NEXT)
        builds.append(BackgroundCall(self._node.progress, work.map_result(lambda made: finished(*made))))
        self._node.progress.drive_in_background()

    def run(self, group: Group, deadline: float, completed: CompletedCalls | None) -> Run:
        """The run returns the generation and the last call that all members completed in the previous one; `completed`
        is this member's. A run that fails or is closed frees all resources and closes the group.
        """
        with ExitStack() as undo:
            undo.callback(group.close)
            yield from self._open_links(group, deadline)
            call_log = self._call_log(group, undo)
            sharing = SharedMemorySetup(group, deadline)
            undo.callback(sharing.close)
            with cancelling([setup := self._start_sharing(group, sharing, call_log)]):
                least = UNCONSTRAINED
                if completed is not None:
                    least = yield from exchange_completed(group, completed, deadline)
                yield (setup,)
            context = CollectiveContext(group, self.config, call_log, setup.value(), shared=sharing.shared)
            undo.callback(context.scratch.close)
            return Generation(context, undo.pop_all().close), least

    def _open_links(self, group: Group, deadline: float) -> Run:
        """Large worlds open links on first use, except at the start."""
        epoch, size = group.membership.epoch, group.size
        if group.communicator != WORLD or not self._node.has_remote_peers or (epoch > 1 and size > EAGER_WORLD):
            return
        if epoch == 1:
            yield (BlockingTask(self._node, partial(open_first, self._mesh, self.config.topology, deadline)),)
        elif not is_open_to_all(self._mesh):
            yield (BlockingTask(self._node, partial(open_all, self._mesh, deadline)),)

    def _call_log(self, group: Group, undo: ExitStack) -> CallLog:
        directory = self.config.trace_dir
        kept = KEPT if directory is None else TRACED
        call_log = CallLog(group, kept=kept, other_activity=self._activity.outside_of)
        self._activity.add(call_log)
        undo.callback(self._activity.remove, call_log)
        if directory is not None:
            undo.callback(TraceWriter(directory, group, call_log).write)
        undo.callback(call_log.close)
        return call_log

    def _start_sharing(self, group: Group, sharing: SharedMemorySetup, call_log: CallLog) -> BackgroundCall:
        # The topology of other communicators is not known, so their links are checked.
        topology = self.config.topology if group.communicator == WORLD else FULL_MESH
        run = sharing.agree(call_log) if may_share(group.membership, topology) else _nothing()
        name = _operation(group)
        return BackgroundCall(self._node.progress, PendingCollective(run, None, lambda error: error, name))


def _nothing() -> Run:
    yield from ()
