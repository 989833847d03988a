from nexar.links.outbox import Outbox
from nexar.transport.base import CarrierLost


def test_calls_are_made_in_order_and_once() -> None:
    outbox, made = Outbox(), []
    for number in range(3):
        outbox.add(made.append, number)
    outbox.flush()
    outbox.flush()
    assert made == [0, 1, 2]


def test_a_call_may_leave_more_to_do() -> None:
    outbox, made = Outbox(), []
    outbox.add(lambda: outbox.add(made.append, "more"))
    outbox.flush()
    assert made == ["more"]


def test_a_lost_carrier_does_not_keep_the_others_from_sending() -> None:
    def lost() -> None:
        raise CarrierLost("peer", "gone")

    outbox, made = Outbox(), []
    outbox.add(lost)
    outbox.add(made.append, "other")
    outbox.flush()
    assert made == ["other"]
