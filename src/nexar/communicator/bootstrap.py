"""Starts a node: from settings and an invitation to its first communicator.

Each member reports whether it made its first communicator. The seed sends all members the same answer: started or
failed (`cluster.decisions.admission.PendingStart`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Final
from weakref import finalize

from nexar.cluster.control_loop import DialCancelled
from nexar.cluster.decisions.admission import START_TIMEOUT
from nexar.cluster.decisions.completion import NEW_MEMBER, NONE_COMPLETED, CompletedCalls
from nexar.cluster.decisions.failure_detector import LONGEST
from nexar.cluster.decisions.membership_events import ChangeRequested
from nexar.cluster.decisions.successor_events import Terminate, Terminated, TerminationKind
from nexar.cluster.join_client import GRACE, JoinClient, JoinConnection, JoinedCluster, RankRequest, formation_error
from nexar.cluster.membership import WORLD, Membership
from nexar.cluster.mesh import Mesh
from nexar.cluster.node import Node
from nexar.cluster.seed_session import SeedCallbacks, SeedSession
from nexar.cluster.wait_notice import Tell, WaitNotice, seconds_left
from nexar.communicator.communicator import Communicator
from nexar.communicator.generation import Generation
from nexar.communicator.runtime import NodeRuntime
from nexar.communicator.state_transfer import StateReceiver
from nexar.communicator.successors import Successors
from nexar.config import Config
from nexar.errors import (
    FormationTimeout,
    InternalError,
    JoinRefused,
    LinkClosed,
    NexarError,
    PeerError,
    PeerLost,
    UsageError,
)
from nexar.group import deadline_after
from nexar.security.invitation import Invitation
from nexar.types import UNKNOWN_NODE, NodeId, Rank
from nexar.wire.control import StateOffer
from nexar.wire.join import MAX_REASON_CHARACTERS, Connected, FormationFailed, JoinMessage, StartFailed
from nexar.wire.text import few_lines

# Seconds that a member which cannot start waits for the seed's answer to all members.
_DECISION_TIMEOUT: Final = 5.0


class StartBarrier:
    """Blocks `init()` until all first members are connected, or raises on all. Any thread."""

    def __init__(
        self,
        membership: Membership,
        rank: Rank,
        interrupt: Callable[[NexarError], None],
        tell: Callable[[JoinMessage], bool],
    ) -> None:
        """`interrupt` aborts the build and must not block. `tell` sends to the seed; False: not connected."""
        self._membership = membership
        self._rank = rank
        self._interrupt = interrupt
        self._tell = tell
        self._began = time.monotonic()
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self._failure: NexarError | None = None  # this and the next: under the lock, written once
        self._connected = False

    # -- called by the thread that reads from the seed ---------------------------------------------------------

    def started(self) -> None:
        self._settled.set()

    def failed(self, error: NexarError) -> None:
        """Report that the cluster failed or excludes this node. No effect after the start."""
        with self._lock:
            first = self._failure is None and not self._settled.is_set()
            if first:
                self._failure = error
        if first:
            self._settled.set()
            self._interrupt(error)

    def seed_back(self) -> None:
        with self._lock:
            connected = self._connected and not self._settled.is_set()
        if connected:
            self._tell(Connected())

    # -- called by the thread that joins -----------------------------------------------------------------------

    def connected(self, deadline: float) -> None:
        """Blocks until every member has its links. Raises FormationTimeout or the error of `failed`."""
        with self._lock:
            self._connected = True
        self._tell(Connected())
        # Later than the seed's own deadline, even if the seed runs slowly (LONGEST): an answer comes unless it is gone.
        until = max(deadline, time.monotonic() + START_TIMEOUT) + GRACE + LONGEST
        if not self._settled.wait(max(0.0, until - time.monotonic())):
            raise self._error("the seed did not confirm that every rank is connected: it has ended, or does not answer")
        self._check()

    def give_up(self, error: Exception) -> NexarError:
        self._settle(error)
        with self._lock:
            return self._failure or self._error(self._explain(error))

    def _settle(self, error: Exception) -> None:
        if not self._settled.is_set() and self._tell(
            StartFailed(few_lines(self._explain(error), MAX_REASON_CHARACTERS))
        ):
            self._settled.wait(_DECISION_TIMEOUT)

    def _check(self) -> None:
        with self._lock:
            if self._failure is not None:
                raise self._failure

    def _explain(self, error: Exception) -> str:
        if not isinstance(error, PeerError) or error.node is None:
            return f"rank {self._rank}: {error}"
        peer = self._membership.rank_of(error.node)
        cause = getattr(error, "cause", None) or str(error)
        where = f" at {error.address}" if error.address else ""
        return (
            f"rank {self._rank} cannot connect to rank {peer}{where}\n{cause}\n"
            f"check NEXAR_ADVERTISE and NEXAR_IFACE of rank {peer}, and the firewall between the two"
        )

    def _error(self, reason: str) -> FormationTimeout:
        ranks = range(self._membership.size)
        return FormationTimeout(
            joined=[f"rank {rank}" for rank in ranks],
            expected=self._membership.size,
            refused={},
            timeout=time.monotonic() - self._began,
            reason=reason,
        )


def bootstrap(
    config: Config,
    invitation: Invitation,
    *,
    rank: Rank | None = None,
    launcher: NodeId = UNKNOWN_NODE,
    size: int | None = None,
    beside: Callable[[NodeRuntime, Communicator], Callable[[], None]] | None = None,
    tell: Tell | None = None,
    tells_for_host: bool = True,
) -> Communicator:
    """Join a cluster; return its communicator once all members are connected.

    The launcher sets `rank`, `launcher` and `size`. `beside` is called before this returns; its result is called first
    on close. Raises JoinRefused, SeedUnreachable, FormationTimeout, PeerLost or UsageError, with all resources freed.
    A forming cluster raises FormationTimeout on all members or none.
    """
    deadline = time.monotonic() + config.formation_timeout
    with ExitStack() as undo:
        node = undo.enter_context(Node(config))
        undo.push(_NodeFailure(node))
        mesh = open_mesh(node)
        undo.callback(mesh.close)
        receiver = StateReceiver(node, mesh)
        mesh.control.connect(receiver.offered, StateOffer)
        request = RankRequest(rank, launcher, size=size or 0, confirms=True)
        timeout, join_timeout = config.formation_timeout, config.join_timeout
        client = JoinClient(
            node, invitation, timeout=timeout, join_timeout=join_timeout, tell=tell, tells_for_host=tells_for_host
        )
        joined = client.join(request, mesh.adopt)
        session = _open_seed_session(node, mesh, invitation, request, joined)
        ends = ExitStack()
        wrap = communicator_factory(ends.close)
        runtime = NodeRuntime(node, mesh, joined.membership, seed=session.link, wrap=wrap, state=receiver.state)
        start_barrier = _start_barrier(runtime, joined, session.send) if joined.membership.epoch == 1 else None
        undo.callback(session.close)
        undo.callback(runtime.close)
        if joined.membership.epoch == 1:
            _check_size(joined, size)
        else:
            deadline = deadline_after(config.recovery_timeout)
        mesh.adopt(joined.membership)
        # After adopt(): the seed may report joiners at once, and only a mesh with members expects them.
        session.start(_seed_callbacks(runtime, start_barrier), runtime.status_report)
        catch_up(runtime, joined)
        world = _make_world(runtime, joined.membership, start_barrier, deadline, tell if tells_for_host else None)
        runtime.dial_watchers()
        communicator = Communicator(world, runtime, ends.close)
        close_first = (beside or _ignore_node)(runtime, communicator)
        ends.push(undo.pop_all())
    ends.callback(close_first)
    return communicator


def _make_world(
    runtime: NodeRuntime, membership: Membership, start_barrier: StartBarrier | None, deadline: float, tell: Tell | None
) -> Generation:
    if start_barrier is None:
        return begin_world(runtime, membership, deadline)
    deadline = max(deadline, time.monotonic() + START_TIMEOUT)  # the seed's own deadline
    with WaitNotice(tell, partial(describe_start, membership, runtime.node.id, runtime.mesh, deadline)):
        return start_world(runtime.successors, membership, start_barrier, deadline)


def _ignore_node(_: NodeRuntime, __: Communicator) -> Callable[[], None]:
    return lambda: None


def describe_start(membership: Membership, me: NodeId, mesh: Mesh, deadline: float) -> str:
    """Describe what `init()` waits for."""
    awaited = f"waiting until all {membership.size} ranks are connected"
    rank = membership.rank_of(me)
    missing = [
        f"rank {rank} has no connection to rank {each.rank} at {each.address} ({each.cause or 'no answer yet'})"
        for each in mesh.unconnected()
    ]
    return "; ".join([awaited, *missing]) + seconds_left(deadline)


class _NodeFailure:
    def __init__(self, node: Node) -> None:
        self._progress = node.progress

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self._progress.check()


def open_mesh(node: Node) -> Mesh:
    """Return a mesh that accepts the node's connections."""
    mesh = Mesh(node)
    node.listen(mesh)
    return mesh


