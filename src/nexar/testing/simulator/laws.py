"""What must hold in every run, whatever goes wrong: checked from the outside, after every event.

- One membership for each epoch: whoever goes on to it goes on to the same.
- Epochs only grow, one by one, at each node.
- A minority never decides: what anybody calls chosen has the votes of a majority of that epoch's voters, in one ballot.
- A ballot has one value, and nobody votes below what it has promised.
- Who is expelled takes no part: it goes on to nothing, is never a member again, and nobody votes at its word.
- Nobody is expelled on one node's word: who votes for a removal has seen for itself that the node could not be reached,
  and was not told since that it is found; or the node wants it; or who voted for it in an earlier ballot leaves no
  choice.
- Nobody joins who was not let in.

Who is first to call a value chosen must have heard the votes for it, in this ballot of this epoch. A proposer does not
say its own vote: it is taken to have voted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nexar.cluster.decisions.membership_events import (
    ChangeRequested,
    MembershipAction,
    MembershipDecided,
    MembershipInput,
    MessageReceived,
    PeerLossFound,
    PeerReachable,
    ProbeFinished,
    ResignRequested,
    SelfExpelled,
    SendMessage,
)
from nexar.cluster.membership import Change, Membership
from nexar.types import NodeId
from nexar.wire.control import Accept, Accepted, BallotNumber, Chosen, Instance, Prepare, Promise


class Violation(AssertionError):
    """A law was broken. `law` says which; the text, by whom and how."""

    def __init__(self, law: str, details: str) -> None:
        super().__init__(f"{law}: {details}")
        self.law = law


@dataclass(frozen=True, slots=True)
class ReferenceElectorate:
    """Who votes on what follows a membership."""

    voters: frozenset[NodeId]

    @staticmethod
    def of(membership: Membership) -> ReferenceElectorate:
        """The members; and the seed, if their number is even."""
        seed = [membership.seed.node] if membership.seed is not None and membership.size % 2 == 0 else []
        return ReferenceElectorate(frozenset([*(member.node for member in membership.members), *seed]))

    @property
    def majority(self) -> int:
        """So many votes decide."""
        return len(self.voters) // 2 + 1


class Laws:
    """The one who sees everything that is said, and remembers it."""

    def __init__(self, first: Membership) -> None:
        self.memberships: dict[int, Membership] = {first.epoch: first}
        """What was chosen, by epoch."""
        self.admitted: set[NodeId] = set()
        """Who may join."""
        self.removed: dict[NodeId, int] = {}
        """Since which epoch."""
        self._electorates = {first.epoch: ReferenceElectorate.of(first)}
        self._chosen: dict[int, bytes] = {}  # by the epoch that it makes
        self._values: dict[tuple[int, BallotNumber], bytes] = {}
        self._votes: defaultdict[tuple[int, BallotNumber], set[NodeId]] = defaultdict(set)
        self._heard: defaultdict[tuple[NodeId, int, BallotNumber], set[NodeId]] = defaultdict(set)
        self._promised: dict[tuple[NodeId, int], BallotNumber] = {}
        self._grounds: defaultdict[NodeId, set[NodeId]] = defaultdict(set)
        self._willing: set[NodeId] = set()
        self._epochs: dict[NodeId, int] = {}
        self._expelled: set[NodeId] = set()
        self._gone: dict[bytes, frozenset[NodeId]] = {}

    @property
    def last(self) -> Membership:
        """Of the highest epoch that was chosen."""
        return self.memberships[max(self.memberships)]

    def enters(self, node: NodeId, epoch: int) -> None:
        """A node begins with the membership of this epoch, which was chosen."""
        self._epochs[node] = epoch

    def told(self, node: NodeId, event: MembershipInput) -> None:
        """Call it before a node takes a step: what the node now knows about others."""
        match event:
            case MessageReceived(sender=sender, message=Accepted(instance=instance, ballot=ballot)):
                self._heard[node, instance[1], ballot].add(sender)
            case PeerLossFound(node=lost, willing=willing):
                self._grounds[node].add(lost)
                self._willing |= {lost} if willing else set()
            case PeerReachable(node=found):
                self._grounds[node].discard(found)
            case ProbeFinished(node=lost, cause=cause) if cause is not None:
                self._grounds[node].add(lost)
            case ChangeRequested(left=left):
                self._willing |= {departure.node for departure in left}
            case ResignRequested():
                self._willing.add(node)
            case _:
                return

    def seen(self, node: NodeId, event: MembershipInput, actions: Iterable[MembershipAction]) -> None:
        """Call it after a node's step. Violation if it was against the law."""
        for action in actions:
            if type(action) is SendMessage:
                if (check := self._words.get(type(action.message))) is not None:
                    check(self, node, action.message, event)
            elif type(action) is MembershipDecided:
                self._adopts(node, action.change)
            elif type(action) is SelfExpelled:
                self._expelled.add(node)

    # -- words

    def _promises(self, node: NodeId, message: Promise, event: MembershipInput) -> None:
        epoch = self._voting(node, message.instance, event)
        known = self._promised.get((node, epoch))
        if known is None or known < message.ballot:
            self._promised[node, epoch] = message.ballot

    def _asks(self, node: NodeId, message: Accept, _: MembershipInput) -> None:
        """A proposer's value."""
        epoch = message.instance[1]
        known = self._values.setdefault((epoch, message.ballot), message.value)
        if known != message.value:
            raise Violation("a ballot has one value", f"node {node} asks for two in ballot {message.ballot}")
        if node in self._gone_by(message.value):
            self._willing.add(node)
        self._removes(node, epoch, message.ballot)

    def _votes_for(self, node: NodeId, message: Accepted, event: MembershipInput) -> None:
        epoch = self._voting(node, message.instance, event)
        votes = self._votes[epoch, message.ballot]
        if node in votes:
            return  # said again: it is the same vote
        promised = self._promised.get((node, epoch))
        if promised is not None and promised > message.ballot:
            raise Violation(
                "nobody votes below what it has promised",
                f"node {node} votes in {message.ballot} of epoch {epoch} after it has promised {promised}",
            )
        if (epoch, message.ballot) not in self._values:
            raise Violation("a ballot has one value", f"node {node} votes in {message.ballot}, which has none")
        self._removes(node, epoch, message.ballot)
        votes.add(node)

    def _calls_chosen(self, node: NodeId, message: Chosen, _: MembershipInput) -> None:
        if message.instance[:1] == (0,):
            self._decides(node, message.instance[1] + 1, message.value)

    _words: dict[type, Callable[..., None]] = {  # noqa: RUF012 - never written
        Promise: _promises,
        Accept: _asks,
        Accepted: _votes_for,
        Chosen: _calls_chosen,
    }

    def _voting(self, node: NodeId, instance: Instance, event: MembershipInput) -> int:
        """The epoch of a vote or promise that may be given."""
        epoch = instance[1]
        if node in self._expelled:
            raise Violation("who is expelled takes no part", f"node {node} votes in epoch {epoch}")
        asked = isinstance(event, MessageReceived) and isinstance(event.message, Prepare | Accept)
        if asked and event.sender not in self._electorates[epoch].voters:  # type: ignore[union-attr]
            raise Violation(
                "who is expelled takes no part",
                f"node {node} votes in epoch {epoch} at the word of node {event.sender}",  # type: ignore[union-attr]
            )
        return epoch

    def _removes(self, node: NodeId, epoch: int, ballot: BallotNumber) -> None:
        """Whether this node may vote for the removals of this value."""
        value = self._values[epoch, ballot]
        doubtful = self._gone_by(value) - self._grounds[node] - self._willing - {ballot.node}
        if doubtful and not self._voted_before(epoch, ballot, value):
            raise Violation(
                "nobody is expelled on one node's word",
                f"node {node} votes in {ballot} of epoch {epoch} for the removal of {sorted(doubtful)}, "
                "which it has never failed to reach",
            )

    def _voted_before(self, epoch: int, ballot: BallotNumber, value: bytes) -> bool:
        return any(
            known == value and key[0] == epoch and key[1] < ballot and self._votes[key]
            for key, known in self._values.items()
        )

    def _gone_by(self, value: bytes) -> frozenset[NodeId]:
        if value not in self._gone:
            self._gone[value] = Change.decode(value).gone
        return self._gone[value]

    # -- decisions

    def _adopts(self, node: NodeId, change: Change) -> None:
        if node in self._expelled:
            raise Violation("who is expelled takes no part", f"node {node} goes on to epoch {change.epoch}")
        if change.epoch != self._epochs[node] + 1:
            raise Violation(
                "epochs only grow, one by one", f"node {node} goes from {self._epochs[node]} to {change.epoch}"
            )
        self._epochs[node] = change.epoch
        self._decides(node, change.epoch, change.encode())
        if self.memberships[change.epoch].pin(node) is None:
            raise Violation("who is expelled takes no part", f"node {node} goes on to epoch {change.epoch} without it")

    def _decides(self, node: NodeId, epoch: int, value: bytes) -> None:
        """This node takes the value as chosen."""
        known = self._chosen.get(epoch)
        if known is None:
            self._is_decided(node, epoch, value)
        elif known != value:
            raise Violation(
                "one membership for each epoch",
                f"node {node} takes {Change.decode(value)} for epoch {epoch}; others have {Change.decode(known)}",
            )

    def _is_decided(self, node: NodeId, epoch: int, value: bytes) -> None:
        """The first to say so: count."""
        electorate = self._electorates[epoch - 1]
        ballots = [key for key, known in self._values.items() if key[0] == epoch - 1 and known == value]
        counts = [len((self._heard[node, *key] | ({node} & {key[1].node})) & electorate.voters) for key in ballots]
        most = max(counts, default=0)
        if most < electorate.majority and electorate.voters != {node}:
            raise Violation(
                "a minority never decides",
                f"node {node} takes a value for epoch {epoch} that has {most} votes of {len(electorate.voters)}",
            )
        self._follows(epoch, value)

    def _follows(self, epoch: int, value: bytes) -> None:
        change = Change.decode(value)
        following = change.apply(self.memberships[epoch - 1])
        self.removed |= dict.fromkeys(change.gone, epoch)
        returned = [member.node for member in following.members if member.node in self.removed]
        if returned:
            raise Violation("who is expelled takes no part", f"{returned} are members of epoch {epoch}")
        strangers = {member.node for member in change.joined} - self.admitted
        if strangers:
            raise Violation("nobody joins who was not let in", f"{sorted(strangers)} are members of epoch {epoch}")
        self._chosen[epoch] = value
        self.memberships[epoch] = following
        self._electorates[epoch] = ReferenceElectorate.of(following)
