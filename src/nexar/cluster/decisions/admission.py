"""Admission at the seed: connections before the proof, formation, start, and failures of the run. Pure.

    opened ──hello──→ challenged ──proof──→ admitted (candidate or launcher) ──world full──→ member, launcher
       │                  │                    │
       └──── timeout, no room, error, closed ──┴──→ ended, once

Invariants:
- Before its proof a connection takes one pending place and changes nothing else. So unauthenticated peers affect only
  the bounded list of refusals.
- A node id counts only after the proof: nobody keeps a node out by using its id first.
- A node is admitted once. Before the commit its first connection wins, afterwards the newest with the pinned key: the
  node may have lost its old connection unnoticed.
- The first membership is committed once, with epoch 1, when `size` candidates are admitted and show their certificates:
  every receiver can dial every member. Launchers and early joiners do not count. From then on the members decide and
  `FormedCluster` follows.
- The cluster starts when every confirming member is connected. It fails if one is lost, cannot connect or is late.
  Every member is informed. So `init()` returns on every rank or raises on every rank.
- The deadlines for forming and connecting extend by the seed's own delay, which is bounded: a seed short of CPU notices
  late that ranks came in time.
- An event costs O(1) in the size of the world, except a membership change.
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
from nexar.cluster.decisions.refusals import Refusal, RefusalCode, RefusalLog, brief, brief_lines, last_line
from nexar.cluster.decisions.seed_voter import SeedVoter
from nexar.cluster.membership import MAX_MEMBERS, Membership, PinnedNode
from nexar.errors import InternalError, UsageError, list_ranks, with_heading
from nexar.transport.unverified import PendingConnections, source_of
from nexar.types import NodeId, Rank, describe_peer, format_seconds
from nexar.wire.hello import Hello
from nexar.wire.join import MAX_LISTED, FormationProgress, RunFailed, Started

START_TIMEOUT: Final = 10.0  # Seconds that members have at least to connect, however late the last of them joined.


class PendingStart:
    """Members of the first membership that are not connected yet."""

    def __init__(self, membership: Membership, confirming: Iterable[NodeId], now: float, deadline: float) -> None:
        """Members outside `confirming` count as connected."""
        self._membership = membership
        self._awaited: dict[NodeId, None] = dict.fromkeys(confirming)
        self._began = now
        self.deadline: Final = max(deadline, now + START_TIMEOUT)
        self.failure = ""  # why the cluster will not start; empty if it may

    @property
    def complete(self) -> bool:
        return not self._awaited and not self.failure

    def connected(self, node: NodeId) -> None:
        self._awaited.pop(node, None)

    def fail(self, reason: str) -> None:
        self.failure = self.failure or reason

    def member_lost(self, rank: Rank | None, reason: str) -> None:
        self.fail(with_heading(f"rank {rank} was lost before the cluster had started", reason))

    def expire(self, now: float, own_delay: float = 0.0) -> None:
        if now >= self.deadline + own_delay and self._awaited:
            ranks = sorted(rank for node in self._awaited if (rank := self._membership.rank_of(node)) is not None)
            span = format_seconds(now - self._began)
            self.fail(f"{list_ranks(ranks)} did not connect to the other ranks within {span}")


class RunFailures:
    """Chooses the failure that stops a run on all hosts: the first that is no consequence of another; until then a
    consequence, because the rank that caused it may end later.
    """

    def __init__(self, launchers: Mapping[NodeId, JoinConnectionState]) -> None:
        self._launchers = launchers
        self._ranks: dict[NodeId, range] = {}  # the reservation of each launcher, if known
        self._chosen: RunFailed | None = None

    def reserved(self, joiner: JoinConnectionState, ranks: range | None) -> list[AdmissionAction]:
        """`ranks`: those of the launcher's children; None if unchanged or unknown."""
        if joiner.node is not None and ranks is not None:
            self._ranks[joiner.node] = ranks
        return [] if self._chosen is None else [NotifyConnections(self._chosen, (joiner.connection,))]

    def report(self, joiner: JoinConnectionState, failure: RunFailed) -> list[AdmissionAction]:
        """Notifies all launchers of a new choice, otherwise only the reporter. Raises Refusal unless it is the child's
        launcher.
        """
        if joiner.node is None or self._launchers.get(joiner.node) is not joiner:
            raise Refusal("it reported that the run failed, but is no launcher")
        if failure.rank not in self._ranks.get(joiner.node, (failure.rank,)):
            raise Refusal(f"it reported that rank {failure.rank} failed, which is not its child")
        if self._chosen is not None and (failure.consequence or not self._chosen.consequence):
            return [NotifyConnections(self._chosen, (joiner.connection,))]
        self._chosen = failure
        note = SeedEvent("run failed", joiner.address, joiner.node, failure.rank, failure.cause)
        return [note, NotifyConnections(failure, tuple(each.connection for each in self._launchers.values()))]


