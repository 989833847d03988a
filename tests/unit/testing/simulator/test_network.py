"""Who hears whom."""

from random import Random

from nexar.testing.simulator.network import Network, Wall, Weather
from nexar.testing.simulator.timeline import Timeline


def made() -> tuple[Network, Timeline]:
    timeline = Timeline()
    return Network(timeline, Random(1)), timeline


def said(network: Network, timeline: Timeline, source: int, destination: int, count: int = 1) -> list[int]:
    """The numbers of the words that arrive, in the order in which they do."""
    arrived: list[int] = []
    for number in range(count):
        network.send(source, destination, lambda number=number: arrived.append(number))  # type: ignore[misc]
    timeline.run_until(timeline.now + 100.0)
    return arrived


def test_a_word_arrives_once_and_later() -> None:
    network, timeline = made()
    seen: list[float] = []
    network.send(1, 2, lambda: seen.append(timeline.now))
    assert seen == []
    timeline.run_until(1.0)
    assert len(seen) == 1
    assert seen[0] > 0


def test_a_wall_closes_one_way_and_leaves_the_other_open() -> None:
    network, timeline = made()
    network.walls.append(Wall(frozenset([1]), frozenset([2, 3])))
    assert (network.open(1, 2), network.open(2, 1), network.open(1, 4)) == (False, True, True)
    assert not network.both_ways(1, 2)
    assert not network.both_ways(2, 1)
    assert said(network, timeline, 1, 2) == []
    assert said(network, timeline, 2, 1) == [0]


def test_two_that_are_cut_off_do_not_hear_each_other_until_that_is_mended() -> None:
    network, timeline = made()
    network.cut(7, 3)
    assert network.cuts == {(3, 7)}
    assert said(network, timeline, 3, 7) + said(network, timeline, 7, 3) == []
    network.mend(3, 7)
    assert said(network, timeline, 3, 7) == [0]


def test_a_word_that_is_under_way_arrives_behind_a_wall() -> None:
    network, timeline = made()
    arrived: list[str] = []
    network.send(1, 2, lambda: arrived.append("word"))
    network.walls.append(Wall(frozenset([1]), frozenset([2])))
    timeline.run_until(1.0)
    assert arrived == ["word"]


def test_in_bad_weather_words_are_lost_doubled_and_overtake_one_another() -> None:
    network, timeline = made()
    network.weather = Weather(loss=0.3, doubled=0.3, slowest=1.0)
    arrived = said(network, timeline, 1, 2, count=200)
    assert 100 < len(set(arrived)) < 180
    assert len(arrived) > len(set(arrived))
    assert arrived != sorted(arrived)


def test_the_words_of_a_slow_node_are_late() -> None:
    network, timeline = made()
    network.slow[2] = 5.0
    arrived: list[float] = []
    network.send(1, 2, lambda: arrived.append(timeline.now))
    network.send(1, 3, lambda: arrived.append(timeline.now))
    timeline.run_until(10.0)
    assert arrived[0] < 1.0
    assert arrived[1] > 5.0
