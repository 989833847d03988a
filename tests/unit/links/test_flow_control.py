from hypothesis import given
from hypothesis import strategies as st

from nexar.links.flow_control import ReceiveCredit, SendCredit, UnexpectedBudget

LIMIT = 1 << 20


def test_whole_messages_stop_at_the_reserve_and_envelopes_go_on() -> None:
    credit = SendCredit(LIMIT)
    while credit.take_whole(64 << 10):
        assert credit.available >= credit.reserve
    assert not credit.take_whole(64 << 10)
    assert credit.take_envelope(104)


def test_envelopes_stop_when_nothing_is_left() -> None:
    credit = SendCredit(1000)
    assert credit.take_envelope(600)
    assert not credit.take_envelope(600)
    assert credit.give_back(600)
    assert credit.take_envelope(600)


def test_giving_back_more_than_was_taken_is_seen() -> None:
    credit = SendCredit(1000)
    assert credit.take_envelope(100)
    assert not credit.give_back(101)


def test_a_peer_that_overdraws_is_seen() -> None:
    credit = ReceiveCredit(1000)
    assert credit.arrived(1000)
    assert not credit.arrived(1)


@given(st.lists(st.integers(104, (64 << 10) + 400), min_size=1, max_size=200))
def test_a_sender_whose_messages_are_consumed_never_starves(sizes: list[int]) -> None:
    send, receive = SendCredit(LIMIT), ReceiveCredit(LIMIT)
    for size in sizes:
        assert send.take_whole(size)
        assert receive.arrived(size)
        assert send.give_back(receive.consumed(size))


@given(st.lists(st.tuples(st.booleans(), st.integers(104, 70_000))))
def test_both_ends_agree_on_what_is_outstanding(steps: list[tuple[bool, int]]) -> None:
    send, receive = SendCredit(LIMIT), ReceiveCredit(LIMIT)
    unread: list[int] = []
    for sends, size in steps:
        if sends and send.take_envelope(size):
            assert receive.arrived(size)
            unread.append(size)
        elif unread:
            assert send.give_back(receive.consumed(unread.pop(0)))
        assert LIMIT - send.available == receive.held == sum(unread) + receive.owed


def test_the_early_budget_is_a_bound() -> None:
    budget = UnexpectedBudget(100)
    assert budget.reserve(60)
    assert not budget.reserve(41)
    budget.release(60)
    assert budget.reserve(100)


def test_a_sender_never_starves_after_many_small_messages_were_consumed_at_once() -> None:
    send, receive = SendCredit(LIMIT), ReceiveCredit(LIMIT)
    small, largest = 112, (64 << 10) + 400
    for _ in range(20):
        unread = 0
        while send.take_whole(small):
            assert receive.arrived(small)
            unread += small
        assert unread > LIMIT // 2
        for _ in range(unread // small):
            assert send.give_back(receive.consumed(small))
        assert send.available - send.reserve >= LIMIT // 2
        assert send.take_whole(largest)
        assert receive.arrived(largest)
        assert send.give_back(receive.consumed(largest))


def test_the_last_part_of_a_credit_circulates_however_much_of_it_is_unread() -> None:
    send, receive = SendCredit(LIMIT), ReceiveCredit(LIMIT)
    while send.available > LIMIT // 8:  # unread: what remains is less than what is otherwise saved up
        assert send.take_envelope(104)
        assert receive.arrived(104)
    for _ in range(10_000):
        assert send.take_envelope(104), "the receiver keeps all that it owes"
        assert receive.arrived(104)
        assert send.give_back(receive.consumed(104))
