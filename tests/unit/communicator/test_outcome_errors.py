"""What calls raise for each outcome, and which failure a build reports for each exception."""

import pytest

from nexar.cluster.decisions.successor_events import (
    BuildFailure,
    BuildFailureKind,
    GenerationKey,
    Outcome,
    QuorumLost,
    RecoveryTimedOut,
    RevokedBy,
    Superseded,
    Terminated,
    TerminationKind,
)
from nexar.communicator.outcome_errors import error_of, error_of_failure, failure_of
from nexar.config import Config
from nexar.errors import (
    Expelled,
    LinkClosed,
    MembershipChanged,
    NexarError,
    NoQuorum,
    OperationTimeout,
    PeerLost,
    PeerMisbehaved,
    RecoveryTimeout,
    Revoked,
    UsageError,
)
from nexar.types import AwaitedPeer
from tests.unit.communicator.generations import generation
from tests.unit.communicator.scripted import membership

PART = 7
NEXT = Superseded(GenerationKey(PART, 2), {1: "killed"}, (2,), 4, agreed=False)


def raised(outcome: Outcome, **settings: object) -> NexarError:
    return error_of(
        outcome,
        generation([3, 1, 2], communicator=PART),
        Config(**settings),  # type: ignore[arg-type]
        successor="the next",
    )


def test_a_successor_is_in_the_error_or_under_the_manual_policy_the_way_to_it() -> None:
    change = raised(NEXT)
    assert isinstance(change, MembershipChanged)
    assert (change.communicator, change.lost, change.joined) == ("the next", {1: "killed"}, (2,))
    assert change.completed_by_all == 4
    loss = raised(NEXT, recovery_policy="manual")
    assert isinstance(loss, PeerLost)
    assert (loss.rank, loss.node, loss.cause) == (1, 1, "killed")
    assert "comm.shrink()" in str(loss)


def test_without_a_lost_rank_the_link_was_lost() -> None:
    loss = raised(Superseded(GenerationKey(PART, 2), {}, (), None, agreed=True), recovery_policy="manual")
    assert isinstance(loss, PeerLost)
    assert (loss.rank, loss.node, loss.cause) == (None, None, "its link was lost")


@pytest.mark.parametrize(
    ("outcome", "kind", "facts"),
    [
        (QuorumLost((0, 1), 2, (2,)), NoQuorum, {"alive": [0, 1], "needed": 2, "left": [2]}),
        (RecoveryTimedOut((2,)), RecoveryTimeout, {"missing_votes": (2,), "timeout": 5.0}),
        (RevokedBy(1, "enough"), Revoked, {"rank": 1, "reason": "enough", "closed": False, "communicator": "7"}),
        (RevokedBy(2, "closed", closed=True), Revoked, {"rank": 2, "closed": True}),
        (
            Terminated(TerminationKind.EXPELLED, epoch=9, reason="silence"),
            Expelled,
            {"epoch": 9, "reason": "silence", "rank": 1},
        ),
        (
            Terminated(TerminationKind.ABORTED, node=3, reason="killed"),
            PeerLost,
            {"rank": 0, "node": 3, "cause": "killed"},
        ),
        (Terminated(TerminationKind.NOT_STARTED), LinkClosed, {}),
        (Terminated(TerminationKind.CLOSED), UsageError, {}),
    ],
)
def test_each_outcome_has_its_error(outcome: Outcome, kind: type[NexarError], facts: dict[str, object]) -> None:
    error = raised(outcome, recovery_timeout=5.0)
    assert type(error) is kind
    assert {name: getattr(error, name) for name in facts} == facts


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (PeerLost(node=3, cause="reset"), BuildFailure(BuildFailureKind.PEER_LOST, (3,), "reset")),
        (PeerLost(rank=3, cause="reset"), BuildFailure(BuildFailureKind.FAULT)),
        (PeerMisbehaved(node=2, what="x"), BuildFailure(BuildFailureKind.FAULT, (2,))),
        (LinkClosed(owner="x"), BuildFailure(BuildFailureKind.OVERTAKEN)),
        (ZeroDivisionError(), BuildFailure(BuildFailureKind.FAULT)),
        (
            OperationTimeout(operation="x", waiting_for="nobody", timeout=1),
            BuildFailure(BuildFailureKind.TIMED_OUT),
        ),
        (
            OperationTimeout(operation="x", waiting_for=[AwaitedPeer(rank=2, node=3), AwaitedPeer(rank=1)], timeout=1),
            BuildFailure(BuildFailureKind.TIMED_OUT, (3,)),
        ),
    ],
)
def test_the_failure_names_the_members_that_were_missed(error: Exception, failure: BuildFailure) -> None:
    assert failure_of(error) == failure


def test_an_aborted_build_raises_that_it_was_overtaken_or_which_member_was_lost() -> None:
    members = membership([1, 2], 1)
    loss = error_of_failure(BuildFailure(BuildFailureKind.PEER_LOST, (2,), "it left"), members)
    assert isinstance(loss, PeerLost)
    assert (loss.rank, loss.node, loss.cause) == (1, 2, "it left")
    for kind in (BuildFailureKind.OVERTAKEN, BuildFailureKind.REJECTED):
        assert isinstance(error_of_failure(BuildFailure(kind), members), LinkClosed)
