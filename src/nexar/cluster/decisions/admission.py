"""The time between the commit of the first membership and its start. Pure.

Law: the cluster starts when every member that confirms has said that it is connected, and fails when one of them is
lost, says that it cannot connect, or does not answer in time. Both happen once, and the seed tells every member. So
`init()` returns the whole world on every rank, or raises on every rank.

Chooses the failure that stops a run on all hosts, from the reports of the launchers. Pure.

The first failure that is not the consequence of another one is chosen, for good. A consequence is chosen until then:
the rank that caused it may take longer to end, or its host may be slow.

The seed's mind: whom to let in, and when everybody is there. Pure.

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
- The time for forming, and for connecting, extends by the seed's own delay (`own_delay`), which is bounded: a seed that
  gets too little CPU hears late of ranks that came in time.
- Every event costs the same however large the world is, but for a change of the membership, which is paid for once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from nexar.cluster.decisions.admission_checks import (
    AdmissionLimits,
    Compatibility,
    JoinConnectionState,
    JoinRole,
    Observers,
    authenticate,
    check_hello,
)
from nexar.cluster.decisions.admission_events import (
    AdmissionAction,
    AdmissionEvent,
    AdmissionTick,
    BadMessage,
    BoardRequested,
    ChildReported,
    CommitMembership,
    ConnectionEnded,
    ConnectionOpened,
    DropConnection,
    FailFormation,
    HelloReceived,
    JoinerReady,
    JoinRequested,
    LeaveReceived,
    MemberAnswered,
    MemberConnected,
    MemberMessageReceived,
    NotifyConnections,
    ProgressRequested,
    RanksRequested,
    ReceivedEvent,
    RefuseConnection,
    RunFailureReported,
    SeedEvent,
    SeedEventKind,
    SendChallenge,
    ShowBoard,
    StartCluster,
    StartFailureReported,
)
from nexar.cluster.decisions.formation import DraftMembership, Forming
from nexar.cluster.decisions.formed_cluster import FormedCluster, MemberRegister
from nexar.cluster.decisions.paxos import Vote
from nexar.cluster.decisions.refusals import Refusal, RefusalLog, brief, brief_lines, last_line
from nexar.cluster.decisions.seed_voter import SeedVoter
from nexar.cluster.membership import MAX_MEMBERS, Membership, PinnedNode
from nexar.errors import InternalError, UsageError, headed, list_ranks
from nexar.transport.unverified import PendingConnections, source_of
from nexar.types import NodeId, Rank, describe_peer, format_seconds
from nexar.wire.hello import Hello
from nexar.wire.join import MAX_LISTED, FormationProgress, RunFailed, Started

START_TIMEOUT: Final = 10.0
"""Seconds that members have at least to connect, however late the last of them joined."""


class PendingStart:
    """Which members of the first membership are not connected yet."""

    def __init__(self, membership: Membership, confirming: Iterable[NodeId], now: float, deadline: float) -> None:
        """`confirming`: members that say when they are connected. The others count as connected."""
        self._membership = membership
        self._awaited: dict[NodeId, None] = dict.fromkeys(confirming)
        self._began = now
        self.deadline: Final = max(deadline, now + START_TIMEOUT)
        self.failure = ""
        """Why the cluster will not start; empty: it may."""

    @property
    def complete(self) -> bool:
        """Every member is connected."""
        return not self._awaited and not self.failure

    def connected(self, node: NodeId) -> None:
        """This member has its links. Idempotent."""
        self._awaited.pop(node, None)

    def fail(self, reason: str) -> None:
        """The cluster will not start. The first reason stays."""
        self.failure = self.failure or reason

    def lose(self, rank: Rank | None, reason: str) -> None:
        """This member is gone, whether it was connected or not."""
        self.fail(headed(f"rank {rank} was lost before the cluster had started", reason))

    def expire(self, now: float, own_delay: float = 0.0) -> None:
        """Fail if the time is up. It extends by `own_delay`: a seed that runs slowly hears of the members late."""
        if now >= self.deadline + own_delay and self._awaited:
            ranks = sorted(rank for node in self._awaited if (rank := self._membership.rank_of(node)) is not None)
            span = format_seconds(now - self._began)
            self.fail(f"{list_ranks(ranks)} did not connect to the other ranks within {span}")


class RunFailures:
    """Of one cluster. `launchers`: those that are connected, by node."""

    def __init__(self, launchers: Mapping[NodeId, JoinConnectionState]) -> None:
        self._launchers = launchers
        self._ranks: dict[NodeId, range] = {}  # what each launcher has reserved; of some it is not known
        self._chosen: RunFailed | None = None

    def reserved(self, joiner: JoinConnectionState, ranks: range | None) -> list[AdmissionAction]:
        """A launcher has come, or is back: it is told of the failure that was chosen before. `ranks`: those of its
        children; None: as before, or not known, for the seed was started again since.
        """
        if joiner.node is not None and ranks is not None:
            self._ranks[joiner.node] = ranks
        return [] if self._chosen is None else [NotifyConnections(self._chosen, (joiner.connection,))]

    def report(self, joiner: JoinConnectionState, failure: RunFailed) -> list[AdmissionAction]:
        """A launcher reports a failure. All launchers are told of the chosen one, if it is new; otherwise the reporter
        alone is. Refusal if the guest is not a launcher, or the rank not its child, as far as that is known.
        """
        if joiner.node is None or self._launchers.get(joiner.node) is not joiner:
            raise Refusal("it reported that the run failed, and is no launcher")
        if failure.rank not in self._ranks.get(joiner.node, (failure.rank,)):
            raise Refusal(f"it reported that rank {failure.rank} failed, which is not its child")
        if self._chosen is not None and (failure.consequence or not self._chosen.consequence):
            return [NotifyConnections(self._chosen, (joiner.connection,))]
        self._chosen = failure
        note = SeedEvent("run failed", joiner.address, joiner.node, failure.rank, failure.cause)
        return [note, NotifyConnections(failure, tuple(each.connection for each in self._launchers.values()))]


_MAX_REASON: Final = 900
"""Characters of the reason why a cluster did not start."""
_PROOF_REJECTED: Final = "it left when it had seen the seed's proof, as a node with another ticket or token does"
_TOO_LATE: Final = "start all ranks at about the same time, or raise NEXAR_FORMATION_TIMEOUT_SECS"
_TOO_MANY_PENDING: Final = "too many connections wait to authenticate; try again"


class Admission:
    """Told of everything that happens at the door by `step`, and of nothing else."""

    def __init__(
        self,
        cluster: str,
        size: int,
        *,
        started: float,
        formation_timeout: float,
        seed: PinnedNode,
        limits: AdmissionLimits | None = None,
    ) -> None:
        """Form a cluster of `size` members until `started + formation_timeout`. `seed` is pinned by the membership.

        UsageError for a size that no cluster has.
        """
        if not 1 <= size <= MAX_MEMBERS:
            raise UsageError(f"a cluster of {size} members cannot be formed; allowed are 1 to {MAX_MEMBERS}")
        self.size = size
        self._limits = limits or AdmissionLimits()
        self._started = started
        self._deadline = started + formation_timeout
        self._formation_timeout = formation_timeout
        self._extension = 0.0  # of the time for forming, once that is over
        self._now = started  # of the event that is being dealt with
        self._failure = ""  # why the cluster will never form, once that is so
        self._formed: FormedCluster | None = None  # once it has
        self._starting: PendingStart | None = None  # from the commit until every member is connected
        self._compatibility = Compatibility(self._limits.clocks)
        self._joiners: dict[int, JoinConnectionState] = {}
        self._pending = PendingConnections(self._limits.max_pending, self._limits.auth_timeout, self._limits.choose)
        self._members: dict[NodeId, JoinConnectionState] = {}
        self._launchers: dict[NodeId, JoinConnectionState] = {}
        self._observers = Observers()
        self._refusals = RefusalLog()
        self._run_failures = RunFailures(self._launchers)
        self._forming: Forming | None = Forming(  # until it succeeds or fails
            DraftMembership(cluster, size, seed),
            size,
            self._limits,
            members=self._members,
            launchers=self._launchers,
            refusals=self._refusals,
            compatibility=self._compatibility,
            note=self._note,
        )

    @classmethod
    def resumed(
        cls, membership: Membership, vote: Vote | None = None, *, limits: AdmissionLimits | None = None
    ) -> Admission:
        """The seed of a cluster that has formed, started again: those whom the membership pins may come back. `vote`:
        what it had kept of its last vote.
        """
        cluster, size, seed = membership.cluster, membership.size, membership.seed
        if seed is None:
            raise InternalError("a membership without a seed cannot be resumed by one")
        made = cls(cluster, size, started=0, formation_timeout=0, seed=seed, limits=limits)
        made._forming = None
        made._form(membership, vote)
        return made

    def _form(self, membership: Membership, vote: Vote | None = None) -> FormedCluster:
        register = MemberRegister(membership, elastic=self._limits.elastic, most=self._limits.most)
        seed_voter = SeedVoter(membership, vote=vote)
        self._formed = FormedCluster(
            register, seed_voter, self._members, self._launchers, self._end, compatibility=self._compatibility
        )
        return self._formed

    @property
    def membership(self) -> Membership | None:
        """The newest that was committed here, or chosen by the members; None before."""
        return None if self._formed is None else self._formed.membership

    @property
    def elastic(self) -> bool:
        """Whether others may come in after the cluster has formed."""
        return self._limits.elastic

    @property
    def failed(self) -> bool:
        """The time for forming passed before everybody was there."""
        return self._forming is None and self._formed is None

    @property
    def forms(self) -> bool:
        """Not every member is connected yet, and the time for that is not over."""
        return self._forming is not None or self._starting is not None

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
        delay = self._limits.own_delay()
        formation = None if self._forming is None else self._deadline + delay
        start = None if self._starting is None else self._starting.deadline + delay
        formed = None if self._formed is None else self._formed.due(now)
        deadlines = [each for each in (formation, start, formed, self._pending.next_deadline) if each is not None]
        return max(now, min(deadlines)) if deadlines else None

    def step(self, event: AdmissionEvent, now: float) -> list[AdmissionAction]:
        """Take note of an event; what to do about it, in this order. The only method that changes anything.

        Events of a connection that has ended are ignored: they were under way when it did.
        """
        self._now = now
        return [*self._told(event, now), *self._settle_start(now)]

    def _told(self, event: AdmissionEvent, now: float) -> list[AdmissionAction]:
        if isinstance(event, ConnectionOpened):
            return self._knocked(event, now)
        if isinstance(event, AdmissionTick):
            return self._tick(now)
        joiner = self._joiners.get(event.connection)
        if joiner is None:
            return []
        try:
            return self._heard(joiner, event)
        except Refusal as why:
            return self._refuse(joiner, str(why), why.expelled, lines=why.lines, nobody_left=why.nobody_left)

    def _heard(self, joiner: JoinConnectionState, event: ReceivedEvent) -> list[AdmissionAction]:
        """Refusal if the guest has to go for it."""
        match event:
            case HelloReceived():
                actions = self._greeted(joiner, event.hello)
            case JoinRequested():
                actions = self._applied(joiner, event)
            case JoinerReady() | MemberConnected() | StartFailureReported() | ProgressRequested():
                actions = self._candidate_said(joiner, event)
            case RanksRequested():
                actions = self._reserved(joiner, event)
            case BoardRequested():
                actions = self._watched(joiner, event)
            case BadMessage():
                raise Refusal(event.reason)
            case ConnectionEnded() | LeaveReceived():
                actions = self._went(joiner, event)
            case ChildReported() | RunFailureReported():
                actions = self._reported(joiner, event)
            case MemberMessageReceived() | MemberAnswered():
                actions = self._spoke(joiner, event)
        return actions

    def _candidate_said(
        self,
        joiner: JoinConnectionState,
        event: JoinerReady | MemberConnected | StartFailureReported | ProgressRequested,
    ) -> list[AdmissionAction]:
        match event:
            case JoinerReady():
                return self._ready(joiner)
            case ProgressRequested():
                return self._inquired(joiner)
            case MemberConnected() | StartFailureReported():
                return self._confirmed(joiner, event)

    def _went(self, joiner: JoinConnectionState, event: ConnectionEnded | LeaveReceived) -> list[AdmissionAction]:
        if (
            isinstance(event, ConnectionEnded)
            and joiner.hello is not None
            and not (joiner.fingerprint or joiner.watches)
        ):
            reason = brief(f"{_PROOF_REJECTED} ({event.reason})")
            self._refusals.add(self._who(joiner), reason)
            return self._end(joiner, "refused", reason)
        if isinstance(event, ConnectionEnded):
            return self._end(joiner, "gone", event.reason)
        return [DropConnection(joiner.connection, "it took its leave"), *self._end(joiner, "left", event.reason)]

    def _spoke(
        self, joiner: JoinConnectionState, event: MemberMessageReceived | MemberAnswered
    ) -> list[AdmissionAction]:
        if self._formed is None:
            raise Refusal("it spoke like a member, and there are none yet")
        if isinstance(event, MemberMessageReceived):
            return self._formed.said(joiner, event, self._now)
        return self._formed.answered(joiner, event, self._now)

    # ------------------------------------------------------------ strangers

    def _knocked(self, event: ConnectionOpened, now: float) -> list[AdmissionAction]:
        if event.connection in self._joiners:
            raise InternalError(f"connection {event.connection} knocked twice")
        joiner = self._joiners[event.connection] = JoinConnectionState(event.connection, event.address)
        knocked = SeedEvent("knocked", event.address)
        if self.failed:
            return [knocked, *self._refuse_for_failure(joiner)]
        placement = self._pending.enter(event.connection, source_of(event.address), now)
        if not placement.admitted:
            return [knocked, *self._drop(joiner, _TOO_MANY_PENDING)]
        displaced = placement.displaced
        dropped = [] if displaced is None else self._drop(self._joiners[displaced], _TOO_MANY_PENDING)
        return [*dropped, knocked]

    def _greeted(self, joiner: JoinConnectionState, hello: Hello) -> list[AdmissionAction]:
        check_hello(joiner, hello)
        self._pending.shorten(joiner.connection, self._now + self._limits.proof_timeout)
        return [SendChallenge(joiner.connection)]

    def _prove(
        self, joiner: JoinConnectionState, role: JoinRole, event: JoinRequested | RanksRequested | BoardRequested
    ) -> Hello:
        """Its hello, now that it is no stranger any more. Refusal if this is not an honest `role`."""
        hello = authenticate(joiner, role, event)
        self._pending.leave(joiner.connection)
        return hello

    def _watched(self, joiner: JoinConnectionState, event: BoardRequested) -> list[AdmissionAction]:
        self._prove(joiner, "onlooker", event)
        self._observers.enter(joiner)
        return [ShowBoard(joiner.connection), self._note("watching", joiner)]

    # ------------------------------------------------------------ forming, and after it

    def _applied(self, joiner: JoinConnectionState, event: JoinRequested) -> list[AdmissionAction]:
        hello = self._prove(joiner, "candidate", event)
        if self._forming is None:
            return self._after().applied(joiner, hello, event)
        return [*self._forming.applied(joiner, hello, event), *self._settle(self._forming)]

    def _ready(self, joiner: JoinConnectionState) -> list[AdmissionAction]:
        if self._forming is None:
            return self._after().ready(joiner)
        self._forming.ready(joiner)
        return self._settle(self._forming)

    def _reserved(self, joiner: JoinConnectionState, event: RanksRequested) -> list[AdmissionAction]:
        hello, asked = self._prove(joiner, "launcher", event), event.reservation
        if self._forming is None:
            after = self._after()
            returned = after.is_launcher(hello.node)
            actions, ranks = after.reserved(joiner, hello, asked), None if returned else range(0)
        else:
            actions = self._forming.reserved(joiner, hello, asked)
            ranks = self._forming.formation.ranks_of(hello.node)
        return [*actions, *self._run_failures.reserved(joiner, ranks)]

    def _reported(
        self, joiner: JoinConnectionState, event: ChildReported | RunFailureReported
    ) -> list[AdmissionAction]:
        """Of launchers."""
        if isinstance(event, RunFailureReported):
            return self._run_failures.report(joiner, event.failure)
        return self._child_died(joiner, event)

    def _child_died(self, joiner: JoinConnectionState, event: ChildReported) -> list[AdmissionAction]:
        if self._forming is None:
            actions = self._after().child_died(joiner, event)
            if self._starting is not None and not event.well:
                self._starting.lose(event.rank, last_line(event.cause))
            return actions
        return [*self._forming.child_died(joiner, event), *self._settle(self._forming)]

    def _after(self) -> FormedCluster:
        if self._formed is None:
            raise InternalError("somebody spoke after the formation had failed and all connections had ended")
        return self._formed

    def _settle(self, forming: Forming) -> list[AdmissionAction]:
        """See to it that it has formed, or never will; nothing while neither is so."""
        if forming.failure:
            return self._fail(forming)
        return self._commit(forming) if forming.complete else []

    def _commit(self, forming: Forming) -> list[AdmissionAction]:
        self._forming = None
        formed = self._form(forming.formation.make_membership())
        confirming = [node for node in self._members if node in forming.confirming]
        if confirming:
            self._starting = PendingStart(formed.membership, confirming, self._now, self._deadline)
        commit = CommitMembership(formed.membership, self._insiders(), frozenset(self._members), starts=not confirming)
        return [commit, SeedEvent("committed", reason=f"{self.size} members"), *formed.take_over(forming.early)]

    def _inquired(self, joiner: JoinConnectionState) -> list[AdmissionAction]:
        """Of who is no candidate, or after the commit, it is no news."""
        if self._forming is None or joiner.node is None or self._members.get(joiner.node) is not joiner:
            return []
        listed = dict(list(self._refusals.listed().items())[-MAX_LISTED:])
        missing, reports = self._forming.formation.missing(MAX_LISTED), self._forming.formation.is_first(joiner.node)
        progress = FormationProgress(len(self._members), self.size, missing, listed, reports)
        return [NotifyConnections(progress, (joiner.connection,))]

    # ------------------------------------------------------------ starting

    def _confirmed(
        self, joiner: JoinConnectionState, event: MemberConnected | StartFailureReported
    ) -> list[AdmissionAction]:
        """A member says whether it is connected. Refusal from who is none. Who comes back later is told again."""
        if self._formed is None or joiner.node is None or self._members.get(joiner.node) is not joiner:
            raise Refusal("it spoke like a member, and is none")
        if self._starting is None:
            return [NotifyConnections(Started(), (joiner.connection,))] if isinstance(event, MemberConnected) else []
        if isinstance(event, MemberConnected):
            self._starting.connected(joiner.node)
        else:
            self._starting.fail(event.reason)
        return []

    def _settle_start(self, now: float) -> list[AdmissionAction]:
        """See to it that the cluster has started, or never will; nothing while neither is so."""
        starting, formed = self._starting, self._formed
        if starting is None or formed is None:
            return []
        if formed.membership.epoch > 1:
            starting.fail("the membership changed before the cluster had started")
        starting.expire(now, self._limits.own_delay())
        if starting.failure:
            return self._fail_start(starting.failure)
        if not starting.complete:
            return []
        self._starting = None
        connections = tuple(joiner.connection for joiner in self._members.values())
        start = StartCluster(formed.membership, connections, frozenset(self._members))
        return [start, SeedEvent("started", reason=f"{self.size} members")]

    def _fail_start(self, reason: str) -> list[AdmissionAction]:
        """Everybody is told, also who waits to join: there is no cluster any more."""
        self._failure = brief_lines(reason, _MAX_REASON)
        joined = tuple(self._who(joiner) for joiner in self._members.values())
        self._starting = self._formed = None
        strangers = [joiner for joiner in self._joiners.values() if not joiner.fingerprint]
        insiders = tuple(joiner.connection for joiner in self._joiners.values() if joiner.fingerprint)
        refused = [action for joiner in strangers for action in self._refuse_for_failure(joiner)]
        self._forget_all()
        return [*refused, *self._failed(joined, insiders, self._failure)]

    def _fail(self, forming: Forming) -> list[AdmissionAction]:
        """Everybody is told: those who are in, the facts; the others, and who only looks, that it is over."""
        self._failure = f"{forming.failure}\n{_TOO_LATE}" if forming.expired else forming.failure
        insiders = (*self._insiders(), *forming.early.clear())
        flaw_of = forming.formation.flaw_of
        joined = tuple(self._who(joiner) + flaw_of(node) for node, joiner in self._members.items())
        self._forming = None  # nobody takes the place of those who go now
        strangers = [joiner for joiner in self._joiners.values() if not joiner.fingerprint]
        refused = [action for joiner in strangers for action in self._refuse_for_failure(joiner)]
        self._forget_all()
        return [*refused, *self._failed(joined, insiders, "" if forming.expired else self._failure)]

    def _forget_all(self) -> None:
        self._joiners.clear()
        self._members.clear()
        self._launchers.clear()

    def _failed(self, joined: tuple[str, ...], insiders: tuple[int, ...], reason: str) -> list[AdmissionAction]:
        listed, count = self._refusals.listed(), self._refusals.count
        elapsed = min(self._now - self._started, self._formation_timeout + self._extension)
        fail = FailFormation(joined, self.size, listed, count, elapsed, insiders, reason)
        why, *further = self._failure.split("\n")
        line = "; ".join((f"{why}, {len(joined)} of {self.size} joined", *further))
        return [fail, SeedEvent("failed", reason=brief(line, _MAX_REASON))]

    # ------------------------------------------------------------ time

    def _tick(self, now: float) -> list[AdmissionAction]:
        expired = [self._joiners[connection] for connection in self._pending.expired(now)]
        actions = [action for joiner in expired for action in self._drop(joiner, self._what_was_late(joiner))]
        delay = self._limits.own_delay()
        if self._forming is not None and now >= self._deadline + delay:
            self._extension = delay
            self._forming.expire(self._formation_timeout + delay)
            actions += self._fail(self._forming)
        return actions if self._formed is None else actions + self._formed.tick(now)

    def _what_was_late(self, joiner: JoinConnectionState) -> str:
        if joiner.hello is not None:
            return f"it did not prove within {format_seconds(self._limits.proof_timeout)} of its hello that it may join"
        return f"it did not authenticate within {format_seconds(self._limits.auth_timeout)}"

    # ------------------------------------------------------------ ends

    def _refuse(
        self, joiner: JoinConnectionState, reason: str, expelled: int = 0, *, lines: str = "", nobody_left: bool = False
    ) -> list[AdmissionAction]:
        """`lines`: what the guest is told, if that has more lines than one."""
        reason = brief(reason)
        self._refusals.add(self._who(joiner), reason)
        refuse = RefuseConnection(joiner.connection, lines or reason, expelled, nobody_left)
        return [refuse, *self._end(joiner, "refused", reason)]

    def _refuse_for_failure(self, joiner: JoinConnectionState) -> list[AdmissionAction]:
        return self._refuse(joiner, self._failure.replace("\n", "; "), lines=self._failure)

    def _drop(self, joiner: JoinConnectionState, reason: str) -> list[AdmissionAction]:
        self._refusals.add(self._who(joiner), reason)
        return [DropConnection(joiner.connection, reason), *self._end(joiner, "dropped", reason)]

    def _end(self, joiner: JoinConnectionState, kind: SeedEventKind, reason: str) -> list[AdmissionAction]:
        note = self._note(kind, joiner, reason)
        if self._starting is not None and joiner.node is not None and self._members.get(joiner.node) is joiner:
            self._starting.lose(note.rank, reason or "it left")
        del self._joiners[joiner.connection]
        self._pending.leave(joiner.connection)
        self._observers.leave(joiner)
        if self._formed is not None:
            return [note, *self._formed.withdrawn(joiner, kind, reason, self._now)]
        if self._forming is None:
            return [note]
        self._forming.withdrawn(joiner)
        return [note, *self._settle(self._forming)]

    # ------------------------------------------------------------ words

    def _insiders(self) -> tuple[int, ...]:
        return tuple(joiner.connection for joiner in (*self._members.values(), *self._launchers.values()))

    def _rank(self, joiner: JoinConnectionState) -> Rank | None:
        """What it has claimed or holds; nobody has a rank by its hello alone."""
        if joiner.node is None or self._members.get(joiner.node) is not joiner:
            return None
        book = self.membership if self._forming is None else self._forming.formation
        return None if book is None else book.rank_of(joiner.node)

    def _who(self, joiner: JoinConnectionState) -> str:
        return describe_peer(self._rank(joiner), joiner.node, joiner.address)

    def _note(self, kind: SeedEventKind, joiner: JoinConnectionState, reason: str = "") -> SeedEvent:
        return SeedEvent(kind, joiner.address, joiner.node, self._rank(joiner), brief(reason))
