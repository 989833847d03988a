"""No majority: told as soon as that is sure. A majority that does not finish: told when time is over."""

from nexar.cluster.decisions.agreement import Agreement
from nexar.cluster.decisions.electorate import Electorate
from nexar.cluster.decisions.stalling import Stalling
from nexar.cluster.decisions.succession_events import Stall
from nexar.cluster.decisions.suspicions import Suspicions
from nexar.wire.messages import Number, Promise
from tests.unit.cluster.decisions.parliament import SEED, a_membership

FOUR = a_membership(4)


def some() -> tuple[Stalling, Suspicions]:
    suspicions = Suspicions(1, FOUR)
    made = Stalling(1, Electorate(FOUR), suspicions, recovery_timeout=30.0, probe_timeout=1.0)
    return made, suspicions


def test_while_nothing_presses_time_does_not_run() -> None:
    stalling, _ = some()
    assert stalling.due is None
    stalling.press(5.0, pressing=True)
    stalling.press(6.0, pressing=True)
    assert stalling.due == 35.0
    stalling.press(7.0, pressing=False)
    assert stalling.due is None
    assert stalling.stall(None, 99.0) == []


def test_when_time_is_over_it_names_who_has_not_voted() -> None:
    stalling, suspicions = some()
    suspicions.add(4, "silence", 5.0)
    stalling.press(5.0, pressing=True)
    agreement = Agreement((0, 1, 0), 1, Electorate(FOUR))
    agreement.propose(b"v", 5.0)
    agreement.hear(2, Promise((0, 1, 0), Number(1, 1)), 5.0)
    assert stalling.stall(agreement, 34.9) == []
    assert stalling.stall(agreement, 35.0) == [Stall((1, 2, 3, SEED), 3, (3, 4, SEED))]
    assert stalling.stall(agreement, 99.0) == []
    assert stalling.told


def test_who_has_no_ballot_can_only_say_who_could_have_voted() -> None:
    stalling, _ = some()
    stalling.press(5.0, pressing=True)
    assert stalling.stall(None, 35.0) == [Stall((1, 2, 3, 4, SEED), 3, (2, 3, 4, SEED))]


def test_without_a_majority_it_waits_only_until_the_losses_are_sure() -> None:
    stalling, suspicions = some()
    stalling.press(5.0, pressing=True)
    for node in (3, 4, SEED):
        suspicions.add(node, "silence", 6.0)
    assert stalling.due == 7.0
    assert stalling.stall(None, 7.0) == [Stall((1, 2), 3, ())]


def test_those_that_left_by_their_own_will_are_named() -> None:
    stalling, suspicions = some()
    stalling.press(5.0, pressing=True)
    for node in (3, 4):
        suspicions.add(node, "it left", 6.0, willing=True)
        suspicions.add(node, "its connection ended", 6.0)
    suspicions.add(SEED, "silence", 6.0)
    assert stalling.stall(None, 7.0) == [Stall((1, 2), 3, (), left=(3, 4))]


def test_a_node_that_runs_slowly_says_it_later_by_its_own_delay() -> None:
    suspicions = Suspicions(1, FOUR)
    stalling = Stalling(
        1, Electorate(FOUR), suspicions, recovery_timeout=30.0, probe_timeout=1.0, own_delay=lambda: 8.0
    )
    stalling.press(5.0, pressing=True)
    assert stalling.due == 43.0
    for node in (2, 3, 4):
        suspicions.add(node, "silence", 6.0)
    assert stalling.due == 15.0
