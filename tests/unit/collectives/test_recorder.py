import threading

from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.recorder import KEPT, Facts, Record, Recorder


def facts(sequence: int) -> Facts:
    return sequence, Fingerprint(2, 11, 8, 0, 1), float(sequence), sequence + 0.5, 32, ""


def test_what_was_recorded_can_be_read_in_the_order_of_its_end() -> None:
    recorder = Recorder()
    assert recorder.snapshot() == []
    for sequence in (1, 0, 2):
        recorder.record(facts(sequence))
    assert recorder.snapshot() == [Record(*facts(sequence)) for sequence in (0, 1, 2)]


def test_only_the_last_are_kept() -> None:
    recorder = Recorder()
    for sequence in range(KEPT + 7):
        recorder.record(facts(sequence))
    assert [record.sequence for record in recorder.snapshot()] == list(range(7, KEPT + 7))


def test_several_threads_lose_nothing() -> None:
    recorder = Recorder()

    def run(begin: int) -> None:
        for sequence in range(begin, begin + KEPT // 4):
            recorder.record(facts(sequence))

    threads = [threading.Thread(target=run, args=(part * KEPT // 4,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [record.sequence for record in recorder.snapshot()] == list(range(KEPT))


def test_at_the_end_all_that_is_kept_is_handed_out_with_how_many_are_not() -> None:
    recorder = Recorder(4)
    for sequence in range(6):
        recorder.record(facts(sequence))
    kept, missed = recorder.drain()
    assert ([each[0] for each in kept], missed) == ([2, 3, 4, 5], 2)