def communicator_factory(leave: Callable[[], None]) -> Callable[[NodeRuntime, Generation], Communicator]:
    """Closing the world's communicator leaves the cluster. Closing another is local: only members that wait in it are
    told.
    """

    def close_part(runtime: NodeRuntime, generation: Generation) -> None:
        generation.leave()
        runtime.successors.forget(generation)

    def drop_part(runtime: NodeRuntime, generation: Generation) -> None:
        """Never blocks: the garbage collector may call this under any lock. If no thread can be started,
        the communicator stays open until the node closes: an error would end the event loop.
        """
        close, otherwise = partial(close_part, runtime, generation), "a dropped communicator stays open"
        runtime.node.progress.run_soon(partial(runtime.node.background.try_submit, close, otherwise))

    def wrap(runtime: NodeRuntime, generation: Generation) -> Communicator:
        if generation.communicator == WORLD:
            return Communicator(generation, runtime, leave)
        part = Communicator(generation, runtime, partial(close_part, runtime, generation))
        dropped = finalize(part, drop_part, runtime, generation)
        dropped.atexit = False  # the node closes all its communicators at exit
        generation.call_when_closed(dropped.detach)
        return part

    return wrap


def catch_up(runtime: NodeRuntime, joined: JoinedCluster) -> None:
    """Renew the world if this node missed its admission: its membership may be outdated."""
    if joined.again and joined.membership.epoch > 1:
        runtime.put(ChangeRequested(renewed=(WORLD,)))


