"""The seed's mind: whom to let in, and when everybody is there. Pure.

    knocked ──hello──→ greeted ──proof──→ admitted (candidate or launcher) ──world full──→ member, attendant
       │                  │                  │
       └── time over, no room, wrong, gone ──┴──→ ended, once

Laws:
- Before its proof a connection costs one place among the pending ones and changes nothing else. So what strangers do is
  never seen by those who have the secret, except as a line in the list of refusals, which is bounded.
- The node id counts only from the proof on: nobody keeps a node out by saying its name first.
- A node is in once. Before the commit its first connection wins. After it the newest does, if it shows the key that the
  membership pins: that node has lost its old line, though we may not have noticed.
- The first membership is committed once, with epoch 1, as soon as `size` candidates are in and show their certificates:
  whoever hears of it can dial everybody in it. Launchers do not count, nor those who came too early and wait to join.
  From then on it is the members who decide who is here, and `FormedCluster` that follows. Until all of them are
  connected (`Starting`), the loss of one of them is the end of the whole cluster.
- Every event costs the same however large the world is, but for a change of the membership, which is paid for once.
"""

from __future__ import annotations

from typing import Final

from nexar.cluster.decisions.admission_events import (
    Action,
    Answered,
    Applied,
    BadMessage,
    ChildDied,
    Commit,
    Connected,
    Drop,
    Event,
    Fail,
    Gone,
    Greeted,
    Heard,
    Inquired,
    Knocked,
    Left,
    Note,
    NoteKind,
    Ready,
    Refuse,
    Reserved,
    RunFailed,
    Said,
    SendChallenge,
    Show,
    Start,
    StartFailed,
    Tell,
    Tick,
    Watched,
)
from nexar.cluster.decisions.authenticating import Joining, Onlookers, authenticate, greet
from nexar.cluster.decisions.compatibility import Compatibility
from nexar.cluster.decisions.door_rules import DoorRules
from nexar.cluster.decisions.formation import Formation
from nexar.cluster.decisions.formed_cluster import FormedCluster
from nexar.cluster.decisions.forming import Forming
from nexar.cluster.decisions.guest import Guest
from nexar.cluster.decisions.refusals import Refusal, Refusals, brief, brief_lines, last_line
from nexar.cluster.decisions.register import Register
from nexar.cluster.decisions.run_failures import RunFailures
from nexar.cluster.decisions.starting import Starting
from nexar.cluster.decisions.vote import Vote
from nexar.cluster.decisions.witness import Witness
from nexar.cluster.membership import MAX_MEMBERS, Attendant, Membership
from nexar.errors import InternalError, UsageError
from nexar.transport.pending_connections import PendingConnections, source_of
from nexar.types import NodeId, Rank, describe_peer, format_seconds
from nexar.wire.handshake import Hello
from nexar.wire.joining import MAX_LISTED, Progress, Started

