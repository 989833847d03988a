"""Notices alone: whoever keeps a communicator is a list here."""

from __future__ import annotations

import threading

import pytest

from nexar.errors import PeerLost, Revoked, UsageError
from nexar.links.link import Link
from nexar.links.router import _CLOSED_KEPT, _KEPT, Notice, NoticeDispatch
from nexar.links.sending import MessageHeader
from nexar.wire.control import Blamed, CallAborted, CallMismatch, Message, Ping, ProgressQuery, ProgressReply
from nexar.wire.frame import Space
from tests.unit.links.conftest import Pair


class Silent:
    """A link on which nothing is said."""

    peer = 7

    def send_control(self, message: Message) -> bool:
        raise AssertionError(message)


WHO = Silent()


def gave_up(communicator: int, generation: int = 0, sequence: int = 0) -> CallAborted:
    return CallAborted(communicator, generation, sequence, 1, "tired")


def make() -> tuple[NoticeDispatch, list[Notice]]:
    notices, received = NoticeDispatch(threading.Lock()), list[Notice]()

    def receive(speaker: Link, notice: Notice) -> None:
        assert speaker is WHO
        received.append(notice)

    notices.open(3, 1, receive)
    return notices, received


def test_a_notice_goes_to_its_generation_of_its_communicator_and_no_other() -> None:
    notices, received = make()
    mine: list[Notice] = [
        gave_up(3, 1),
        CallMismatch(3, 1, 0, {}),
        ProgressQuery(3, 1, 0, 5),
        ProgressReply(3, 1, 5, 0, "in"),
    ]
    for notice in [gave_up(4, 1), gave_up(3, 2), *mine]:
        notices.arrived(WHO, notice)
    assert received == mine


def test_what_came_before_the_communicator_was_open_is_delivered_when_it_opens() -> None:
    notices, _ = make()
    later: list[Notice] = []
    notices.arrived(WHO, gave_up(4))
    notices.arrived(WHO, CallMismatch(4, 0, 2, {}))
    notices.open(4, 0, lambda _, notice: later.append(notice))
    assert later == [gave_up(4), CallMismatch(4, 0, 2, {})]
    notices.open(5, 0, lambda _, notice: later.append(notice))
    assert len(later) == 2


def test_a_question_is_not_kept_for_later() -> None:
    notices, _ = make()
    later: list[Notice] = []
    notices.arrived(WHO, ProgressQuery(4, 0, 0, 1))
    notices.arrived(WHO, ProgressReply(4, 0, 1, 1, "in"))
    notices.open(4, 0, lambda _, notice: later.append(notice))
    assert not later
    assert notices.dropped == 2


def test_what_is_kept_is_bounded() -> None:
    notices, _ = make()
    for sequence in range(_KEPT + 9):
        notices.arrived(WHO, gave_up(4, sequence=sequence))
    later: list[Notice] = []
    notices.open(4, 0, lambda _, notice: later.append(notice))
    assert len(later) == _KEPT
    assert notices.dropped == 9


def test_notices_of_a_generation_that_is_over_are_dropped() -> None:
    notices, received = make()
    notices.arrived(WHO, gave_up(3, 0))
    notices.close(3, 1)
    notices.close(3, 1)
    for generation in (0, 1):
        notices.arrived(WHO, gave_up(3, generation))
    assert not received
    assert notices.dropped == 2
    assert not notices._kept


def test_messages_about_no_communicator_are_dropped_and_counted() -> None:
    notices, received = make()
    notices.arrived(WHO, Ping(1))
    assert notices.dropped == 1
    assert not received


def test_what_a_peer_writes_is_cut_to_lines_and_lists_of_a_bounded_length() -> None:
    notices, received = make()
    long = "\x1b[31m\n" + "x" * 5000
    culprits = (Blamed(0, long, long),) * 500
    notices.arrived(WHO, CallAborted(3, 1, 0, 1, long, culprits=culprits))
    notices.arrived(WHO, ProgressReply(3, 1, 5, 0, "in", doing=long, finished=long))
    notices.arrived(WHO, CallMismatch(3, 1, 0, dict.fromkeys(range(9000), (1, 0, 0, 0, 0, 0))))
    given_up, report, disagreed = received
    assert isinstance(given_up, CallAborted)
    assert isinstance(report, ProgressReply)
    assert isinstance(disagreed, CallMismatch)
    first = given_up.culprits[0]
    for text in (given_up.reason, first.missing, first.last_operation, report.doing, report.finished):
        assert text is not None
        assert text.startswith(" [31m xxx")
        assert len(text) == 1000
    assert len(given_up.culprits) == len(disagreed.calls) == 64


class Answered:
    """A link that keeps what is said on it."""

    peer = 7

    def __init__(self) -> None:
        self.said: list[Message] = []
        self.lost = False

    def send_control(self, message: Message) -> bool:
        if self.lost:
            raise PeerLost(rank=1, cause="it is gone")
        self.said.append(message)
        return True


def test_questions_about_what_is_over_are_answered_and_nothing_else() -> None:
    notices, received = make()
    who = Answered()
    notices.close(3, 1, lambda question: ProgressReply(3, 1, question.number, 0, "done"))
    notices.close(3, 1)
    notices.arrived(who, ProgressQuery(3, 1, 0, 5))
    notices.arrived(who, gave_up(3, 1))
    notices.arrived(who, ProgressQuery(3, 0, 0, 5))
    assert who.said == [ProgressReply(3, 1, 5, 0, "done")]
    who.lost = True
    notices.arrived(who, ProgressQuery(3, 1, 0, 5))
    assert not received
    assert notices.dropped == 2


def test_for_so_many_that_are_over_questions_are_answered() -> None:
    notices, _ = make()
    who = Answered()
    for communicator in range(_CLOSED_KEPT + 1):
        notices.close(communicator, 1, lambda question: ProgressReply(3, 1, question.number, 0, "done"))
    notices.arrived(who, ProgressQuery(0, 1, 0, 5))
    assert who.said == []
    notices.arrived(who, ProgressQuery(1, 1, 0, 5))
    assert len(who.said) == 1


TAG = MessageHeader(space=Space.TAGGED, tag=7)


def test_a_generation_that_is_over_cannot_be_opened_again(pair: Pair) -> None:
    router = pair.left.router
    router.open(3, 2)
    with pytest.raises(UsageError, match="generation 1 of communicator 3 is over"):
        router.open(3, 1)


def test_a_new_generation_revokes_the_one_before(pair: Pair) -> None:
    old = pair.left.router.open(3)
    receive = old.post(None, source=2, space=Space.TAGGED, tag=1)
    pair.left.router.open(3, 1)
    with pytest.raises(Revoked):
        receive.result()
    with pytest.raises(Revoked):
        old.post(None, source=2, space=Space.TAGGED, tag=1)


def test_frames_kept_for_a_generation_that_is_skipped_are_dropped(pair: Pair) -> None:
    pair.left.router.open(3, 1)
    pair.to_right.post_send(3, memoryview(b"kept"), about=TAG)
    pair.to_right.post_send(0, memoryview(b"marker"), about=TAG)
    marker = pair.right.matching.post(None, source=1, space=Space.TAGGED, tag=7)
    pair.right.wait(marker)
    router = pair.right.router
    assert sum(router._unopened_bytes.values()) > 0
    router.open(3, 2)
    assert router.stale_frames == 1
    assert sum(router._unopened_bytes.values()) == 0
    assert not router._unopened
