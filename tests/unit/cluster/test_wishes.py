"""What a member brings to the next checkpoint."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

from nexar.cluster.decisions.resize import Wish
from nexar.cluster.wishes import Wishes
from tests.ranks import PATIENCE
from tests.unit.cluster.decisions.parliament import a_member

TWO = (a_member(8), a_member(9))


def never() -> bool:
    return False


def test_it_has_none_at_first() -> None:
    assert Wishes().mine() == Wish()


def test_all_that_was_wished_is_brought() -> None:
    wishes = Wishes()
    wishes.set_waiting(TWO)
    wishes.leave()
    wishes.remove(3, "x" * 5000)
    assert wishes.mine() == Wish(TWO, leaving=True, removals={3: "x" * 1000})


def test_who_waits_is_who_waited_last() -> None:
    wishes = Wishes()
    wishes.set_waiting(TWO)
    wishes.set_waiting(TWO[1:])
    assert wishes.mine().waiting == TWO[1:]


def test_nobody_asks_for_the_removal_of_who_is_gone() -> None:
    wishes = Wishes()
    wishes.remove(3, "")
    wishes.remove(4, "")
    wishes.settle(frozenset({3, 77}))
    assert wishes.mine().removals == {4: ""}


def test_what_was_brought_does_not_change_afterwards() -> None:
    wishes = Wishes()
    brought = wishes.mine()
    wishes.remove(3, "")
    assert brought.removals == {}


def test_who_waits_for_joiners_is_woken_when_they_have_come() -> None:
    wishes = Wishes()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wishes.wait, 2, PATIENCE, never)
        wishes.set_waiting(TWO[:1])
        wishes.set_waiting(TWO)
        assert waiting.result(PATIENCE)
    assert not wishes.wait(3, 0.01, never)


def test_who_waits_for_joiners_is_woken_when_it_is_over() -> None:
    wishes, over = Wishes(), threading.Event()
    wishes.set_waiting(TWO)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wishes.wait, 3, math.inf, over.is_set)
        wishes.look()
        over.set()
        wishes.look()
        assert not waiting.result(PATIENCE)
    assert wishes.wait(2, PATIENCE, over.is_set)  # they are there
