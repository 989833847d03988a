import threading

from nexar.links.waiter import Waiter


def test_a_wake_before_the_sleep_ends_it() -> None:
    waiter = Waiter()
    waiter.prepare()
    waiter.wake()
    waiter.sleep(60)


def test_a_wake_ends_the_sleep_of_another_thread() -> None:
    waiter = Waiter()
    waiter.prepare()
    sleeper = threading.Thread(target=waiter.sleep, args=(60,))
    sleeper.start()
    waiter.wake()
    sleeper.join(10)
    assert not sleeper.is_alive()


def test_a_wake_that_nobody_prepared_for_does_nothing() -> None:
    waiter = Waiter()
    waiter.wake()
    waiter.prepare()
    waiter.wake()
    waiter.wake()
    waiter.sleep(60)


def test_the_last_operation_wakes() -> None:
    waiter = Waiter()
    waiter.pending = 2
    waiter.prepare()
    waiter.count(None)
    assert waiter.asleep
    waiter.count(None)
    waiter.sleep(60)
    assert not waiter.pending


def test_the_first_error_wakes_and_what_ends_later_changes_nothing() -> None:
    waiter = Waiter()
    waiter.pending = 3
    waiter.prepare()
    waiter.count(ValueError())
    waiter.sleep(60)
    waiter.count(None)
    assert waiter.pending == 0
