"""Notices alone: whoever keeps a communicator is a list here."""

from __future__ import annotations

import threading

from nexar.errors import PeerLost
from nexar.links.notices import _FAREWELLS, _KEPT, Notice, Notices, Speaker
from nexar.wire.messages import Culprit, Disagreed, GaveUp, Inquire, Message, Ping, Report


class Silent:
    """A link on which nothing is said."""

    peer = 7

    def send_control(self, message: Message) -> bool:
        raise AssertionError(message)


WHO = Silent()


def gave_up(communicator: int, generation: int = 0, sequence: int = 0) -> GaveUp:
    return GaveUp(communicator, generation, sequence, 1, "tired")


def make() -> tuple[Notices, list[Notice]]:
    notices, heard = Notices(threading.Lock()), list[Notice]()

    def receive(speaker: Speaker, notice: Notice) -> None:
        assert speaker is WHO
        heard.append(notice)

    notices.open(3, 1, receive)
    return notices, heard


def test_a_notice_goes_to_its_generation_of_its_communicator_and_no_other() -> None:
    notices, heard = make()
    mine: list[Notice] = [gave_up(3, 1), Disagreed(3, 1, 0, {}), Inquire(3, 1, 0, 5), Report(3, 1, 5, 0, "in")]
    for notice in [gave_up(4, 1), gave_up(3, 2), *mine]:
        notices.arrived(WHO, notice)
    assert heard == mine


def test_what_came_before_the_communicator_was_open_is_delivered_when_it_opens() -> None:
    notices, _ = make()
    later: list[Notice] = []
    notices.arrived(WHO, gave_up(4))
    notices.arrived(WHO, Disagreed(4, 0, 2, {}))
    notices.open(4, 0, lambda _, notice: later.append(notice))
    assert later == [gave_up(4), Disagreed(4, 0, 2, {})]
    notices.open(5, 0, lambda _, notice: later.append(notice))
    assert len(later) == 2


def test_a_question_is_not_kept_for_later() -> None:
    notices, _ = make()
    later: list[Notice] = []
    notices.arrived(WHO, Inquire(4, 0, 0, 1))
    notices.arrived(WHO, Report(4, 0, 1, 1, "in"))
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
    notices, heard = make()
    notices.arrived(WHO, gave_up(3, 0))
    notices.close(3, 1)
    notices.close(3, 1)
    for generation in (0, 1):
        notices.arrived(WHO, gave_up(3, generation))
    assert not heard
    assert notices.dropped == 2
    assert not notices._kept


def test_messages_about_no_communicator_are_dropped_and_counted() -> None:
    notices, heard = make()
    notices.arrived(WHO, Ping(1))
    assert notices.dropped == 1
    assert not heard


def test_what_a_peer_writes_is_cut_to_lines_and_lists_of_a_bounded_length() -> None:
    notices, heard = make()
    long = "\x1b[31m\n" + "x" * 5000
    culprits = (Culprit(0, long, long),) * 500
    notices.arrived(WHO, GaveUp(3, 1, 0, 1, long, culprits=culprits))
    notices.arrived(WHO, Report(3, 1, 5, 0, "in", doing=long, finished=long))
    notices.arrived(WHO, Disagreed(3, 1, 0, dict.fromkeys(range(9000), (1, 0, 0, 0, 0, 0))))
    given_up, report, disagreed = heard
    assert isinstance(given_up, GaveUp)
    assert isinstance(report, Report)
    assert isinstance(disagreed, Disagreed)
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
    notices, heard = make()
    who = Answered()
    notices.close(3, 1, lambda question: Report(3, 1, question.number, 0, "done"))
    notices.close(3, 1)
    notices.arrived(who, Inquire(3, 1, 0, 5))
    notices.arrived(who, gave_up(3, 1))
    notices.arrived(who, Inquire(3, 0, 0, 5))
    assert who.said == [Report(3, 1, 5, 0, "done")]
    who.lost = True
    notices.arrived(who, Inquire(3, 1, 0, 5))
    assert not heard
    assert notices.dropped == 2


def test_for_so_many_that_are_over_questions_are_answered() -> None:
    notices, _ = make()
    who = Answered()
    for communicator in range(_FAREWELLS + 1):
        notices.close(communicator, 1, lambda question: Report(3, 1, question.number, 0, "done"))
    notices.arrived(who, Inquire(0, 1, 0, 5))
    assert who.said == []
    notices.arrived(who, Inquire(1, 1, 0, 5))
    assert len(who.said) == 1
