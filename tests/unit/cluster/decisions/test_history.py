"""What was chosen is kept for those who are behind, within bounds; what comes too early waits for its turn."""

from nexar.cluster.decisions.history import KEPT, History, ask
from nexar.cluster.decisions.succession_events import Say
from nexar.wire.messages import Chosen, Number, Prepare


def a_history(first: int, last: int) -> History:
    history = History()
    for epoch in range(first, last + 1):
        history.add(epoch, b"%d" % epoch)
    return history


def test_who_is_behind_is_told_what_followed_in_order() -> None:
    assert a_history(1, 3).tell(9, 2) == [Say(9, Chosen((0, 2, 0), b"2")), Say(9, Chosen((0, 3, 0), b"3"))]
    assert a_history(1, 3).tell(9, 4) == []
    assert a_history(5, 6).tell(9, 4) == [], "the next one is not known, so the others do not help"
    assert len(a_history(1, 100).tell(9, 1)) == 16, "the rest when it asks again"


def test_all_changes_since_an_epoch() -> None:
    assert a_history(1, 3).since(2) == [b"2", b"3"]
    assert a_history(1, 3).since(4) == []
    assert a_history(5, 6).since(4) == [], "one of them is not known"


def test_it_forgets_the_oldest() -> None:
    history = a_history(1, KEPT + 1)
    assert history.since(1) == []
    assert len(history.since(2)) == KEPT


def test_what_comes_too_early_waits_and_the_nearest_are_kept() -> None:
    history = History()
    for epoch in range(100, 0, -1):
        history.keep_for_later(epoch, b"%d" % epoch)
    assert history.take(1) == b"1"
    assert history.take(1) is None
    assert history.take(100) is None


def test_what_came_too_early_is_news_once() -> None:
    history = History()
    assert [history.keep_for_later(epoch, b"x") for epoch in (5, 5, 6)] == [True, False, True]


def test_to_ask_is_a_ballot_that_nobody_else_has() -> None:
    assert ask(7, 9, 3) == Say(9, Prepare((0, 3, 0), Number(0, 7)))
