from typing import cast

from nexar.cluster.addresses import MAX_ADDRESSES
from nexar.cluster.arrivals import Arrivals
from nexar.transport.base import Carrier, Peer


class Arrived:
    def __init__(self, node: int) -> None:
        self.peer = Peer(node, None, True, "10.0.0.1:7")


def come(arrivals: Arrivals, *nodes: int) -> list[Carrier]:
    """One carrier of each; all of them find room."""
    made = [cast(Carrier, Arrived(node)) for node in nodes]
    assert [arrivals.add(carrier) for carrier in made] == [None] * len(made)
    return made


def test_the_oldest_of_a_node_goes_when_it_has_too_many() -> None:
    arrivals = Arrivals(most=100, most_of_one=2)
    first, other, second = come(arrivals, 1, 2, 1)
    third = cast(Carrier, Arrived(1))
    assert arrivals.add(third) is first
    assert arrivals.listed() == [other, second, third]


def test_the_oldest_of_all_goes_when_there_are_too_many() -> None:
    arrivals = Arrivals(most=3, most_of_one=2)
    first, *rest = come(arrivals, 1, 2, 3)
    fourth = cast(Carrier, Arrived(4))
    assert arrivals.add(fourth) is first
    assert arrivals.listed() == [*rest, fourth]


def test_who_has_become_something_else_makes_room() -> None:
    arrivals = Arrivals(most=2, most_of_one=1)
    first, _ = come(arrivals, 1, 2)
    assert arrivals.remove(first)
    assert not arrivals.remove(first)
    come(arrivals, 1)
    assert len(arrivals) == 2


def test_there_is_room_for_a_dial_that_reaches_every_address_over_every_transport() -> None:
    come(Arrivals(), *[1] * 2 * MAX_ADDRESSES)
