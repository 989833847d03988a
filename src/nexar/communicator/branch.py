"""One generation of one communicator, at this node: what it stands on, and what becomes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final
from weakref import WeakSet

from nexar.cluster.change import Change, following
from nexar.cluster.decisions.succession_events import Stall
from nexar.cluster.membership import Membership
from nexar.cluster.recall import Recall
from nexar.collectives.assembly import Assembly
from nexar.communicator.events import FailureEvent, Failures, Feed, MembershipEvent
from nexar.communicator.fate import Fate
from nexar.errors import MembershipChanged, NexarError, NoQuorum, PeerLost, RecoveryTimeout, Revoked
from nexar.rpc.registry import Registry
from nexar.transport.foreign_text import several_lines
from nexar.types import NodeId, Rank


class Branch:
    """Immutable but for its end: `interrupt` ends every call on it at once, `fate` says what is to be raised then."""

    def __init__(self, assembly: Assembly, close: Callable[[], None]) -> None:
        """`close` frees what it stands on; it is called once."""
        self.registry = Registry()
        """The functions that it serves. This and the feeds a successor inherits before anybody has it."""
        self.failures = Failures("nexar-failures")
        self.memberships: Feed[MembershipEvent] = Feed("nexar-memberships")
        self.assembly: Final = assembly
        self.group: Final = assembly.group
        self.communicator: Final = assembly.group.communicator
        self.membership: Final[Membership] = assembly.group.membership
        self.fate: Final = Fate(assembly.group.progress)
        self._close = close
        self._closing = threading.Lock()
        self._freed = False  # or about to be; under `_closing`
        self._closed = False  # likewise
        self.when_closed: list[Callable[[], object]] = []
        """Called when it is closed, once each. Written before anybody has it, and by `clear_away`; emptied by who
        closes, under `_closing`: its user may do so while its successor is handed over."""
        self.successor: Any = None
        """The newest communicator after it, if there is one. Written before the fate is sealed."""
        self.ancestors: WeakSet[Branch] = WeakSet()
        """Those before it that somebody still holds: each leads to the newest, not to the one after it, so that nobody
        holds those between. Written before anybody has it; read by who makes its successor."""
        self.completed: int | None = None
        """The last call on it that all who go on have completed. Written before the fate is sealed."""
        self.is_succeeded = False
        """Its fate says with what to go on. Written after the fate is sealed."""
        self.gone: dict[Rank, str] = {}
        """Members that its successor does not have, and why. Written before the fate is sealed."""
        self.agreed = False
        """All of them went by agreement: nobody was lost. Likewise."""
        self.closers: set[NodeId] = set()
        """Members whose users have closed it. Under the lineage's lock."""
        self.interrupted = False
        """Its members change: calls wait for their fate. Written once, before calls are interrupted."""
        self.recall: Final = Recall()
        """Made when it is interrupted: for whoever does something in its name that is no call on it."""

    def close(self) -> None:
        """Free what it stands on. Idempotent; its user may do so while its successor is handed over."""
        with self._closing:
            first, self._freed = not self._freed, True
        if first:
            self._close()
        with self._closing:
            self._closed = True
            told, self.when_closed = self.when_closed, []
        for tell in reversed(told):
            tell()

    def clear_away(self, heir: Branch) -> None:
        """Close it in a thread of its own, which has ended when its heir is closed. It waits for functions that others
        called; whoever makes the next successor, or waits for one, is not to wait for them too.
        """
        thread = threading.Thread(target=self.close, name="nexar-lineage-clearing", daemon=True)
        with heir._closing:
            aside = not heir._closed
            if aside:
                heir.when_closed.append(thread.join)
                thread.start()
        if not aside:
            self.close()

    def inherit(self, old: Branch) -> None:
        """It succeeds this one: who has subscribed or registered there need not do so again."""
        self.registry, self.failures, self.memberships = old.registry, old.failures, old.memberships
        self.ancestors = WeakSet([old, *old.ancestors])

    def end(self) -> None:
        """There will be no successor: nothing more is told."""
        self.close()
        self.failures.close()
        self.memberships.close()

    @property
    def nodes(self) -> frozenset[NodeId]:
        """Its members."""
        return self.group.nodes

    @property
    def me(self) -> NodeId:
        """This node."""
        return self.membership.members[self.group.rank].node

    @property
    def is_stalled(self) -> bool:
        """It was given up for want of a majority, or because that did not finish."""
        return isinstance(self.fate.error, (NoQuorum, RecoveryTimeout))

    @property
    def is_barred(self) -> bool:
        """A member has closed it, so there is no successor, at least for now."""
        return isinstance(self.fate.error, Revoked) and self.fate.error.closed

    def bar(self, target: Membership) -> Revoked | None:
        """Why a successor with these members is not made: one of them has closed this one. Under the lineage's lock."""
        for rank, member in enumerate(self.membership.members):
            if member.node in self.closers and target.rank_of(member.node) is not None:
                reason = f"rank {rank} has closed it, and there is no successor without that rank"
                return Revoked(communicator=str(self.communicator), reason=reason, rank=rank, closed=True)
        return None

    def interrupt(self, error: NexarError | None = None) -> None:
        """Every pending and later call raises, and its buffers are free. Without the node's lock. Idempotent."""
        self.interrupted = True
        self.assembly.interrupt(error or Revoked(communicator=str(self.communicator), reason="its members change"))
        self.recall.make()

    def next_membership(self, world: Membership, changes: Sequence[Change]) -> Membership | None:
        """Who goes on after these changes of the world, in order; None: they do not concern this communicator.

        All members come to the same answer from the same changes: see `following`.
        """
        return following(self.communicator, self.membership, world, changes)

    def tell_who_left(self, change: Change) -> None:
        """Listeners hear of who has gone quietly; those who had a line to it know that already."""
        for departure in change.left:
            rank = self.membership.rank_of(departure.node)
            if departure.quiet and rank is not None:
                cause = several_lines(departure.cause)
                self.failures.publish(FailureEvent(rank, departure.node, cause, "left", self.membership.epoch))

    def lead_to(self, new: Branch, communicator: Any, changes: Sequence[Change]) -> MembershipChanged:
        """From now on this is what comes after it, by one step more. What its calls have to raise."""
        self.gone = dict(sorted({**self.gone, **self.lost(changes)}.items()))
        self.successor = communicator
        return MembershipChanged(
            communicator=communicator, lost=self.gone, joined=self.joined(new), completed_by_all=self.completed
        )

    def joined(self, new: Branch) -> tuple[Rank, ...]:
        """Ranks of a later generation that were not in this one."""
        return tuple(rank for rank, each in enumerate(new.membership.members) if each.node not in self.nodes)

    def step_to(self, new: Branch, joined: tuple[Rank, ...], communicator: Any) -> MembershipEvent:
        """What listeners hear of it."""
        sizes, ranks = (self.group.size, new.group.size), (self.group.rank, new.group.rank)
        return MembershipEvent(new.membership.epoch, *sizes, *ranks, joined, self.gone, communicator)

    def stall_error(self, stall: Stall, timeout: float) -> NexarError:
        """What calls raise while there is no next membership."""

        def ranks(nodes: Iterable[NodeId]) -> list[Rank]:
            return sorted(rank for node in nodes if (rank := self.membership.rank_of(node)) is not None)

        if stall.missing_votes:
            return RecoveryTimeout(missing_votes=ranks(stall.missing_votes), timeout=timeout)
        return NoQuorum(alive=ranks(stall.alive), needed=stall.needed, left=ranks(stall.left))

    def loss(self) -> PeerLost:
        """What calls raise where the user asks for the successor: under the manual policy."""
        rank = next(iter(self.gone), None)
        cause = "its link was lost" if rank is None else self.gone[rank]
        node = None if rank is None else self.membership.members[rank].node
        remedy = "the others went on: comm.shrink() gives the next communicator"
        return PeerLost(rank=rank, node=node, cause=cause, remedy=remedy)

    def lost(self, changes: Sequence[Change]) -> dict[Rank, str]:
        """Why members of it are gone, by their ranks in it."""
        causes: dict[Rank, str] = {}
        for change in changes:
            causes |= change.causes(self.membership)
        return dict(sorted(causes.items()))
