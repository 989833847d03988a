"""A link delivers every frame once and in order, or breaks and tells both ends."""

from random import Random

from nexar.cluster.decisions.successor_events import GenerationKey
from nexar.testing.simulator.world import (
    IDLE_TIMEOUT,
    DataLinks,
    LinkFrame,
    NetworkConditions,
    Partition,
    SimulatedNetwork,
    Timeline,
)

KEY = GenerationKey(1, 1)


class End:
    """Records what arrives."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.alive = True
        self.broken: set[int] = set()
        self.numbers: list[int] = []
        self.ended: list[tuple[int, bool]] = []

    def frame_received(self, sender: int, frame: LinkFrame) -> None:
        self.numbers.append(frame.number)

    def link_ended(self, peer: int, cause: str, *, left: bool = False) -> None:
        self.ended.append((peer, left))


class Scene:
    """Two nodes."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.network = SimulatedNetwork(self.timeline, Random(1))
        self.links = DataLinks(self.timeline, self.network, Random(2))
        self.one, self.other = End(1), End(2)
        self.links.ends.update({1: self.one, 2: self.other})

    def send(self, *numbers: int) -> None:
        for number in numbers:
            self.links.send(1, 2, LinkFrame("call", KEY, number))

    def passes(self, seconds: float) -> None:
        self.timeline.run_until(self.timeline.now + seconds)

    def split(self) -> None:
        one, other = frozenset([1]), frozenset([2])
        self.network.partitions += [Partition(one, other), Partition(other, one)]


def test_loss_delays_frames_and_keeps_their_order() -> None:
    scene = Scene()
    scene.network.fault_model = NetworkConditions(loss=0.5, doubled=0.5, slowest=1.0)
    scene.send(*range(50))
    scene.passes(60.0)
    assert scene.other.numbers == list(range(50))


def test_a_short_partition_delays_and_a_long_one_breaks_the_link_at_both_ends() -> None:
    scene = Scene()
    scene.split()
    scene.send(1, 2)
    scene.passes(IDLE_TIMEOUT / 2)
    scene.network.partitions.clear()
    scene.passes(1.0)
    assert scene.other.numbers == [1, 2]
    scene.split()
    scene.send(3)
    scene.passes(IDLE_TIMEOUT + 1.0)
    assert (scene.one.ended, scene.other.ended) == ([(2, False)], [])
    scene.network.partitions.clear()
    scene.passes(1.0)
    assert scene.other.ended == [(1, False)]
    assert not scene.links.send(1, 2, LinkFrame("call", KEY, 4))
    assert scene.links.replace(1, 2)
    scene.send(5)
    scene.passes(1.0)
    assert scene.other.numbers == [1, 2, 5]


def test_the_end_of_a_process_follows_its_frames() -> None:
    scene = Scene()
    scene.send(1)
    scene.one.alive = False
    scene.links.process_ended(1, "it has left", left=True)
    scene.passes(1.0)
    assert (scene.other.numbers, scene.other.ended) == ([1], [(1, True)])


def test_nothing_tells_of_the_death_of_a_host_until_a_frame_stays_unanswered() -> None:
    scene = Scene()
    scene.other.alive = False
    scene.links.host_died(2)
    scene.passes(5.0)
    assert scene.one.ended == []
    scene.send(1)
    scene.passes(IDLE_TIMEOUT + 1.0)
    assert scene.one.ended == [(2, False)]
