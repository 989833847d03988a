import threading
import time

from nexar.cluster.alarm import Alarm

PATIENCE = 60.0


def test_it_rings_when_a_time_has_come_and_not_before() -> None:
    rung: list[float] = []
    done = threading.Event()

    def ring(now: float) -> None:
        rung.append(now)
        done.set()

    alarm = Alarm(ring)
    due = time.monotonic() + 0.02
    alarm.ring_by(due)
    assert done.wait(PATIENCE)
    alarm.close()
    assert rung[0] >= due


def test_an_earlier_time_goes_before_and_a_later_one_changes_nothing() -> None:
    done = threading.Event()
    alarm = Alarm(lambda _: done.set())
    alarm.ring_by(time.monotonic() + 1000)
    alarm.ring_by(time.monotonic())
    alarm.ring_by(time.monotonic() + 2000)
    alarm.ring_by(None)
    assert done.wait(PATIENCE)
    alarm.close()


def test_what_ring_returns_is_the_next_time() -> None:
    enough = threading.Semaphore(0)

    def ring(now: float) -> float:
        enough.release()
        return now

    alarm = Alarm(ring)
    alarm.ring_by(time.monotonic())
    assert all(enough.acquire(timeout=PATIENCE) for _ in range(3))
    alarm.close()
    alarm.close()
