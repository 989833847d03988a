import signal

from nexar.launch.escalation import Escalation


def test_nothing_is_due_before_somebody_asks():
    escalation = Escalation()
    assert escalation.due(0.0) is None
    assert escalation.tick(1e9) is None
    assert not escalation.asked


def test_the_first_request_is_passed_on_and_killing_follows_after_the_grace():
    escalation = Escalation(grace=5, short_grace=1)
    assert escalation.ask(signal.SIGINT, 10.0) == signal.SIGINT
    assert escalation.due(11.0) == 4.0
    assert escalation.tick(14.9) is None
    assert escalation.tick(15.0) == signal.SIGKILL


def test_the_second_request_shortens_the_grace():
    escalation = Escalation(grace=5, short_grace=1)
    escalation.ask(signal.SIGINT, 10.0)
    assert escalation.ask(signal.SIGINT, 10.5) == signal.SIGTERM
    assert escalation.due(10.5) == 1.0


def test_a_late_second_request_does_not_lengthen_it():
    escalation = Escalation(grace=5, short_grace=1)
    escalation.ask(signal.SIGINT, 10.0)
    escalation.ask(signal.SIGINT, 14.5)
    assert escalation.due(14.5) == 0.5


def test_killing_happens_once():
    escalation = Escalation(grace=5, short_grace=1)
    escalation.ask(signal.SIGTERM, 0.0)
    assert escalation.tick(9.0) == signal.SIGKILL
    assert escalation.tick(9.0) is None
    assert escalation.due(9.0) is None
