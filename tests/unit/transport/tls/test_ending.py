from nexar.transport.base import CarrierLost
from nexar.transport.tls.ending import Ending

PEER, OURS = CarrierLost("peer", "gone"), CarrierLost("closed", "had enough")


def test_who_notices_first_decides_why() -> None:
    ending = Ending()
    assert ending.lose(PEER) is PEER
    assert ending.lose(OURS) is PEER


def test_the_sink_is_told_once() -> None:
    ending = Ending()
    assert ending.take_news() is None
    ending.lose(PEER)
    assert ending.take_news() is PEER
    assert ending.take_news() is None


def test_a_silent_end_is_never_told() -> None:
    ending = Ending()
    assert ending.lose_silently(OURS) is OURS
    assert ending.take_news() is None


def test_an_abort_silences_a_loss_that_was_not_told_yet() -> None:
    ending = Ending()
    ending.lose(PEER)
    assert ending.lose_silently(OURS) is PEER
    assert ending.take_news() is None


def test_a_broken_carrier_is_not_lost_before_the_rest_was_taken_in_and_then_for_the_same_reason() -> None:
    ending = Ending()
    assert ending.break_off(PEER) == (PEER, True)
    assert ending.break_off(OURS) == (PEER, False)
    assert ending.is_broken
    assert ending.lost is None
    assert ending.lose(OURS) is PEER
    assert ending.take_news() is PEER


def test_breaking_after_the_loss_repeats_its_reason() -> None:
    ending = Ending()
    ending.lose(PEER)
    assert ending.break_off(OURS)[0] is PEER
