"""The seed's mind: whom to let in, and when everybody is there. Pure.

    knocked ──hello──→ greeted ──proof──→ admitted (candidate or launcher) ──world full──→ member, attendant
       │                  │                  │
       └── time over, no room, wrong, gone ──┴──→ ended, once

Laws:
- Before its proof a connection costs one place in the waiting room and changes nothing else. So what strangers do is
  never seen by those who have the secret, except as a line in the list of refusals, which is bounded.
- The node id counts only from the proof on: nobody keeps a node out by saying its name first.
- A node is in once. Before the commit its first connection wins. After it the newest does, if it shows the key that the
  membership pins: that node has lost its old line, though we may not have noticed.
- The first membership is committed once, with epoch 1, as soon as `size` candidates are in and show their certificates:
  whoever hears of it can dial everybody in it. Launchers do not count, nor those who came too early and wait to join.
  From then on it is the members who decide who is here, and `FormedCluster` that follows.
- Every event costs the same however large the world is, but for a change of the membership, which is paid for once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from nexar.cluster.addresses import add_seen
from nexar.cluster.decisions.admission_events import (
    Action,
    Admit,
    Answered,
    Applied,
    BadMessage,
    ChildDied,
    Commit,
    Drop,
    Event,
    Fail,
    Gone,
    Greeted,
    Heard,
    Knocked,
    Left,
    Note,
    NoteKind,
    Ready,
    Refuse,
    Reserved,
    Said,
    SendChallenge,
    Show,
    Tick,
    Watched,
)
from nexar.cluster.decisions.authenticating import Joining, Onlookers, authenticate, greet
from nexar.cluster.decisions.children import Children
from nexar.cluster.decisions.early_joiners import EarlyJoiners
from nexar.cluster.decisions.formation import Formation
from nexar.cluster.decisions.formed_cluster import FormedCluster
from nexar.cluster.decisions.guest import Guest
from nexar.cluster.decisions.refusals import Refusal, Refusals, brief, last_line
from nexar.cluster.decisions.register import Register
from nexar.cluster.decisions.terms import Terms
from nexar.cluster.decisions.vote import Vote
from nexar.cluster.decisions.waiting_room import WaitingRoom
from nexar.cluster.decisions.witness import Witness
from nexar.cluster.membership import MAX_MEMBERS, Attendant, Member, Membership
from nexar.errors import InternalError, UsageError
from nexar.types import NodeId, Rank, describe_peer, format_node, format_seconds
from nexar.wire.handshake import Hello

_CROWDED: Final = "too many connections wait to authenticate; try again"


class Admission:
    """Told of everything that happens at the door by `step`, and of nothing else."""

    def __init__(
        self,
        cluster: str,
        size: int,
        *,
        started: float,
        formation_timeout: float,
        seed: Attendant,
        terms: Terms | None = None,
    ) -> None:
        """Form a cluster of `size` members until `started + formation_timeout`. `seed` is pinned by the membership.

        UsageError for a size that no cluster has.
        """
        if not 1 <= size <= MAX_MEMBERS:
            raise UsageError(f"a cluster of {size} members cannot be formed; allowed are 1 to {MAX_MEMBERS}")
        self.size = size
        self._terms = terms or Terms()
        self._deadline = started + formation_timeout
        self._formation_timeout = formation_timeout
        self._now = started  # of the event that is being dealt with
        self._failure = ""  # why the cluster will never form, once that is so
        self._formation: Formation | None = Formation(cluster, size, seed)  # until it succeeds or fails
        self._formed: FormedCluster | None = None  # once it has
        self._guests: dict[int, Guest] = {}
        self._pending = WaitingRoom(self._terms.max_pending, self._terms.auth_timeout)
        self._members: dict[NodeId, Guest] = {}
        self._launchers: dict[NodeId, Guest] = {}
        self._onlookers = Onlookers()
        self._children = Children(self._launchers)
        self._early = EarlyJoiners(size, self._terms)  # until it has formed
        self._refusals = Refusals()

    @classmethod
    def resumed(cls, membership: Membership, vote: Vote | None = None, *, terms: Terms | None = None) -> Admission:
        """The seed of a cluster that has formed, started again: those whom the membership pins may come back. `vote`:
        what it had kept of its last vote.
        """
        cluster, size, seed = membership.cluster, membership.size, membership.seed
        if seed is None:
            raise InternalError("a membership without a seed cannot be resumed by one")
        made = cls(cluster, size, started=0, formation_timeout=0, seed=seed, terms=terms)
        made._formation = None
        made._form(membership, vote)
        return made

    def _form(self, membership: Membership, vote: Vote | None = None) -> FormedCluster:
        register = Register(membership, elastic=self._terms.elastic, most=self._terms.most)
        witness = Witness(membership, vote=vote)
        self._formed = FormedCluster(register, witness, self._members, self._launchers, self._end)
        return self._formed

    @property
    def membership(self) -> Membership | None:
        """The newest that was committed here, or chosen by the members; None before."""
        return None if self._formed is None else self._formed.membership

    @property
    def failed(self) -> bool:
        """The time for forming passed before everybody was there."""
        return self._formation is None and self._formed is None

    @property
    def joined(self) -> int:
        """Candidates that are in and connected; after the commit, members that are connected."""
        return len(self._members)

    @property
    def pending(self) -> int:
        """Connections that have proven nothing yet."""
        return len(self._pending)

    @property
    def refused(self) -> dict[str, str]:
        """Who was turned away, and why: the newest 256."""
        return self._refusals.listed()

    def due(self, now: float) -> float | None:
        """When the next Tick is needed, not before `now`; None: not before another event."""
        formation = None if self._formation is None else self._deadline
        formed = None if self._formed is None else self._formed.due(now)
        deadlines = [each for each in (formation, formed, self._pending.next_deadline) if each is not None]
        return max(now, min(deadlines)) if deadlines else None

    def step(self, event: Event, now: float) -> list[Action]:
        """Take note of an event; what to do about it, in this order. The only method that changes anything.

        Events of a connection that has ended are ignored: they were under way when it did.
        """
        self._now = now
        if isinstance(event, Knocked):
            return self._knocked(event, now)
        if isinstance(event, Tick):
            return self._tick(now)
        guest = self._guests.get(event.connection)
        if guest is None:
            return []
        try:
            return self._heard(guest, event)
        except Refusal as why:
            return self._refuse(guest, str(why), why.expelled)

    def _heard(self, guest: Guest, event: Heard) -> list[Action]:
        """Refusal if the guest has to go for it."""
        match event:
            case Greeted():
                actions = self._greeted(guest, event.hello)
            case Applied():
                actions = self._applied(guest, event)
            case Ready():
                actions = self._ready(guest)
            case Reserved():
                actions = self._reserved(guest, event)
            case Watched():
                actions = self._watched(guest, event)
            case BadMessage():
                raise Refusal(event.reason)
            case Gone() | Left():
                actions = self._went(guest, event)
            case ChildDied():
                actions = self._child_died(guest, event)
            case Said() | Answered():
                actions = self._spoke(guest, event)
        return actions

    def _went(self, guest: Guest, event: Gone | Left) -> list[Action]:
        if isinstance(event, Gone):
            return self._end(guest, "gone", event.reason)
        return [Drop(guest.connection, "it took its leave"), *self._end(guest, "left", event.reason)]

    def _spoke(self, guest: Guest, event: Said | Answered) -> list[Action]:
        if self._formed is None:
            raise Refusal("it spoke like a member, and there are none yet")
        if isinstance(event, Said):
            return self._formed.said(guest, event, self._now)
        return self._formed.answered(guest, event, self._now)

    # ------------------------------------------------------------ strangers

    def _knocked(self, event: Knocked, now: float) -> list[Action]:
        if event.connection in self._guests:
            raise InternalError(f"connection {event.connection} knocked twice")
        guest = self._guests[event.connection] = Guest(event.connection, event.address)
        knocked = Note("knocked", event.address)
        if self.failed:
            return [knocked, *self._refuse(guest, self._failure)]
        displaced = self._pending.enter(event.connection, now)
        dropped = [] if displaced is None else self._drop(self._guests[displaced], _CROWDED)
        return [*dropped, knocked]

    def _greeted(self, guest: Guest, hello: Hello) -> list[Action]:
        greet(guest, hello)
        self._pending.spoke(guest.connection)
        return [SendChallenge(guest.connection)]

    def _prove(self, guest: Guest, role: Joining, event: Applied | Reserved | Watched) -> Hello:
        """Its hello, now that it is no stranger any more. Refusal if this is not an honest `role`."""
        hello = authenticate(guest, role, event)
        self._pending.leave(guest.connection)
        return hello

    def _watched(self, guest: Guest, event: Watched) -> list[Action]:
        self._prove(guest, "onlooker", event)
        self._onlookers.enter(guest)
        return [Show(guest.connection), self._note("watching", guest)]

    # ------------------------------------------------------------ forming

    def _applied(self, guest: Guest, event: Applied) -> list[Action]:
        hello, asked = self._prove(guest, "candidate", event), event.application
        if self._formation is None:
            return self._after().applied(guest, hello, asked)
        self._check_new(hello.node, asked.epoch)
        addresses = add_seen(asked.addresses, guest.address)
        member = Member(hello.node, asked.host, guest.fingerprint, addresses, hello.capabilities, asked.launcher)
        admit = Admit(guest.connection, hello.node, guest.address, self.size, rank=asked.rank)
        if not self._early.admit(self._formation, guest, member, asked.rank):
            return [admit, self._note("admitted", guest, "it waits to come in")]
        seated = self._seat(guest, hello.node)
        return [admit, self._note("admitted", guest), *seated]

    def _seat(self, guest: Guest, node: NodeId) -> list[Action]:
        """It has a place, and waits: also for children that ended well, and will never come."""
        self._members[node] = guest
        return [action for event in self._children.missing for action in self._fail_without(event)]

    def _ready(self, guest: Guest) -> list[Action]:
        if self._formation is None:
            return self._after().ready(guest)
        if self._early.make_ready(guest):
            return []
        if guest.node is None or self._members.get(guest.node) is not guest:
            raise Refusal("it said that it is ready, and has not joined")
        self._formation.make_ready(guest.node)
        return self._commit(self._formation) if self._formation.is_complete else []

    def _reserved(self, guest: Guest, event: Reserved) -> list[Action]:
        hello, asked = self._prove(guest, "launcher", event), event.reservation
        if self._formation is None:
            return self._after().reserved(guest, hello, asked)
        self._check_new(hello.node, asked.epoch)
        block = self._early.reserve(self._formation, Attendant(hello.node, guest.fingerprint), asked)
        self._launchers[hello.node] = guest
        admit = Admit(guest.connection, hello.node, guest.address, self.size)
        if block is None:
            return [admit, self._note("reserved", guest, "no ranks yet")]
        admit = replace(admit, first_rank=block.first_rank, group_rank=block.group_rank)
        return [admit, self._note("reserved", guest, f"ranks {block.ranks.start}..{block.ranks.stop - 1}")]

    def _check_new(self, node: NodeId, epoch: int) -> None:
        """Refusal for who has come already, and for members of the cluster of a seed that was here before."""
        if epoch:
            raise Refusal("its cluster has formed, and this seed does not know it: it was started without its state")
        present = self._members.get(node) or self._launchers.get(node) or self._early.find(node)
        if present is not None:
            raise Refusal(f"node {format_node(node)} has joined already, from {present.address}")

    def _commit(self, formation: Formation) -> list[Action]:
        self._formation = None
        formed = self._form(formation.make_membership())
        commit = Commit(formed.membership, self._insiders(), frozenset(self._members))
        return [commit, Note("committed", reason=f"{self.size} members"), *formed.take_over(self._early)]

    def _promote(self) -> list[Action]:
        """As many as places have become free do not wait any more."""
        actions: list[Action] = []
        while self._formation and (early := self._early.promote(self._formation)):
            actions += self._seat(early.guest, early.member.node)
            actions += self._ready(early.guest) if early.ready and self._members else []  # none: it has failed
        return actions

    def _after(self) -> FormedCluster:
        if self._formed is None:
            raise InternalError("somebody spoke after the formation had failed and all connections had ended")
        return self._formed

    def _child_died(self, guest: Guest, event: ChildDied) -> list[Action]:
        formation = self._formation
        if formation is None:
            return self._after().child_died(guest, event)
        died, in_vain = self._children.ended(formation, guest, event, somebody_waits=bool(self._members))
        return [died, *self._fail_without(event)] if in_vain else [died]

    def _fail_without(self, event: ChildDied) -> list[Action]:
        """Nobody else may have its rank, and its launcher starts nobody in its place: waiting would be in vain."""
        if self._formation is None:
            return []  # it has failed already
        verb = "ended" if event.well else "died"
        self._refusals.add(f"rank {event.rank}", f"it {verb} before the cluster had formed: {last_line(event.cause)}")
        self._failure = f"rank {event.rank} {verb} before the cluster had formed"
        return self._fail(self._formation)

    # ------------------------------------------------------------ time

    def _tick(self, now: float) -> list[Action]:
        late = f"it did not authenticate within {format_seconds(self._terms.auth_timeout)}"
        expired = [self._guests[connection] for connection in self._pending.expired(now)]
        actions = [action for guest in expired for action in self._drop(guest, late)]
        if self._formation is not None and now >= self._deadline:
            self._failure = f"the cluster did not form within {format_seconds(self._formation_timeout)}"
            actions += self._fail(self._formation)
        return actions if self._formed is None else actions + self._formed.tick(now)

    def _fail(self, formation: Formation) -> list[Action]:
        """Everybody is told: those who are in, the facts; the others, that it is over."""
        insiders = (*self._insiders(), *self._early.clear())
        joined = tuple(self._who(guest) + formation.flaw_of(node) for node, guest in self._members.items())
        strangers = [guest for guest in self._guests.values() if not guest.fingerprint]
        refused = [action for guest in strangers for action in self._refuse(guest, self._failure)]
        self._formation = None
        self._guests.clear()
        self._members.clear()
        self._launchers.clear()
        listed, count = self._refusals.listed(), self._refusals.count
        elapsed = self._formation_timeout - max(0.0, self._deadline - self._now)
        fail = Fail(joined, self.size, listed, count, elapsed, insiders)
        return [*refused, fail, Note("failed", reason=f"{self._failure}, {len(joined)} of {self.size} joined")]

    # ------------------------------------------------------------ ends

    def _refuse(self, guest: Guest, reason: str, expelled: int = 0) -> list[Action]:
        reason = brief(reason)
        self._refusals.add(self._who(guest), reason)
        return [Refuse(guest.connection, reason, expelled), *self._end(guest, "refused", reason)]

    def _drop(self, guest: Guest, reason: str) -> list[Action]:
        self._refusals.add(self._who(guest), reason)
        return [Drop(guest.connection, reason), *self._end(guest, "dropped", reason)]

    def _end(self, guest: Guest, kind: NoteKind, reason: str) -> list[Action]:
        note = self._note(kind, guest, reason)
        del self._guests[guest.connection]
        self._pending.leave(guest.connection)
        self._onlookers.leave(guest)
        if self._formed is not None:
            return [note, *self._formed.withdrawn(guest, kind, reason, self._now)]
        self._withdraw(guest)
        return [note, *self._promote()]

    def _withdraw(self, guest: Guest) -> None:
        """What its node has claimed is free again."""
        self._early.withdraw(guest)
        for circle in (self._members, self._launchers):
            if guest.node is not None and circle.get(guest.node) is guest:
                del circle[guest.node]
                self._children.forget(guest.node)
                if self._formation is not None:
                    self._formation.withdraw(guest.node)

    # ------------------------------------------------------------ words

    def _insiders(self) -> tuple[int, ...]:
        return tuple(guest.connection for guest in (*self._members.values(), *self._launchers.values()))

    def _rank(self, guest: Guest) -> Rank | None:
        """What it has claimed or holds; nobody has a rank by its hello alone."""
        if guest.node is None or self._members.get(guest.node) is not guest:
            return None
        book = self._formation or self.membership
        return None if book is None else book.rank_of(guest.node)

    def _who(self, guest: Guest) -> str:
        return describe_peer(self._rank(guest), guest.node, guest.address)

    def _note(self, kind: NoteKind, guest: Guest, reason: str = "") -> Note:
        return Note(kind, guest.address, guest.node, self._rank(guest), brief(reason))
