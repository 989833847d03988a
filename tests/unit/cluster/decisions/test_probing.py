"""A try says something only about the time after the question."""

from nexar.cluster.decisions.probing import Probing
from nexar.cluster.decisions.succession_events import Probe


def test_a_try_that_is_under_way_is_not_made_twice_unless_it_is_forgotten() -> None:
    probing = Probing(1.0)
    probing.ask(5, 0.0)
    probing.ask(5, 0.5)
    assert probing.drain() == [Probe(5)]
    assert probing.drain() == []
    probing.ask(5, 2.0)
    assert probing.drain() == [Probe(5)]


def test_who_was_reached_may_have_died_since_the_try_began() -> None:
    probing = Probing(1.0)
    probing.ask(5, 1.0)
    probing.told(5, 1.5, reached=True)
    assert probing.reached_since(5, 1.0)
    assert not probing.reached_since(5, 1.2)
    assert not probing.missed_since(5, 0.0)


def test_who_was_missed_had_until_the_end_to_answer() -> None:
    probing = Probing(1.0)
    probing.ask(5, 1.0)
    probing.told(5, 1.5, reached=False)
    assert probing.missed_since(5, 1.5)
    assert not probing.missed_since(5, 1.6)
    assert not probing.reached_since(5, 0.0)


def test_the_last_try_counts_and_another_epoch_forgets_all() -> None:
    probing = Probing(1.0)
    probing.ask(5, 1.0)
    probing.told(5, 1.5, reached=False)
    probing.ask(5, 2.0)
    probing.told(5, 2.1, reached=True)
    assert not probing.missed_since(5, 0.0)
    probing.forget()
    assert not probing.reached_since(5, 0.0)
    probing.told(6, 3.0, reached=True)
    assert not probing.reached_since(6, 0.0), "nobody asked: it is not known when that began"


def test_who_was_found_after_a_try_is_not_missed() -> None:
    probing = Probing(1.0)
    probing.ask(5, 1.0)
    probing.told(5, 1.5, reached=False)
    probing.found(5)
    assert not probing.missed_since(5, 0.0)


def test_a_node_that_runs_slowly_waits_longer_before_it_tries_again() -> None:
    probing = Probing(1.0, lambda: 9.0)
    probing.ask(5, 0.0)
    probing.drain()
    probing.ask(5, 19.9)
    assert probing.drain() == []
    probing.ask(5, 20.0)
    assert [each.node for each in probing.drain()] == [5]
