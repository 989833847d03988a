from __future__ import annotations

import threading

import pytest

from nexar.collectives.entry import Entry
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.mishap import Mishap, awaited_here, error_of, mismatch_of, named
from nexar.collectives.operations import OperationCode
from nexar.errors import (
    Cancelled,
    CollectiveTimeout,
    LinkClosed,
    NexarError,
    OperationTimeout,
    PeerLost,
    PeerMisbehaved,
    Revoked,
    UsageError,
)
from nexar.types import AwaitedPeer, Rank
from nexar.wire.messages import Culprit, GaveUp

ENTRY = Entry(threading.Lock(), 7, Fingerprint(OperationCode.SCAN, 11, 8, 0, 1))
SCAN, REDUCE, BARRIER = (10, 11, 8, 0, 1, 4), (4, 11, 8, 1, 1, 7), (1, 0, 0, 0, 0, 18)


def known(rank: Rank) -> AwaitedPeer:
    return AwaitedPeer(rank=rank, node=rank + 100, address="h:1", last_heard=9.0)


def rank_of(node: int) -> Rank | None:
    return node - 100 if node >= 100 else None


def heard(error: BaseException) -> NexarError:
    """What another rank raises."""
    mishap = Mishap(error, rank_of)
    return error_of(GaveUp(0, 0, 7, 3, mishap.reason, mishap.timeout, mishap.culprits), ENTRY, known, 0)


def test_a_rank_that_has_closed_the_communicator_is_no_loss() -> None:
    error = error_of(GaveUp(5, 0, 7, 3, "it has closed it", closed=True), ENTRY, known, 0)
    assert isinstance(error, Revoked)
    assert (error.communicator, error.rank, error.closed) == ("5", 3, True)
    assert "takes no part in scan #7; make a new one with split() or group()" in str(error)


def test_a_timeout_is_one_on_every_rank_and_blames_the_same() -> None:
    peer = AwaitedPeer(
        rank=2, missing="scan #7", last_heard=4.0, last_operation="scan #6", current_operation="barrier #1"
    )
    error = heard(OperationTimeout(operation="x", waiting_for=[peer, AwaitedPeer()], timeout=30.0))
    assert isinstance(error, CollectiveTimeout)
    assert (error.operation, error.sequence, error.timeout) == ("scan", 7, 30.0)
    assert list(error.waiting_for) == [
        AwaitedPeer(
            rank=2,
            node=102,
            address="h:1",
            missing="scan #7",
            last_heard=4.0,
            last_operation="scan #6",
            current_operation="barrier #1",
        )
    ]


@pytest.mark.parametrize(
    "error", [PeerLost(rank=9, node=102, cause="it left"), LinkClosed(rank=9, node=102)], ids=["lost", "link closed"]
)
def test_who_is_lost_is_named_by_its_rank_here_whatever_its_link_calls_it(error: NexarError) -> None:
    found = heard(error)
    assert isinstance(found, PeerLost)
    assert (found.rank, found.node) == (2, 102)
    assert isinstance(heard(LinkClosed(owner="the communicator")), Cancelled)


@pytest.mark.parametrize(("missing", "says"), [("scan #7", "missing scan #7 (that is"), ("", "missing its part (that")])
def test_who_is_blamed_reads_that_it_is_meant(missing: str, says: str) -> None:
    notice = GaveUp(0, 0, 7, 3, "late", 30.0, (Culprit(2, missing),))
    assert says in str(error_of(notice, ENTRY, known, 2))


def test_a_lost_peer_is_lost_for_every_rank() -> None:
    error = heard(PeerLost(rank=2, cause="its process died"))
    assert isinstance(error, PeerLost)
    assert (error.rank, error.node, error.operation) == (2, 102, "scan #7")
    assert "rank 3" in error.cause
    assert "its process died" in error.cause


@pytest.mark.parametrize(
    "fault",
    [
        KeyboardInterrupt(),
        UsageError("bad buffer"),
        PeerLost(cause="nobody knows who"),
        PeerMisbehaved(rank=2, what="it sent nonsense"),  # who lives, and is not to be waited for as one lost
    ],
)
def test_anything_else_is_cancelled_by_who_raised_it(fault: BaseException) -> None:
    error = heard(fault)
    assert isinstance(error, Cancelled)
    assert (error.rank, error.operation) == (3, "scan #7")
    assert (str(fault) or "KeyboardInterrupt") in error.reason


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(("fault", "says"), [(ValueError("caf\udce9"), r"caf\udce9"), (Mute(), "cannot be told")])
def test_what_cannot_be_sent_as_it_is_is_told_otherwise(fault: Exception, says: str) -> None:
    reason = Mishap(fault, rank_of).reason
    assert says in reason
    assert reason.encode()


def test_a_reason_is_not_told_at_any_length() -> None:
    assert len(Mishap(UsageError("x" * 1_000_000), rank_of).reason) == 1000


def test_a_mismatch_names_first_whose_call_differs_from_mine() -> None:
    calls = {0: SCAN, 1: REDUCE, 2: SCAN, 3: BARRIER}
    error = mismatch_of(7, calls, 2)
    assert (error.expected, error.found, error.ranks) == (
        "scan of float32[8], sum", "reduce of float32[8], sum, root 0", [1],
    )  # fmt: skip
    assert mismatch_of(7, calls, 1).ranks == [0, 2]
    assert error.calls == {0: error.expected, 1: error.found, 2: error.expected, 3: "barrier"}
    assert "barrier on rank 3" in str(error)


def test_a_mismatch_of_others_alone_names_one_of_them() -> None:
    error = mismatch_of(7, {0: SCAN, 1: REDUCE}, 2)
    assert error.expected == "no such call yet"
    assert error.ranks == [0]


def test_a_part_that_another_rank_gave_up_is_named_as_the_call() -> None:
    error = named(Cancelled(operation="all_gather", reason="it did", rank=1), ENTRY)
    assert isinstance(error, Cancelled)
    assert (error.operation, error.reason, error.rank) == ("scan #7", "it did", 1)
    mine = Cancelled(operation="all_gather")
    assert named(mine, ENTRY) is mine


def test_the_way_is_named_only_where_nothing_else_tells_the_calls_apart() -> None:
    ring = (*SCAN[:5], 15)
    error = mismatch_of(7, {0: SCAN, 1: ring}, 0)
    assert error.expected == "scan of float32[8], sum, by chain"
    assert error.found == "scan of float32[8], sum, by ring"
    assert "by" not in mismatch_of(7, {0: SCAN, 1: REDUCE}, 0).found


def test_who_was_waited_for_in_vain_can_tell_what_was_missing() -> None:
    notice = GaveUp(0, 0, 7, 3, "late", 30.0, (Culprit(1, "scan #7"), Culprit(2, "scan #7")))
    error = awaited_here(notice, 2)
    assert list(error.waiting_for) == [AwaitedPeer(rank=2, missing="scan #7")]
    assert (error.operation, error.sequence, error.timeout) == ("scan", 7, 30.0)
