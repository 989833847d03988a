"""A suspicion is told to a few, then to more; the suspect hears of it once."""

from nexar.cluster.decisions.complaints import Complaints
from nexar.cluster.decisions.succession_events import Say
from nexar.cluster.decisions.suspicions import Suspicions
from nexar.wire.messages import Suspect
from tests.unit.cluster.decisions.parliament import a_membership

MANY = a_membership(40)


def of(me: int, *suspects: int) -> tuple[Complaints, Suspicions]:
    suspicions = Suspicions(me, MANY)
    complaints = Complaints(me, MANY, suspicions)
    for node in suspects:
        suspicions.add(node, "silence", 0.0)
        complaints.add(node)
    return complaints, suspicions


def test_the_lowest_few_that_are_reached_hear_of_it_first_and_once() -> None:
    complaints, _ = of(2, 30, 3)
    said = complaints.tell(0.0, insist=False)
    assert [(say.node, say.word.node) for say in said if isinstance(say.word, Suspect)] == [
        (listener, suspect) for suspect in (30, 3) for listener in (1, 4, 5, 6)
    ]
    assert said[0].word == Suspect(1, 30, 2, "silence")
    assert complaints.tell(9.0, insist=False) == []
    assert complaints.again is None


def test_while_nothing_comes_of_it_more_and_more_hear_of_it() -> None:
    complaints, suspicions = of(2, 30)
    heard, now = [len(complaints.tell(0.0, insist=True))], 0.0
    for _ in range(4):
        assert complaints.again is not None
        now = complaints.again
        heard.append(len(complaints.tell(now, insist=True)))
    assert heard == [4, 8, 16, 32, 38]
    suspicions.drop(30)
    assert complaints.tell(now + 99.0, insist=True) == []
    assert complaints.again is None


def test_a_suspicion_that_is_over_is_not_told() -> None:
    complaints, suspicions = of(2, 30)
    suspicions.drop(30)
    assert complaints.tell(0.0, insist=True) == []


def test_the_suspect_hears_of_each_complaint_once() -> None:
    complaints, _ = of(2)
    word = Suspect(1, 30, 5, "silence")
    assert complaints.forward(word) == [Say(30, word)]
    assert complaints.forward(word) == []
    assert complaints.forward(Suspect(1, 30, 6, "silence")) != []


def test_what_comes_from_the_epoch_before_is_told_anew() -> None:
    suspicions = Suspicions(2, MANY)
    suspicions.add(30, "silence", 0.0)
    assert len(Complaints(2, MANY, suspicions).tell(0.0, insist=True)) == 4
