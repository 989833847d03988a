"""Who receives from whom.

Virtual time, and the record of it.
"""

from random import Random

from nexar.testing.simulator.world import REMEMBERED, NetworkConditions, Partition, SimulatedNetwork, Timeline


def made() -> tuple[SimulatedNetwork, Timeline]:
    timeline = Timeline()
    return SimulatedNetwork(timeline, Random(1)), timeline


def said(network: SimulatedNetwork, timeline: Timeline, source: int, destination: int, count: int = 1) -> list[int]:
    """The numbers of the messages that arrive, in the order in which they do."""
    arrived: list[int] = []
    for number in range(count):
        network.send(source, destination, lambda number=number: arrived.append(number))  # type: ignore[misc]
    timeline.run_until(timeline.now + 100.0)
    return arrived


def test_a_message_arrives_once_and_later() -> None:
    network, timeline = made()
    seen: list[float] = []
    network.send(1, 2, lambda: seen.append(timeline.now))
    assert seen == []
    timeline.run_until(1.0)
    assert len(seen) == 1
    assert seen[0] > 0


def test_a_wall_closes_one_way_and_leaves_the_other_open() -> None:
    network, timeline = made()
    network.partitions.append(Partition(frozenset([1]), frozenset([2, 3])))
    assert (network.open(1, 2), network.open(2, 1), network.open(1, 4)) == (False, True, True)
    assert not network.both_ways(1, 2)
    assert not network.both_ways(2, 1)
    assert said(network, timeline, 1, 2) == []
    assert said(network, timeline, 2, 1) == [0]


def test_two_that_are_cut_off_receive_nothing_from_each_other_until_that_is_repaired() -> None:
    network, timeline = made()
    network.cut(7, 3)
    assert network.cuts == {(3, 7)}
    assert said(network, timeline, 3, 7) + said(network, timeline, 7, 3) == []
    network.heal(3, 7)
    assert said(network, timeline, 3, 7) == [0]


def test_a_message_that_is_under_way_arrives_although_the_link_is_cut() -> None:
    network, timeline = made()
    arrived: list[str] = []
    network.send(1, 2, lambda: arrived.append("word"))
    network.partitions.append(Partition(frozenset([1]), frozenset([2])))
    timeline.run_until(1.0)
    assert arrived == ["word"]


def test_under_faults_messages_are_lost_doubled_and_reordered() -> None:
    network, timeline = made()
    network.fault_model = NetworkConditions(loss=0.3, doubled=0.3, slowest=1.0)
    arrived = said(network, timeline, 1, 2, count=200)
    assert 100 < len(set(arrived)) < 180
    assert len(arrived) > len(set(arrived))
    assert arrived != sorted(arrived)


def test_the_messages_of_a_slow_node_are_late() -> None:
    network, timeline = made()
    network.slow[2] = 5.0
    arrived: list[float] = []
    network.send(1, 2, lambda: arrived.append(timeline.now))
    network.send(1, 3, lambda: arrived.append(timeline.now))
    timeline.run_until(10.0)
    assert arrived[0] < 1.0
    assert arrived[1] > 5.0


def test_what_is_due_happens_in_order_each_at_its_own_time() -> None:
    timeline = Timeline()
    seen: list[tuple[str, float]] = []
    for name, when in (("late", 3.0), ("early", 1.0), ("early too", 1.0), ("never", 9.0)):
        timeline.at(when, lambda name=name: seen.append((name, timeline.now)))  # type: ignore[misc]
    timeline.run_until(5.0)
    assert seen == [("early", 1.0), ("early too", 1.0), ("late", 3.0)]
    assert timeline.now == 5.0


def test_what_is_scheduled_for_the_past_happens_next_and_time_does_not_go_back() -> None:
    timeline = Timeline()
    timeline.run_until(5.0)
    seen: list[float] = []
    timeline.at(1.0, lambda: seen.append(timeline.now))
    timeline.after(1.0, lambda: seen.append(timeline.now))
    timeline.run_until(10.0)
    assert seen == [5.0, 6.0]


def test_the_digest_depends_on_every_line_and_on_its_time() -> None:
    def digest(*lines: tuple[float, str]) -> int:
        timeline = Timeline()
        for when, line in lines:
            timeline.at(when, lambda line=line: timeline.record(line))  # type: ignore[misc]
        timeline.run_until(10.0)
        return timeline.digest

    usual = digest((1.0, "a"), (2.0, "b"))
    assert usual == digest((1.0, "a"), (2.0, "b"))
    assert len({usual, digest((1.0, "a"), (3.0, "b")), digest((1.0, "b"), (2.0, "a")), digest((1.0, "a"))}) == 4


def test_the_last_lines_are_remembered() -> None:
    timeline = Timeline()
    for number in range(REMEMBERED + 5):
        timeline.record(f"line {number}")
    assert len(timeline.last) == REMEMBERED
    assert timeline.last[-1].endswith(f"line {REMEMBERED + 4}")
    assert timeline.events == REMEMBERED + 5