_MAX_REASON: Final = 900  # characters of the reason why a cluster did not start
_PROOF_REJECTED: Final = "it disconnected after the seed's proof, as a node with another ticket or token does"
_TOO_LATE: Final = "start all ranks at about the same time, or raise NEXAR_FORMATION_TIMEOUT_SECS"
_TOO_MANY_PENDING: Final = "too many connections wait to authenticate; try again"


class Admission:
    """`step` is the only input."""

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
        """Raises UsageError for an invalid size."""
        if not 1 <= size <= MAX_MEMBERS:
            raise UsageError(f"a cluster of {size} members cannot be formed; allowed are 1 to {MAX_MEMBERS}")
        self.size = size
        self._limits = limits or AdmissionLimits()
        self._started = started
        self._deadline = started + formation_timeout
        self._formation_timeout = formation_timeout
        self._extension = 0.0  # extension of the formation time, once it is over
        self._now = started  # time of the current event
        self._failure = ""  # why the cluster will never form
        self._formed: FormedCluster | None = None  # set once the cluster has formed
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
        """For a restarted seed: pinned members may return."""
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
        return None if self._formed is None else self._formed.membership

    @property
    def elastic(self) -> bool:
        return self._limits.elastic

    @property
    def failed(self) -> bool:
        return self._forming is None and self._formed is None

    @property
    def forms(self) -> bool:
        return self._forming is not None or self._starting is not None

    @property
    def joined(self) -> int:
        return len(self._members)

    @property
    def pending(self) -> int:
        return len(self._pending)

    @property
    def refused(self) -> dict[str, str]:
        return self._refusals.listed()

    def due(self, now: float) -> float | None:
        delay = self._limits.own_delay()
        formation = None if self._forming is None else self._deadline + delay
        start = None if self._starting is None else self._starting.deadline + delay
        formed = None if self._formed is None else self._formed.due(now)
        deadlines = [each for each in (formation, start, formed, self._pending.next_deadline) if each is not None]
        return max(now, min(deadlines)) if deadlines else None

    def step(self, event: AdmissionEvent, now: float) -> list[AdmissionAction]:
        """The actions, in order. No other method changes the state. Events of an ended connection are ignored."""
        self._now = now
        return [*self._handle(event, now), *self._settle_start(now)]

    def _handle(self, event: AdmissionEvent, now: float) -> list[AdmissionAction]:
        if isinstance(event, ConnectionOpened):
            return self._connection_opened(event, now)
        if isinstance(event, AdmissionTick):
            return self._tick(now)
        joiner = self._joiners.get(event.connection)
        if joiner is None:
            return []
        try:
            return self._handle_connection(joiner, event)
        except Refusal as why:
            return self._refuse(joiner, str(why), why.expelled, lines=why.lines, code=why.code)

    def _handle_connection(self, joiner: JoinConnectionState, event: ReceivedEvent) -> list[AdmissionAction]:
        # Raises Refusal if the connection must be refused.
        match event:
            case HelloReceived():
                actions = self._hello_received(joiner, event.hello)
            case JoinRequested():
                actions = self._join_requested(joiner, event)
            case JoinerReady() | MemberConnected() | StartFailureReported() | ProgressRequested():
                actions = self._handle_candidate(joiner, event)
            case RanksRequested():
                actions = self._ranks_requested(joiner, event)
            case BoardRequested():
                actions = self._board_requested(joiner, event)
            case BadMessage():
                raise Refusal(event.reason)
            case ConnectionEnded() | LeaveReceived():
                actions = self._connection_ended(joiner, event)
            case ChildReported() | RunFailureReported():
                actions = self._reported(joiner, event)
            case MemberMessageReceived() | MemberAnswered():
                actions = self._handle_member(joiner, event)
        return actions

    def _handle_candidate(
        self,
        joiner: JoinConnectionState,
        event: JoinerReady | MemberConnected | StartFailureReported | ProgressRequested,
    ) -> list[AdmissionAction]:
        match event:
            case JoinerReady():
                return self._joiner_ready(joiner)
            case ProgressRequested():
                return self._progress_requested(joiner)
            case MemberConnected() | StartFailureReported():
                return self._confirmed(joiner, event)

    def _connection_ended(
        self, joiner: JoinConnectionState, event: ConnectionEnded | LeaveReceived
    ) -> list[AdmissionAction]:
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
        return [DropConnection(joiner.connection, "it left"), *self._end(joiner, "left", event.reason)]

    def _handle_member(
        self, joiner: JoinConnectionState, event: MemberMessageReceived | MemberAnswered
    ) -> list[AdmissionAction]:
        if self._formed is None:
            raise Refusal("it sent a member's message before the cluster had formed")
        if isinstance(event, MemberMessageReceived):
            return self._formed.message_received(joiner, event, self._now)
        return self._formed.answered(joiner, event, self._now)

    # ------------------------------------------------------------ unauthenticated connections

    def _connection_opened(self, event: ConnectionOpened, now: float) -> list[AdmissionAction]:
        if event.connection in self._joiners:
            raise InternalError(f"connection {event.connection} was opened twice")
        joiner = self._joiners[event.connection] = JoinConnectionState(event.connection, event.address)
        opened = SeedEvent("knocked", event.address)
        if self.failed:
            return [opened, *self._refuse_for_failure(joiner)]
        placement = self._pending.enter(event.connection, source_of(event.address), now)
        if not placement.admitted:
            return [opened, *self._drop(joiner, _TOO_MANY_PENDING)]
        displaced = placement.displaced
        dropped = [] if displaced is None else self._drop(self._joiners[displaced], _TOO_MANY_PENDING)
        return [*dropped, opened]

    def _hello_received(self, joiner: JoinConnectionState, hello: Hello) -> list[AdmissionAction]:
        check_hello(joiner, hello)
        self._pending.shorten(joiner.connection, self._now + self._limits.proof_timeout)
        return [SendChallenge(joiner.connection)]

    def _prove(
        self, joiner: JoinConnectionState, role: JoinRole, event: JoinRequested | RanksRequested | BoardRequested
    ) -> Hello:
        # Check the proof for `role` and give up the pending place; returns the hello. Raises Refusal.
        hello = authenticate(joiner, role, event)
        self._pending.leave(joiner.connection)
        return hello

    def _board_requested(self, joiner: JoinConnectionState, event: BoardRequested) -> list[AdmissionAction]:
        self._prove(joiner, "onlooker", event)
        self._observers.enter(joiner)
        return [ShowBoard(joiner.connection), self._note("watching", joiner)]

    # ------------------------------------------------------------ forming, and after it

    def _join_requested(self, joiner: JoinConnectionState, event: JoinRequested) -> list[AdmissionAction]:
        hello = self._prove(joiner, "candidate", event)
        if self._forming is None:
            return self._formed_cluster().join_requested(joiner, hello, event)
        return [*self._forming.join_requested(joiner, hello, event), *self._settle(self._forming)]

    def _joiner_ready(self, joiner: JoinConnectionState) -> list[AdmissionAction]:
        if self._forming is None:
            return self._formed_cluster().ready(joiner)
        self._forming.ready(joiner)
        return self._settle(self._forming)

    def _ranks_requested(self, joiner: JoinConnectionState, event: RanksRequested) -> list[AdmissionAction]:
        hello, asked = self._prove(joiner, "launcher", event), event.reservation
        if self._forming is None:
            after = self._formed_cluster()
            returned = after.is_launcher(hello.node)
            actions, ranks = after.reserved(joiner, hello, asked), None if returned else range(0)
        else:
            actions = self._forming.reserved(joiner, hello, asked)
            ranks = self._forming.formation.ranks_of(hello.node)
        return [*actions, *self._run_failures.reserved(joiner, ranks)]

    def _reported(
        self, joiner: JoinConnectionState, event: ChildReported | RunFailureReported
    ) -> list[AdmissionAction]:
        if isinstance(event, RunFailureReported):
            return self._run_failures.report(joiner, event.failure)
        return self._child_died(joiner, event)

    def _child_died(self, joiner: JoinConnectionState, event: ChildReported) -> list[AdmissionAction]:
        if self._forming is None:
            actions = self._formed_cluster().child_died(joiner, event)
            if self._starting is not None and not event.well:
                self._starting.member_lost(event.rank, last_line(event.cause))
            return actions
        return [*self._forming.child_died(joiner, event), *self._settle(self._forming)]

    def _formed_cluster(self) -> FormedCluster:
        if self._formed is None:
            raise InternalError("an event arrived after the formation had failed and all connections had ended")
        return self._formed

    def _settle(self, forming: Forming) -> list[AdmissionAction]:
        # Commit or fail if the formation is complete or cannot succeed.
        if forming.failure:
            return self._fail(forming)
        return self._commit(forming) if forming.complete else []

    def _commit(self, forming: Forming) -> list[AdmissionAction]:
        self._forming = None
        formed = self._form(forming.formation.make_membership())
        confirming = [node for node in self._members if node in forming.confirming]
        if confirming:
            self._starting = PendingStart(formed.membership, confirming, self._now, self._deadline)
        commit = CommitMembership(
            formed.membership, self._authenticated(), frozenset(self._members), starts=not confirming
        )
        return [commit, SeedEvent("committed", reason=f"{self.size} members"), *formed.take_over(forming.early)]

    def _progress_requested(self, joiner: JoinConnectionState) -> list[AdmissionAction]:
        # Empty unless the sender is a candidate of a running formation.
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
        # A member reports whether it is connected. Raises Refusal for others. A member that returns later is notified
        # again.
        if self._formed is None or joiner.node is None or self._members.get(joiner.node) is not joiner:
            raise Refusal("it sent a member's message, but is no member")
        if self._starting is None:
            return [NotifyConnections(Started(), (joiner.connection,))] if isinstance(event, MemberConnected) else []
        if isinstance(event, MemberConnected):
            self._starting.connected(joiner.node)
        else:
            self._starting.fail(event.reason)
        return []

    def _settle_start(self, now: float) -> list[AdmissionAction]:
        # Start or fail the cluster if that is decided.
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
        # Inform everyone, waiting joiners too: the cluster is over.
        self._failure = brief_lines(reason, _MAX_REASON)
        joined = tuple(self._who(joiner) for joiner in self._members.values())
        self._starting = self._formed = None
        unauthenticated = [joiner for joiner in self._joiners.values() if not joiner.fingerprint]
        authenticated = tuple(joiner.connection for joiner in self._joiners.values() if joiner.fingerprint)
        refused = [action for joiner in unauthenticated for action in self._refuse_for_failure(joiner)]
        self._forget_all()
        return [*refused, *self._failed(joined, authenticated, self._failure)]

    def _fail(self, forming: Forming) -> list[AdmissionAction]:
        # Inform everyone: admitted nodes of the facts, others and observers that it is over.
        self._failure = f"{forming.failure}\n{_TOO_LATE}" if forming.expired else forming.failure
        authenticated = (*self._authenticated(), *forming.early.clear())
        why_not_ready = forming.formation.why_not_ready
        joined = tuple(self._who(joiner) + why_not_ready(node) for node, joiner in self._members.items())
        self._forming = None  # so that no early joiner takes a place that becomes free now
        unauthenticated = [joiner for joiner in self._joiners.values() if not joiner.fingerprint]
        refused = [action for joiner in unauthenticated for action in self._refuse_for_failure(joiner)]
        self._forget_all()
        return [*refused, *self._failed(joined, authenticated, "" if forming.expired else self._failure)]

    def _forget_all(self) -> None:
        self._joiners.clear()
        self._members.clear()
        self._launchers.clear()

    def _failed(self, joined: tuple[str, ...], authenticated: tuple[int, ...], reason: str) -> list[AdmissionAction]:
        listed, count = self._refusals.listed(), self._refusals.count
        elapsed = min(self._now - self._started, self._formation_timeout + self._extension)
        fail = FailFormation(joined, self.size, listed, count, elapsed, authenticated, reason)
        why, *further = self._failure.split("\n")
        line = "; ".join((f"{why}, {len(joined)} of {self.size} joined", *further))
        return [fail, SeedEvent("failed", reason=brief(line, _MAX_REASON))]

    # ------------------------------------------------------------ time

    def _tick(self, now: float) -> list[AdmissionAction]:
        expired = [self._joiners[connection] for connection in self._pending.expired(now)]
        actions = [action for joiner in expired for action in self._drop(joiner, self._timeout_reason(joiner))]
        delay = self._limits.own_delay()
        if self._forming is not None and now >= self._deadline + delay:
            self._extension = delay
            self._forming.expire(self._formation_timeout + delay)
            actions += self._fail(self._forming)
        return actions if self._formed is None else actions + self._formed.tick(now)

    def _timeout_reason(self, joiner: JoinConnectionState) -> str:
        if joiner.hello is not None:
            return f"it did not prove within {format_seconds(self._limits.proof_timeout)} of its hello that it may join"
        return f"it did not authenticate within {format_seconds(self._limits.auth_timeout)}"

    # ------------------------------------------------------------ ends

    def _refuse(
        self, joiner: JoinConnectionState, reason: str, expelled: int = 0, *, lines: str = "", code: RefusalCode = ""
    ) -> list[AdmissionAction]:
        # `lines`: the reason sent to the node if it has several lines.
        reason = brief(reason)
        self._refusals.add(self._who(joiner), reason)
        refuse = RefuseConnection(joiner.connection, lines or reason, expelled, code)
        return [refuse, *self._end(joiner, "refused", reason)]

    def _refuse_for_failure(self, joiner: JoinConnectionState) -> list[AdmissionAction]:
        return self._refuse(joiner, self._failure.replace("\n", "; "), lines=self._failure)

    def _drop(self, joiner: JoinConnectionState, reason: str) -> list[AdmissionAction]:
        self._refusals.add(self._who(joiner), reason)
        return [DropConnection(joiner.connection, reason), *self._end(joiner, "dropped", reason)]

    def _end(self, joiner: JoinConnectionState, kind: SeedEventKind, reason: str) -> list[AdmissionAction]:
        note = self._note(kind, joiner, reason)
        if self._starting is not None and joiner.node is not None and self._members.get(joiner.node) is joiner:
            self._starting.member_lost(note.rank, reason or "it left")
        del self._joiners[joiner.connection]
        self._pending.leave(joiner.connection)
        self._observers.leave(joiner)
        if self._formed is not None:
            return [note, *self._formed.withdrawn(joiner, kind, reason, self._now)]
        if self._forming is None:
            return [note]
        self._forming.withdrawn(joiner)
        return [note, *self._settle(self._forming)]

    # ------------------------------------------------------------ texts

    def _authenticated(self) -> tuple[int, ...]:
        return tuple(joiner.connection for joiner in (*self._members.values(), *self._launchers.values()))

    def _rank(self, joiner: JoinConnectionState) -> Rank | None:
        # The rank it claimed or holds. A hello alone gives none.
        if joiner.node is None or self._members.get(joiner.node) is not joiner:
            return None
        ranks = self.membership if self._forming is None else self._forming.formation
        return None if ranks is None else ranks.rank_of(joiner.node)

    def _who(self, joiner: JoinConnectionState) -> str:
        return describe_peer(self._rank(joiner), joiner.node, joiner.address)

    def _note(self, kind: SeedEventKind, joiner: JoinConnectionState, reason: str = "") -> SeedEvent:
        return SeedEvent(kind, joiner.address, joiner.node, self._rank(joiner), brief(reason))
