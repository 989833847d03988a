"""What a node asks for at the next checkpoint."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

from nexar.cluster.decisions.resize import ResizeRequest
from nexar.communicator.successor_requests import CheckpointRequests
from tests.ranks import EVENT_TIMEOUT
from tests.unit.cluster.decisions.voters import a_member

TWO = (a_member(8), a_member(9))


def never() -> bool:
    return False


def test_it_has_none_at_first() -> None:
    assert CheckpointRequests().mine() == ResizeRequest()


def test_all_that_was_wished_is_brought() -> None:
    requests = CheckpointRequests()
    requests.set_waiting(TWO)
    requests.leave()
    requests.remove(3, "x" * 5000)
    assert requests.mine() == ResizeRequest(TWO, leaving=True, removals={3: "x" * 1000})


def test_who_waits_is_who_waited_last() -> None:
    requests = CheckpointRequests()
    requests.set_waiting(TWO)
    requests.set_waiting(TWO[1:])
    assert requests.mine().waiting == TWO[1:]


def test_nobody_asks_for_the_removal_of_who_is_gone() -> None:
    requests = CheckpointRequests()
    requests.remove(3, "")
    requests.remove(4, "")
    requests.settle(frozenset({3, 77}))
    assert requests.mine().removals == {4: ""}


def test_what_was_brought_does_not_change_afterwards() -> None:
    requests = CheckpointRequests()
    brought = requests.mine()
    requests.remove(3, "")
    assert brought.removals == {}


def test_who_waits_for_joiners_is_woken_when_they_have_come() -> None:
    requests = CheckpointRequests()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(requests.wait, 2, EVENT_TIMEOUT, never)
        requests.set_waiting(TWO[:1])
        requests.set_waiting(TWO)
        assert waiting.result(EVENT_TIMEOUT)
    assert not requests.wait(3, 0.01, never)


def test_who_waits_for_joiners_is_woken_when_it_is_over() -> None:
    requests, over = CheckpointRequests(), threading.Event()
    requests.set_waiting(TWO)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(requests.wait, 3, math.inf, over.is_set)
        requests.recheck()
        over.set()
        requests.recheck()
        assert not waiting.result(EVENT_TIMEOUT)
    assert requests.wait(2, EVENT_TIMEOUT, over.is_set)  # they are there