_MAX_REASON: Final = 900
"""Characters of the reason why a cluster did not start."""
_DISBELIEVED: Final = "it left when it had seen the seed's proof, as a node with another ticket or token does"
_TOO_LATE: Final = "start all ranks at about the same time, or raise NEXAR_FORMATION_TIMEOUT_SECS"
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
        rules: DoorRules | None = None,
    ) -> None:
        """Form a cluster of `size` members until `started + formation_timeout`. `seed` is pinned by the membership.

        UsageError for a size that no cluster has.
        """
        if not 1 <= size <= MAX_MEMBERS:
            raise UsageError(f"a cluster of {size} members cannot be formed; allowed are 1 to {MAX_MEMBERS}")
        self.size = size
        self._rules = rules or DoorRules()
        self._deadline = started + formation_timeout
        self._formation_timeout = formation_timeout
        self._now = started  # of the event that is being dealt with
        self._failure = ""  # why the cluster will never form, once that is so
        self._formed: FormedCluster | None = None  # once it has
        self._starting: Starting | None = None  # from the commit until every member is connected
        self._compatibility = Compatibility(self._rules.clocks)
        self._guests: dict[int, Guest] = {}
        self._pending = PendingConnections(self._rules.max_pending, self._rules.auth_timeout, self._rules.choose)
        self._members: dict[NodeId, Guest] = {}
        self._launchers: dict[NodeId, Guest] = {}
        self._onlookers = Onlookers()
        self._refusals = Refusals()
        self._run_failures = RunFailures(self._launchers)
        self._forming: Forming | None = Forming(  # until it succeeds or fails
            Formation(cluster, size, seed),
            size,
            self._rules,
            members=self._members,
            launchers=self._launchers,
            refusals=self._refusals,
            compatibility=self._compatibility,
            note=self._note,
        )

    @classmethod
    def resumed(cls, membership: Membership, vote: Vote | None = None, *, rules: DoorRules | None = None) -> Admission:
        """The seed of a cluster that has formed, started again: those whom the membership pins may come back. `vote`:
        what it had kept of its last vote.
        """
        cluster, size, seed = membership.cluster, membership.size, membership.seed
        if seed is None:
            raise InternalError("a membership without a seed cannot be resumed by one")
        made = cls(cluster, size, started=0, formation_timeout=0, seed=seed, rules=rules)
        made._forming = None
        made._form(membership, vote)
        return made

    def _form(self, membership: Membership, vote: Vote | None = None) -> FormedCluster:
        register = Register(membership, elastic=self._rules.elastic, most=self._rules.most)
        witness = Witness(membership, vote=vote)
        self._formed = FormedCluster(
            register, witness, self._members, self._launchers, self._end, compatibility=self._compatibility
        )
        return self._formed

    @property
    def membership(self) -> Membership | None:
        """The newest that was committed here, or chosen by the members; None before."""
        return None if self._formed is None else self._formed.membership

    @property
    def elastic(self) -> bool:
        """Whether others may come in after the cluster has formed."""
        return self._rules.elastic

    @property
    def failed(self) -> bool:
        """The time for forming passed before everybody was there."""
        return self._forming is None and self._formed is None

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
        formation = None if self._forming is None else self._deadline
        start = None if self._starting is None else self._starting.deadline
        formed = None if self._formed is None else self._formed.due(now)
        deadlines = [each for each in (formation, start, formed, self._pending.next_deadline) if each is not None]
        return max(now, min(deadlines)) if deadlines else None

    def step(self, event: Event, now: float) -> list[Action]:
        """Take note of an event; what to do about it, in this order. The only method that changes anything.

        Events of a connection that has ended are ignored: they were under way when it did.
        """
        self._now = now
        return [*self._told(event, now), *self._settle_start(now)]

    def _told(self, event: Event, now: float) -> list[Action]:
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
            return self._refuse(guest, str(why), why.expelled, lines=why.lines, nobody_left=why.nobody_left)

    def _heard(self, guest: Guest, event: Heard) -> list[Action]:
        """Refusal if the guest has to go for it."""
        match event:
            case Greeted():
                actions = self._greeted(guest, event.hello)
            case Applied():
                actions = self._applied(guest, event)
            case Ready() | Connected() | StartFailed() | Inquired():
                actions = self._candidate_said(guest, event)
            case Reserved():
                actions = self._reserved(guest, event)
            case Watched():
                actions = self._watched(guest, event)
            case BadMessage():
                raise Refusal(event.reason)
            case Gone() | Left():
                actions = self._went(guest, event)
            case ChildDied() | RunFailed():
                actions = self._reported(guest, event)
            case Said() | Answered():
                actions = self._spoke(guest, event)
        return actions

    def _candidate_said(self, guest: Guest, event: Ready | Connected | StartFailed | Inquired) -> list[Action]:
        match event:
            case Ready():
                return self._ready(guest)
            case Inquired():
                return self._inquired(guest)
            case Connected() | StartFailed():
                return self._confirmed(guest, event)

    def _went(self, guest: Guest, event: Gone | Left) -> list[Action]:
        if isinstance(event, Gone) and guest.hello is not None and not (guest.fingerprint or guest.watches):
            reason = brief(f"{_DISBELIEVED} ({event.reason})")
            self._refusals.add(self._who(guest), reason)
            return self._end(guest, "refused", reason)
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
            return [knocked, *self._refuse_for_failure(guest)]
        placement = self._pending.enter(event.connection, source_of(event.address), now)
        if not placement.admitted:
            return [knocked, *self._drop(guest, _CROWDED)]
        displaced = placement.displaced
        dropped = [] if displaced is None else self._drop(self._guests[displaced], _CROWDED)
        return [*dropped, knocked]

    def _greeted(self, guest: Guest, hello: Hello) -> list[Action]:
        greet(guest, hello)
        self._pending.shorten(guest.connection, self._now + self._rules.proof_timeout)
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

    # ------------------------------------------------------------ forming, and after it

    def _applied(self, guest: Guest, event: Applied) -> list[Action]:
        hello = self._prove(guest, "candidate", event)
        if self._forming is None:
            return self._after().applied(guest, hello, event)
        return [*self._forming.applied(guest, hello, event), *self._settle(self._forming)]

    def _ready(self, guest: Guest) -> list[Action]:
        if self._forming is None:
            return self._after().ready(guest)
        self._forming.ready(guest)
        return self._settle(self._forming)

    def _reserved(self, guest: Guest, event: Reserved) -> list[Action]:
        hello, asked = self._prove(guest, "launcher", event), event.reservation
        if self._forming is None:
            after = self._after()
            returned = after.is_attendant(hello.node)
            actions, ranks = after.reserved(guest, hello, asked), None if returned else range(0)
        else:
            actions = self._forming.reserved(guest, hello, asked)
            ranks = self._forming.formation.ranks_of(hello.node)
        return [*actions, *self._run_failures.reserved(guest, ranks)]

    def _reported(self, guest: Guest, event: ChildDied | RunFailed) -> list[Action]:
        """Of launchers."""
        if isinstance(event, RunFailed):
            return self._run_failures.report(guest, event.failure)
        return self._child_died(guest, event)

    def _child_died(self, guest: Guest, event: ChildDied) -> list[Action]:
        if self._forming is None:
            actions = self._after().child_died(guest, event)
            if self._starting is not None and not event.well:
                self._starting.lose(event.rank, last_line(event.cause))
            return actions
        return [*self._forming.child_died(guest, event), *self._settle(self._forming)]

    def _after(self) -> FormedCluster:
        if self._formed is None:
            raise InternalError("somebody spoke after the formation had failed and all connections had ended")
        return self._formed

    def _settle(self, forming: Forming) -> list[Action]:
        """See to it that it has formed, or never will; nothing while neither is so."""
        if forming.failure:
            return self._fail(forming)
        return self._commit(forming) if forming.complete else []

    def _commit(self, forming: Forming) -> list[Action]:
        self._forming = None
        formed = self._form(forming.formation.make_membership())
        confirming = [node for node in self._members if node in forming.confirming]
        if confirming:
            self._starting = Starting(formed.membership, confirming, self._now, self._deadline)
        commit = Commit(formed.membership, self._insiders(), frozenset(self._members), starts=not confirming)
        return [commit, Note("committed", reason=f"{self.size} members"), *formed.take_over(forming.early)]

    def _inquired(self, guest: Guest) -> list[Action]:
        """Of who is no candidate, or after the commit, it is no news."""
        if self._forming is None or guest.node is None or self._members.get(guest.node) is not guest:
            return []
        listed = dict(list(self._refusals.listed().items())[-MAX_LISTED:])
        missing, reports = self._forming.formation.missing(MAX_LISTED), self._forming.formation.is_first(guest.node)
        progress = Progress(len(self._members), self.size, missing, listed, reports)
        return [Tell(progress, (guest.connection,))]

    # ------------------------------------------------------------ starting

    def _confirmed(self, guest: Guest, event: Connected | StartFailed) -> list[Action]:
        """A member says whether it is connected. Refusal from who is none. Who comes back later is told again."""
        if self._formed is None or guest.node is None or self._members.get(guest.node) is not guest:
            raise Refusal("it spoke like a member, and is none")
        if self._starting is None:
            return [Tell(Started(), (guest.connection,))] if isinstance(event, Connected) else []
        if isinstance(event, Connected):
            self._starting.connected(guest.node)
        else:
            self._starting.fail(event.reason)
        return []

    def _settle_start(self, now: float) -> list[Action]:
        """See to it that the cluster has started, or never will; nothing while neither is so."""
        starting, formed = self._starting, self._formed
        if starting is None or formed is None:
            return []
        if formed.membership.epoch > 1:
            starting.fail("the membership changed before the cluster had started")
        starting.expire(now)
        if starting.failure:
            return self._fail_start(starting.failure)
        if not starting.complete:
            return []
        self._starting = None
        connections = tuple(guest.connection for guest in self._members.values())
        start = Start(formed.membership, connections, frozenset(self._members))
        return [start, Note("started", reason=f"{self.size} members")]

    def _fail_start(self, reason: str) -> list[Action]:
        """Everybody is told, also who waits to join: there is no cluster any more."""
        self._failure = brief_lines(reason, _MAX_REASON)
        joined = tuple(self._who(guest) for guest in self._members.values())
        self._starting = self._formed = None
        strangers = [guest for guest in self._guests.values() if not guest.fingerprint]
        insiders = tuple(guest.connection for guest in self._guests.values() if guest.fingerprint)
        refused = [action for guest in strangers for action in self._refuse_for_failure(guest)]
        self._forget_all()
        return [*refused, *self._failed(joined, insiders, self._failure)]

    def _fail(self, forming: Forming) -> list[Action]:
        """Everybody is told: those who are in, the facts; the others, and who only looks, that it is over."""
        self._failure = f"{forming.failure}\n{_TOO_LATE}" if forming.expired else forming.failure
        insiders = (*self._insiders(), *forming.early.clear())
        flaw_of = forming.formation.flaw_of
        joined = tuple(self._who(guest) + flaw_of(node) for node, guest in self._members.items())
        self._forming = None  # nobody takes the place of those who go now
        strangers = [guest for guest in self._guests.values() if not guest.fingerprint]
        refused = [action for guest in strangers for action in self._refuse_for_failure(guest)]
        self._forget_all()
        return [*refused, *self._failed(joined, insiders, "" if forming.expired else self._failure)]

    def _forget_all(self) -> None:
        self._guests.clear()
        self._members.clear()
        self._launchers.clear()

    def _failed(self, joined: tuple[str, ...], insiders: tuple[int, ...], reason: str) -> list[Action]:
        listed, count = self._refusals.listed(), self._refusals.count
        elapsed = self._formation_timeout - max(0.0, self._deadline - self._now)
        fail = Fail(joined, self.size, listed, count, elapsed, insiders, reason)
        why, *further = self._failure.split("\n")
        line = "; ".join((f"{why}, {len(joined)} of {self.size} joined", *further))
        return [fail, Note("failed", reason=brief(line, _MAX_REASON))]

    # ------------------------------------------------------------ time

    def _tick(self, now: float) -> list[Action]:
        expired = [self._guests[connection] for connection in self._pending.expired(now)]
        actions = [action for guest in expired for action in self._drop(guest, self._what_was_late(guest))]
        if self._forming is not None and now >= self._deadline:
            self._forming.expire(self._formation_timeout)
            actions += self._fail(self._forming)
        return actions if self._formed is None else actions + self._formed.tick(now)

    def _what_was_late(self, guest: Guest) -> str:
        if guest.hello is not None:
            return f"it did not prove within {format_seconds(self._rules.proof_timeout)} of its hello that it may join"
        return f"it did not authenticate within {format_seconds(self._rules.auth_timeout)}"

    # ------------------------------------------------------------ ends

    def _refuse(
        self, guest: Guest, reason: str, expelled: int = 0, *, lines: str = "", nobody_left: bool = False
    ) -> list[Action]:
        """`lines`: what the guest is told, if that has more lines than one."""
        reason = brief(reason)
        self._refusals.add(self._who(guest), reason)
        refuse = Refuse(guest.connection, lines or reason, expelled, nobody_left)
        return [refuse, *self._end(guest, "refused", reason)]

    def _refuse_for_failure(self, guest: Guest) -> list[Action]:
        return self._refuse(guest, self._failure.replace("\n", "; "), lines=self._failure)

    def _drop(self, guest: Guest, reason: str) -> list[Action]:
        self._refusals.add(self._who(guest), reason)
        return [Drop(guest.connection, reason), *self._end(guest, "dropped", reason)]

    def _end(self, guest: Guest, kind: NoteKind, reason: str) -> list[Action]:
        note = self._note(kind, guest, reason)
        if self._starting is not None and guest.node is not None and self._members.get(guest.node) is guest:
            self._starting.lose(note.rank, reason or "it left")
        del self._guests[guest.connection]
        self._pending.leave(guest.connection)
        self._onlookers.leave(guest)
        if self._formed is not None:
            return [note, *self._formed.withdrawn(guest, kind, reason, self._now)]
        if self._forming is None:
            return [note]
        self._forming.withdrawn(guest)
        return [note, *self._settle(self._forming)]

    # ------------------------------------------------------------ words

    def _insiders(self) -> tuple[int, ...]:
        return tuple(guest.connection for guest in (*self._members.values(), *self._launchers.values()))

    def _rank(self, guest: Guest) -> Rank | None:
        """What it has claimed or holds; nobody has a rank by its hello alone."""
        if guest.node is None or self._members.get(guest.node) is not guest:
            return None
        book = self.membership if self._forming is None else self._forming.formation
        return None if book is None else book.rank_of(guest.node)

    def _who(self, guest: Guest) -> str:
        return describe_peer(self._rank(guest), guest.node, guest.address)

    def _note(self, kind: NoteKind, guest: Guest, reason: str = "") -> Note:
        return Note(kind, guest.address, guest.node, self._rank(guest), brief(reason))
