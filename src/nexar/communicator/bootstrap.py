"""Holds `init()` until every member of the first membership is connected, or raises on each of them.

A member tells the seed when its first communicator is made, or why it cannot be made. The seed answers all members at
once: the cluster has started, or it has failed (`cluster.decisions.starting`).

From settings and an invitation to a communicator: node, mesh, worker, presence, world.
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

from nexar.cluster.control_channel import ControlChannel
from nexar.cluster.control_threads import DialCancelled
from nexar.cluster.decisions.admission import START_TIMEOUT
from nexar.cluster.decisions.failure_detector import LONGEST
from nexar.cluster.join_client import GRACE, JoinClient, JoinConnection, JoinedCluster, RankRequest, formation_error
from nexar.cluster.membership import WORLD, Membership
from nexar.cluster.mesh import Mesh
from nexar.cluster.node import Node
from nexar.cluster.seed_session import SeedCallbacks, SeedSession
from nexar.cluster.wait_notice import Tell, WaitNotice, seconds_left
from nexar.communicator.communicator import Communicator
from nexar.communicator.generation import NEWCOMER, NOTHING, CompletedCalls, Generation
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

_DECISION_TIMEOUT: Final = 5.0
"""Seconds that a member which cannot start waits for the answer that the seed sends to every member."""


class StartBarrier:
    """Of one node that is in the first membership. Any thread."""

    def __init__(
        self,
        membership: Membership,
        rank: Rank,
        interrupt: Callable[[NexarError], None],
        tell: Callable[[JoinMessage], bool],
    ) -> None:
        """`rank`: of this node. `interrupt` ends the making of the first communicator. It must not block. `tell` sends
        a message to the seed; False: there is no connection.
        """
        self._membership = membership
        self._rank = rank
        self._interrupt = interrupt
        self._tell = tell
        self._began = time.monotonic()
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self._failure: NexarError | None = None  # this and the next under the lock, and written once
        self._connected = False

    # -- told by the seed: the thread that listens to it -----------------------------------------------------

    def started(self) -> None:
        """Every member is connected."""
        self._settled.set()

    def failed(self, error: NexarError) -> None:
        """The cluster has failed, or this node has no place in it. After the start it is no news."""
        with self._lock:
            first = self._failure is None and not self._settled.is_set()
            if first:
                self._failure = error
        if first:
            self._settled.set()
            self._interrupt(error)

    def seed_back(self) -> None:
        """There is a new connection to the seed, which may not know yet that this node is connected."""
        with self._lock:
            connected = self._connected and not self._settled.is_set()
        if connected:
            self._tell(Connected())

    # -- the thread that joins -------------------------------------------------------------------------------

    def connected(self, deadline: float) -> None:
        """This node has its links: tell the seed, and wait until every member has them. FormationTimeout, or what
        `failed` was told. The seed's own deadline comes first, also if that runs slowly (LONGEST), so its answer
        is there by then, unless it is gone.
        """
        with self._lock:
            self._connected = True
        self._tell(Connected())
        until = max(deadline, time.monotonic() + START_TIMEOUT) + GRACE + LONGEST
        if not self._settled.wait(max(0.0, until - time.monotonic())):
            raise self._error("the seed did not say that every rank is connected: it is gone, or does not answer")
        self._check()

    def give_up(self, error: Exception) -> NexarError:
        """What `init()` raises when this node cannot make the first communicator: what the seed says to all."""
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
        """Names the pair, where two ranks cannot connect."""
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
    """Join, and return when everybody is there and can be reached. The caller closes the communicator.

    `rank`, `launcher`, `size`: what whoever started this process said; the cluster must agree. `beside` is told of the
    node and its communicator before this returns; what it returns is called first when all is closed. `tell`,
    `tells_for_host`: see Worker.
    JoinRefused, SeedUnreachable, FormationTimeout, PeerLost; nothing is left behind then. The first communicator of a
    cluster that forms has all its members, or this raises FormationTimeout on every one of them.
    """
    deadline = time.monotonic() + config.formation_timeout
    with ExitStack() as undo:
        node = undo.enter_context(Node(config))
        undo.push(_Reason(node))
        mesh, board = open_mesh(node)
        undo.callback(mesh.close)
        receiver = StateReceiver(node, mesh)
        board.connect(receiver.offered, StateOffer)
        place = RankRequest(rank, launcher, size=size or 0, confirms=True)
        timeout, join_timeout = config.formation_timeout, config.join_timeout
        worker = JoinClient(
            node, invitation, timeout=timeout, join_timeout=join_timeout, tell=tell, tells_for_host=tells_for_host
        )
        joined = worker.join(place, mesh.adopt)
        runtime = NodeRuntime(node, mesh, board, joined.membership)
        runtime.state = receiver.state
        session = _open_seed_session(runtime, invitation, place, joined)
        start_barrier = _start_barrier(runtime, joined, session.send) if joined.membership.epoch == 1 else None
        runtime.send_to_seed = session.say
        runtime.seed_answers = session.answers
        undo.callback(session.close)
        undo.callback(runtime.close)
        if joined.membership.epoch == 1:
            _check_size(joined, size)
        else:
            deadline = deadline_after(config.recovery_timeout)
        mesh.adopt(joined.membership)
        # The seed may tell at once of nodes that wait to join: only a mesh with members expects them.
        session.start(_seed_callbacks(runtime, start_barrier, joined.connection.address))
        ends = ExitStack()
        runtime.successors.wrap = communicator_factory(runtime, ends.close)
        catch_up(runtime, joined)
        if start_barrier is None:
            world = begin_world(runtime, joined.membership, deadline)
        else:
            deadline = max(deadline, time.monotonic() + START_TIMEOUT)  # as the seed has
            awaited = partial(describe_start, joined.membership, node.id, mesh, deadline)
            with WaitNotice(tell if tells_for_host else None, awaited):
                world = start_world(runtime.successors, joined.membership, start_barrier, deadline)
        runtime.dial_watchers()
        ends.push(undo.pop_all())
    ends.callback((beside or _ignore_node)(runtime, communicator := Communicator(world, runtime, ends.close)))
    return communicator


def _ignore_node(_: NodeRuntime, __: Communicator) -> Callable[[], None]:
    """Nobody wants to know of the node."""
    return lambda: None


def describe_start(membership: Membership, me: NodeId, mesh: Mesh, deadline: float) -> str:
    """What `init()` waits for after the first membership is committed. Names the pairs that this rank is missing."""
    awaited = f"waiting until all {membership.size} ranks are connected"
    rank = membership.rank_of(me)
    missing = [
        f"rank {rank} has no connection to rank {each.rank} at {each.address} ({each.cause or 'no answer yet'})"
        for each in mesh.unconnected()
    ]
    return "; ".join([awaited, *missing]) + seconds_left(deadline)


class _Reason:
    """Leaving with an error: where the node was broken meanwhile, that is why, whatever the waits made of it."""

    def __init__(self, node: Node) -> None:
        self._progress = node.progress

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self._progress.check()


def open_mesh(node: Node) -> tuple[Mesh, ControlChannel]:
    """A mesh whose control messages arrive at the switchboard."""
    board = ControlChannel()
    mesh = Mesh(node, on_control=board.control, on_lost=board.lost)
    board.rest = mesh.router.notices.arrived
    node.listen(mesh)
    return mesh, board


def communicator_factory(runtime: NodeRuntime, leave: Callable[[], None]) -> Callable[[Generation], Communicator]:
    """What makes communicators of branches: closing the world's leaves the cluster, closing another is local, and only
    who waits in it for this node hears of it.
    """

    def close_part(generation: Generation) -> None:
        generation.group.leave()
        generation.context.call_log.leave()
        runtime.successors.forget(generation)

    def drop_part(generation: Generation) -> None:
        """Its user has dropped it. The collector may run this while the thread holds any lock, and closing may wait: so
        it is handed over, to a thread of its own.
        """
        run_in_thread = runtime.node.dialer.run_in_thread
        runtime.node.progress.run_soon(partial(run_in_thread, partial(close_part, generation)))

    def wrap(generation: Generation) -> Communicator:
        if generation.communicator == WORLD:
            return Communicator(generation, runtime, leave)
        part = Communicator(generation, runtime, partial(close_part, generation))
        dropped = finalize(part, drop_part, generation)
        dropped.atexit = False  # then the node closes with all that it has
        generation.when_closed.append(dropped.detach)
        return part

    return wrap


def catch_up(runtime: NodeRuntime, joined: JoinedCluster) -> None:
    """Who became a member before it heard so may have been told a membership that the others' world does not begin
    with: one that somebody left quietly. So all of them, and this node, begin with the next.
    """
    if joined.again and joined.membership.epoch > 1:
        runtime.successors.renew((WORLD,), 0)


def start_world(
    successors: Successors, membership: Membership, start_barrier: StartBarrier, deadline: float
) -> Generation:
    """The first communicator of a cluster that forms, with every member of it, when all of them have made it. Raises
    FormationTimeout on every member, or what else the gate was told, if one of them cannot, or is lost.
    """
    try:
        world = successors.begin(membership, WORLD, deadline)
    except (NexarError, DialCancelled) as error:
        raise start_barrier.give_up(error) from error
    start_barrier.connected(deadline)
    return world


def begin_world(runtime: NodeRuntime, membership: Membership, deadline: float) -> Generation:
    """The first communicator of a node that joins a cluster which has formed. Whoever dies while it is made is removed
    like anybody else, under the automatic policy, and the others begin with the next membership. So does who finds that
    a change has come first.
    """
    completed, config = NEWCOMER, runtime.node.config
    while True:
        try:
            return runtime.successors.begin(membership, WORLD, deadline, completed=completed)
        except (PeerLost, LinkClosed) as error:
            if isinstance(error, PeerLost) and config.recovery_policy != "automatic":
                raise
            if isinstance(error, PeerLost) and error.node is not None:
                runtime.successors.need(WORLD, membership, error.node, error.cause)
            patience = min(config.recovery_timeout, max(0.0, deadline - time.monotonic()))
            later = runtime.successors.wait_for_following(WORLD, membership, time.monotonic() + patience)
            if later is None:
                raise
            completed = CompletedCalls(
                membership.epoch, NOTHING
            )  # others may have had that one, and called something on it
            membership = later
            deadline = max(deadline, deadline_after(config.recovery_timeout))


def _start_barrier(runtime: NodeRuntime, joined: JoinedCluster, tell: Callable[[JoinMessage], bool]) -> StartBarrier:
    rank = joined.membership.rank_of(runtime.node.id)
    if rank is None:
        raise InternalError("the seed committed a membership to a node that is not in it")

    def interrupt(error: NexarError) -> None:
        runtime.successors.end_all(lambda _: error)
        runtime.node.cancel_token.make()  # who opens links for it waits in dials

    return StartBarrier(joined.membership, rank, interrupt, tell)


def _open_seed_session(
    runtime: NodeRuntime, invitation: Invitation, place: RankRequest, joined: JoinedCluster
) -> SeedSession:
    node = runtime.node

    def knock() -> JoinConnection:
        now = replace(place, epoch=runtime.membership_service.membership.epoch)
        return JoinClient(node, invitation, timeout=node.config.join_auth_timeout).rejoin(now).connection

    return SeedSession(node, joined.connection, joined.welcome, knock, news=runtime.bulletin)


def _seed_callbacks(runtime: NodeRuntime, start_barrier: StartBarrier | None, seed: str) -> SeedCallbacks:
    """`gate`: of a cluster that forms."""
    listeners = SeedCallbacks(
        on_word=runtime.seed_message,
        on_died=runtime.seed_reported_dead,
        on_waiting=runtime.seed_reported_waiting,
        on_lost=runtime.seed_lost,
        on_back=runtime.seed_back,
        on_refused=runtime.seed_refused,
    )
    return listeners if start_barrier is None else _through_start_barrier(start_barrier, seed, listeners)


def _through_start_barrier(start_barrier: StartBarrier, seed: str, listeners: SeedCallbacks) -> SeedCallbacks:
    """What concerns the start of the cluster is told to the gate as well."""

    def back(epoch: int) -> None:
        listeners.on_back(epoch)
        start_barrier.seed_back()

    def refused(reason: str, expelled: int) -> None:
        listeners.on_refused(reason, expelled)
        start_barrier.failed(JoinRefused(reason=reason, address=seed, expelled=expelled))

    def failed(message: FormationFailed) -> None:
        start_barrier.failed(formation_error(message))

    return replace(listeners, on_started=start_barrier.started, on_failed=failed, on_back=back, on_refused=refused)


def _check_size(joined: JoinedCluster, size: int | None) -> None:
    if size is not None and size != joined.membership.size:
        raise UsageError(
            f"this process was started as one of {size}, but the cluster has {joined.membership.size} members; "
            "give the seed and the launcher the same size"
        )
