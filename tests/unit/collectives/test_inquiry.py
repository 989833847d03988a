from __future__ import annotations

import threading
from typing import Literal

import pytest

from nexar.collectives.entry import Entry
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.inquiry import Inquiry, verdict
from nexar.collectives.operations import OperationCode
from nexar.types import AwaitedPeer
from nexar.wire.messages import Report

NOW, TIMEOUT = 1000.0, 30.0
ASKED = {1: AwaitedPeer(rank=1, last_heard=4.0), 2: AwaitedPeer(rank=2, last_heard=5.0)}


def entry(age: float = TIMEOUT) -> Entry:
    made = Entry(threading.Lock(), 7, Fingerprint(OperationCode.BARRIER))
    made.moved_at = NOW - age
    return made


def report(
    rank: int,
    state: Literal["absent", "in", "done", "failed"],
    age: float = 0.0,
    doing: str = "",
    since: float = 0.0,
) -> tuple[int, Report]:
    return rank, Report(0, 0, 1, rank, state, 0, age, doing, "barrier #6", since)


def judge(*reports: tuple[int, Report], age: float = TIMEOUT) -> float | tuple[AwaitedPeer, ...]:
    return verdict(entry(age), ASKED, dict(reports), now=NOW, timeout=TIMEOUT)


def test_an_inquiry_is_done_when_all_who_were_asked_have_answered() -> None:
    inquiry = Inquiry(threading.Lock(), ASKED)
    inquiry.answer(*report(1, "in"))
    inquiry.answer(*report(5, "in"))
    assert not inquiry.done
    assert inquiry.awaited().rank == 2
    inquiry.answer(*report(2, "in"))
    assert inquiry.done
    assert set(inquiry.reports) == {1, 2}


def test_a_step_of_anybody_within_the_timeout_puts_the_deadline_off_until_it_is_that_old() -> None:
    assert judge(report(1, "in", 10.0), report(2, "in", 40.0)) == NOW + 20.0
    assert judge(report(1, "in", 29.0), report(2, "absent")) == NOW + 1.0
    assert judge(age=5.0) == NOW + 25.0


@pytest.mark.parametrize("age", [-1.0, float("nan"), float("inf"), 30.0, 31.0])
def test_a_step_too_old_or_impossible_puts_nothing_off(age: float) -> None:
    assert judge(report(1, "in", age), report(2, "in", 40.0)) == ()


def test_being_alive_or_done_is_no_step() -> None:
    assert judge(report(1, "done", 0.0), report(2, "done", 0.0)) == ()


def test_those_who_have_not_come_or_do_not_answer_are_to_blame() -> None:
    blamed = judge(report(1, "absent"))
    assert blamed == (
        AwaitedPeer(
            rank=1, missing="barrier #7", last_heard=0.0, last_operation="barrier #6", current_operation="user code"
        ),
        AwaitedPeer(rank=2, missing="barrier #7 and any answer", last_heard=5.0),
    )


def test_who_is_elsewhere_is_said_to_be_there() -> None:
    assert isinstance(blamed := judge(report(1, "absent", doing="scan #3"), report(2, "failed")), tuple)
    assert blamed[0].current_operation == "scan #3"
    assert "it is in scan #3" in str(blamed[0])
    assert "it gave it up" in str(blamed[1])


@pytest.mark.parametrize(
    ("since", "place"),
    [(12.0, "user code for 12 s"), (0.0, "user code"), (-1.0, "user code"), (float("inf"), "user code")],
)
def test_who_answers_but_is_in_no_call_is_in_user_code_for_as_long_as_it_can_have_been(
    since: float, place: str
) -> None:
    blamed = judge(report(1, "absent", since=since), report(2, "in"), age=40.0)
    assert isinstance(blamed, float)  # rank 2 has just made a step
    blamed = judge(report(1, "absent", since=since), report(2, "in", 40.0))
    assert isinstance(blamed, tuple)
    assert blamed[0].current_operation == place
    assert blamed[0].last_heard == 0.0
