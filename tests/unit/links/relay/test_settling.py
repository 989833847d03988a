"""A node that is about to close waits for what it has sent, and for what lies with it."""

import threading
import time
from typing import Any

from nexar.links.relay.hop import CLASS_BYTES
from nexar.links.relay.settling import Settling
from tests.unit.links.relay.small_world import Node, SmallWorld, say


def nobody(_: int) -> bool:
    return False


def settling_of(node: Node, needless: int = -1) -> Settling:
    return Settling(node.carriers, node.station._ways, lambda number: number == needless)


def test_who_has_sent_nothing_has_nothing_to_wait_for() -> None:
    node = SmallWorld(4).nodes[0]
    node.make(2)
    settling = settling_of(node)
    assert settling.moves()
    assert settling.questions() == []


def test_the_peer_is_asked_once_and_again_only_for_more_or_on_another_way() -> None:
    world = SmallWorld(4)
    carrier = world.nodes[0].make(2)
    say(carrier, b"first")
    settling = settling_of(world.nodes[0])
    assert settling.questions() == [carrier]
    assert not settling.moves()
    assert settling.questions() == []
    say(carrier, b"second")
    assert settling.questions() == [carrier]
    world.cut(0, 1)
    assert settling.moves()
    assert settling.questions() == [carrier]
    world.settle(carrier)
    assert settling.moves()
    assert settling.questions() == []


def test_one_that_is_stranded_is_waited_for_and_not_asked() -> None:
    world = SmallWorld(4)
    world.may_dial = True
    carrier = world.nodes[0].make(2)
    say(carrier, b"first")
    world.cut(0, 1)
    world.cut(0, 3)
    settling = settling_of(world.nodes[0])
    assert settling.questions() == []
    assert not settling.moves()
    world.dial(0, 2)
    assert settling.questions() == [carrier]


def test_what_is_for_who_has_left_or_what_has_finished_is_not_waited_for() -> None:
    world = SmallWorld(4)
    carrier = world.nodes[0].make(2)
    say(carrier, b"first")
    assert settling_of(world.nodes[0], needless=2).moves()
    assert settling_of(world.nodes[0], needless=2).questions() == []
    carrier.finish()
    assert settling_of(world.nodes[0]).questions() == []


def test_what_lies_here_for_others_is_waited_for() -> None:
    world = SmallWorld(6)
    carrier = world.nodes[0].make(3)
    for _ in range(3):
        say(carrier, bytes(CLASS_BYTES // 2 + 1))  # more than rank 2 takes before it has passed something on
    for here, there in ((0, 1), (1, 0), (0, 1)):  # there, the room for it back, and the rest
        while world.wires[here, there]:
            frame, body = world.wires[here, there].popleft()
            link: Any = world.nodes[there].links[here]
            world.nodes[there].station.take(link, frame, memoryview(body))
    settling = settling_of(world.nodes[1])
    waits = not settling.moves()
    world.run()
    assert waits
    assert settling.moves()


def test_a_station_settles_when_all_has_arrived_and_not_before_it() -> None:
    world = SmallWorld(4)
    carrier = world.nodes[0].make(2)
    say(carrier, b"first")
    station = world.nodes[0].station
    station.settle(time.monotonic(), nobody)  # that was the deadline
    assert carrier.outgoing.unacked
    waiting = threading.Thread(target=station.settle, args=(time.monotonic() + 60, nobody))
    waiting.start()
    while waiting.is_alive():
        world.run()
        waiting.join(0.001)
    assert not carrier.outgoing.unacked
    assert world.nodes[2].ears[0].frames == [b"first"]


def test_a_station_does_not_wait_for_who_is_lost() -> None:
    world = SmallWorld(4)
    carrier = world.nodes[0].make(2)
    say(carrier, b"first")
    station = world.nodes[0].station
    waiting = threading.Thread(target=station.settle, args=(time.monotonic() + 60, nobody))
    waiting.start()
    carrier.abort("it is gone")
    waiting.join(30)
    assert not waiting.is_alive()
