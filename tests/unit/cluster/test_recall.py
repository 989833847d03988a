import threading

import pytest

from nexar.cluster.recall import Recall, Recalled
from tests.ranks import PATIENCE


def test_whoever_waits_is_woken_once_it_is_made() -> None:
    recall, woken = Recall(), threading.Event()
    with recall.waking(woken.set):
        assert not woken.is_set()
        recall.make()
        assert woken.is_set()
    assert recall.made


def test_whoever_comes_later_is_woken_at_once() -> None:
    recall, woken = Recall(), threading.Event()
    recall.make()
    recall.make()
    with recall.waking(woken.set):
        assert woken.is_set()


def test_whoever_has_left_is_left_alone() -> None:
    recall, woken = Recall(), threading.Event()
    with recall.waking(woken.set):
        pass
    recall.make()
    assert not woken.is_set()


def test_a_pause_lasts_its_time_or_until_the_recall() -> None:
    recall = Recall()
    recall.pause(0.001)
    threading.Timer(0.02, recall.make).start()
    with pytest.raises(Recalled, match="closed"):
        recall.pause(PATIENCE)
    with pytest.raises(Recalled):
        recall.pause(PATIENCE)
