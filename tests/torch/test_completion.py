import threading

from nexar.torch.work import CompletionThreads
from tests.ranks import EVENT_TIMEOUT


def test_a_task_that_waits_for_another_one_does_not_keep_it_waiting():
    completion = CompletionThreads()
    completion.open()
    first, second = threading.Event(), threading.Event()

    def waits():
        completion.hand_over(second.set)
        assert second.wait(EVENT_TIMEOUT)
        first.set()

    completion.hand_over(waits)
    assert first.wait(EVENT_TIMEOUT)
    completion.close()


def test_threads_that_are_idle_are_used_again_and_end_with_it():
    completion = CompletionThreads()
    for _ in range(50):
        done = threading.Event()
        completion.open()
        completion.hand_over(done.set)
        assert done.wait(EVENT_TIMEOUT)
    assert len(completion._threads) <= 3
    completion.close()
    assert completion._threads == set()


def test_what_was_handed_over_before_it_is_closed_is_done():
    completion = CompletionThreads()
    done = []
    completion.open()
    for number in range(20):
        completion.hand_over(lambda number=number: done.append(number))
    completion.close()
    assert sorted(done) == list(range(20))


def test_closing_it_from_one_of_its_own_threads_does_not_wait_for_that_thread():
    completion = CompletionThreads()
    completion.open()
    closed = threading.Event()

    def close():
        completion.close()
        closed.set()

    completion.hand_over(close)
    assert closed.wait(EVENT_TIMEOUT)
