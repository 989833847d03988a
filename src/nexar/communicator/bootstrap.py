"""From settings and an invitation to a communicator: node, mesh, worker, presence, world."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from weakref import finalize

from nexar.cluster.change import WORLD
from nexar.cluster.join_line import JoinLine
from nexar.cluster.membership import Membership
from nexar.cluster.mesh import Mesh
from nexar.cluster.node import Node
from nexar.cluster.recall import Recalled
from nexar.cluster.standing import Listeners, Standing
from nexar.cluster.switchboard import Switchboard
from nexar.cluster.wait_notice import Tell, WaitNotice, seconds_left
from nexar.cluster.worker import Joined, Place, Worker, formation_error
from nexar.communicator.branch import Branch
from nexar.communicator.communicator import Communicator
from nexar.communicator.lineage import Lineage
from nexar.communicator.presence import Presence
from nexar.communicator.settling import NEWCOMER, NOTHING, Completed
from nexar.communicator.start_gate import StartGate
from nexar.communicator.state_transfer import StateReceiver
from nexar.config import Config
from nexar.errors import InternalError, JoinRefused, LinkClosed, NexarError, PeerLost, UsageError
from nexar.group import deadline_after
from nexar.security.invitation import Invitation
from nexar.types import UNKNOWN_NODE, NodeId, Rank
from nexar.wire.joining import FormationFailed, JoinMessage
from nexar.wire.messages import Offer


def bootstrap(
    config: Config,
    invitation: Invitation,
    *,
    rank: Rank | None = None,
    launcher: NodeId = UNKNOWN_NODE,
    size: int | None = None,
    beside: Callable[[Presence, Communicator], Callable[[], None]] | None = None,
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
        mesh, board = connected(node)
        undo.callback(mesh.close)
        receiver = StateReceiver(node, mesh)
        board.connect(receiver.offered, Offer)
        place = Place(rank, launcher, size=size or 0, confirms=True)
        timeout, join_timeout = config.formation_timeout, config.join_timeout
        worker = Worker(
            node, invitation, timeout=timeout, join_timeout=join_timeout, tell=tell, tells_for_host=tells_for_host
        )
        joined = worker.join(place, mesh.adopt)
        presence = Presence(node, mesh, board, joined.membership)
        presence.state = receiver.state
        standing = _stand(presence, invitation, place, joined)
        gate = _gate(presence, joined, standing.send) if joined.membership.epoch == 1 else None
        presence.tell_seed = standing.say
        presence.seed_answers = standing.answers
        undo.callback(standing.close)
        undo.callback(presence.close)
        if joined.membership.epoch == 1:
            _check_size(joined, size)
        else:
            deadline = deadline_after(config.recovery_timeout)
        mesh.adopt(joined.membership)
        # The seed may tell at once of nodes that wait to join: only a mesh with members expects them.
        standing.start(_listeners(presence, gate, joined.line.address))
        ends = ExitStack()
        presence.lineage.wrap = wrapper(presence, ends.close)
        catch_up(presence, joined)
        if gate is None:
            world = begin_world(presence, joined.membership, deadline)
        else:
            awaited = partial(describe_start, joined.membership, node.id, mesh, deadline)
            with WaitNotice(tell if tells_for_host else None, awaited):
                world = start_world(presence.lineage, joined.membership, gate, deadline)
        presence.look_around()
        ends.push(undo.pop_all())
    ends.callback((beside or _nobody)(presence, communicator := Communicator(world, presence, ends.close)))
    return communicator


def _nobody(_: Presence, __: Communicator) -> Callable[[], None]:
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


def connected(node: Node) -> tuple[Mesh, Switchboard]:
    """A mesh whose control messages arrive at the switchboard."""
    board = Switchboard()
    mesh = Mesh(node, on_control=board.control, on_lost=board.lost)
    board.rest = mesh.router.notices.arrived
    node.listen(mesh)
    return mesh, board


def wrapper(presence: Presence, leave: Callable[[], None]) -> Callable[[Branch], Communicator]:
    """What makes communicators of branches: closing the world's leaves the cluster, closing another is local, and only
    who waits in it for this node hears of it.
    """

    def close_part(branch: Branch) -> None:
        branch.group.leave()
        branch.assembly.journal.leave()
        presence.lineage.forget(branch)

    def drop_part(branch: Branch) -> None:
        """Its user has dropped it. The collector may run this while the thread holds any lock, and closing may wait: so
        it is handed over, to a thread of its own.
        """
        aside = presence.node.dialer.aside
        presence.node.progress.run_soon(partial(aside, partial(close_part, branch)))

    def wrap(branch: Branch) -> Communicator:
        if branch.communicator == WORLD:
            return Communicator(branch, presence, leave)
        part = Communicator(branch, presence, partial(close_part, branch))
        dropped = finalize(part, drop_part, branch)
        dropped.atexit = False  # then the node closes with all that it has
        branch.when_closed.append(dropped.detach)
        return part

    return wrap


def catch_up(presence: Presence, joined: Joined) -> None:
    """Who became a member before it heard so may have been told a membership that the others' world does not begin
    with: one that somebody left quietly. So all of them, and this node, begin with the next.
    """
    if joined.again and joined.membership.epoch > 1:
        presence.lineage.renew((WORLD,), 0)


def start_world(lineage: Lineage, membership: Membership, gate: StartGate, deadline: float) -> Branch:
    """The first communicator of a cluster that forms, with every member of it, when all of them have made it. Raises
    FormationTimeout on every member, or what else the gate was told, if one of them cannot, or is lost.
    """
    try:
        world = lineage.begin(membership, WORLD, deadline)
    except (NexarError, Recalled) as error:
        raise gate.give_up(error) from error
    gate.connected(deadline)
    return world


def begin_world(presence: Presence, membership: Membership, deadline: float) -> Branch:
    """The first communicator of a node that joins a cluster which has formed. Whoever dies while it is made is removed
    like anybody else, under the automatic policy, and the others begin with the next membership. So does who finds that
    a change has come first.
    """
    completed, config = NEWCOMER, presence.node.config
    while True:
        try:
            return presence.lineage.begin(membership, WORLD, deadline, completed=completed)
        except (PeerLost, LinkClosed) as error:
            if isinstance(error, PeerLost) and config.recovery_policy != "automatic":
                raise
            if isinstance(error, PeerLost) and error.node is not None:
                presence.lineage.need(WORLD, membership, error.node, error.cause)
            patience = min(config.recovery_timeout, max(0.0, deadline - time.monotonic()))
            later = presence.lineage.wait_for_following(WORLD, membership, time.monotonic() + patience)
            if later is None:
                raise
            completed = Completed(membership.epoch, NOTHING)  # others may have had that one, and called something on it
            membership = later
            deadline = max(deadline, deadline_after(config.recovery_timeout))


def _gate(presence: Presence, joined: Joined, tell: Callable[[JoinMessage], bool]) -> StartGate:
    rank = joined.membership.rank_of(presence.node.id)
    if rank is None:
        raise InternalError("the seed committed a membership to a node that is not in it")

    def interrupt(error: NexarError) -> None:
        presence.lineage.end_all(lambda _: error)
        presence.node.recall.make()  # who opens links for it waits in dials

    return StartGate(joined.membership, rank, interrupt, tell)


def _stand(presence: Presence, invitation: Invitation, place: Place, joined: Joined) -> Standing:
    node = presence.node

    def knock() -> JoinLine:
        now = replace(place, epoch=presence.recovery.membership.epoch)
        return Worker(node, invitation, timeout=node.config.join_auth_timeout).rejoin(now).line

    return Standing(node, joined.line, joined.welcome, knock, news=presence.bulletin)


def _listeners(presence: Presence, gate: StartGate | None, seed: str) -> Listeners:
    """`gate`: of a cluster that forms."""
    listeners = Listeners(
        on_word=presence.seed_said,
        on_died=presence.seed_told_of,
        on_waiting=presence.seed_told_of_waiting,
        on_lost=presence.seed_lost,
        on_back=presence.seed_back,
        on_refused=presence.seed_refused,
    )
    return listeners if gate is None else _through_gate(gate, seed, listeners)


def _through_gate(gate: StartGate, seed: str, listeners: Listeners) -> Listeners:
    """What concerns the start of the cluster is told to the gate as well."""

    def back(epoch: int) -> None:
        listeners.on_back(epoch)
        gate.seed_back()

    def refused(reason: str, expelled: int) -> None:
        listeners.on_refused(reason, expelled)
        gate.failed(JoinRefused(reason=reason, address=seed, expelled=expelled))

    def failed(message: FormationFailed) -> None:
        gate.failed(formation_error(message))

    return replace(listeners, on_started=gate.started, on_failed=failed, on_back=back, on_refused=refused)


def _check_size(joined: Joined, size: int | None) -> None:
    if size is not None and size != joined.membership.size:
        raise UsageError(
            f"this process was started as one of {size}, but the cluster has {joined.membership.size} members; "
            "give the seed and the launcher the same size"
        )