def start_world(
    successors: Successors, membership: Membership, start_barrier: StartBarrier, deadline: float
) -> Generation:
    """Make a forming cluster's first communicator, on all members or none."""
    try:
        world = successors.begin(membership, WORLD, deadline)
    except (NexarError, DialCancelled) as error:
        raise start_barrier.give_up(error) from error
    start_barrier.connected(deadline)
    return world


def begin_world(runtime: NodeRuntime, membership: Membership, deadline: float) -> Generation:
    """Make a joiner's first communicator. After a change or, under the automatic policy, a loss, retries with the next
    membership.
    """
    completed, config = NEW_MEMBER, runtime.node.config
    while True:
        try:
            return runtime.successors.begin(membership, WORLD, deadline, completed=completed)
        except (PeerLost, LinkClosed) as error:
            if isinstance(error, PeerLost) and config.recovery_policy != "automatic":
                raise
            if isinstance(error, PeerLost) and error.node is not None:
                runtime.successors.need(WORLD, membership, error.node, error.cause)
            seconds = min(config.recovery_timeout, max(0.0, deadline - time.monotonic()))
            later = runtime.successors.wait_for_following(WORLD, membership, time.monotonic() + seconds)
            if later is None:
                raise
            completed = CompletedCalls(
                membership.epoch, NONE_COMPLETED
            )  # other members may have completed calls on that generation
            membership = later
            deadline = max(deadline, deadline_after(config.recovery_timeout))


def _start_barrier(runtime: NodeRuntime, joined: JoinedCluster, tell: Callable[[JoinMessage], bool]) -> StartBarrier:
    rank = joined.membership.rank_of(runtime.node.id)
    if rank is None:
        raise InternalError("the seed committed a membership to a node that is not in it")

    def interrupt(error: NexarError) -> None:
        runtime.put(Terminate(Terminated(TerminationKind.NOT_STARTED, reason=str(error))))
        runtime.node.cancel_token.cancel()  # dials that open links for it

    return StartBarrier(joined.membership, rank, interrupt, tell)


def _open_seed_session(
    node: Node, mesh: Mesh, invitation: Invitation, request: RankRequest, joined: JoinedCluster
) -> SeedSession:
    def rejoin() -> JoinConnection:
        now = replace(request, epoch=mesh.directory.membership.epoch)
        return JoinClient(node, invitation, timeout=node.config.join_auth_timeout).rejoin(now).connection

    return SeedSession(node, joined.connection, joined.welcome, rejoin)


def _seed_callbacks(runtime: NodeRuntime, start_barrier: StartBarrier | None) -> SeedCallbacks:
    listeners = SeedCallbacks(
        on_control=runtime.seed_message,
        on_died=runtime.seed_reported_death,
        on_waiting=runtime.seed_reported_waiting,
        on_lost=runtime.seed_lost,
        on_back=runtime.seed_back,
        on_refused=runtime.seed_refused,
    )
    return listeners if start_barrier is None else _through_start_barrier(start_barrier, listeners)


def _through_start_barrier(start_barrier: StartBarrier, listeners: SeedCallbacks) -> SeedCallbacks:
    def back(epoch: int) -> None:
        listeners.on_back(epoch)
        start_barrier.seed_back()

    def refused(error: JoinRefused) -> None:
        listeners.on_refused(error)
        start_barrier.failed(error)

    def failed(message: FormationFailed) -> None:
        start_barrier.failed(formation_error(message))

    return replace(listeners, on_started=start_barrier.started, on_failed=failed, on_back=back, on_refused=refused)


def _check_size(joined: JoinedCluster, size: int | None) -> None:
    if size is not None and size != joined.membership.size:
        raise UsageError(
            f"this process was started as one of {size}, but the cluster has {joined.membership.size} members; "
            "give the seed and the launcher the same size"
        )
