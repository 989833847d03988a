"""Many threads on one carrier, each node driven by a thread of its own."""

import threading

from nexar.wire.frame import Lane
from tests.conformance.harness import Pair, digest, pattern, wait_for

THREADS, FRAMES, PAYLOADS = 8, 300, 6


def test_eight_threads_use_one_carrier_at_once(pair: Pair) -> None:
    landed = {n: bytearray(_size(n)) for n in range(THREADS * PAYLOADS)}
    for transfer, into in landed.items():
        pair.right.carrier.expect_payload(transfer, memoryview(into))
    kept = {transfer: memoryview(pattern(_size(transfer), transfer + 1)) for transfer in landed}
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for index in range(FRAMES):
                pair.left.send(pattern(index % 200), tag=index, lane=Lane(number % 5), communicator=number)
                if index % (FRAMES // PAYLOADS) == 0:
                    transfer = number * PAYLOADS + index // (FRAMES // PAYLOADS)
                    pair.left.carrier.send_payload(transfer, kept[transfer])
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    with pair.driving():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_for(lambda: len(pair.right.received.frames) == THREADS * FRAMES, "all frames")
        wait_for(lambda: len(pair.right.received.payloads) == len(landed), "all payloads")
    assert errors == []
    for number in range(THREADS):
        tags = [frame.tag for frame, _ in pair.right.received.frames if frame.communicator == number]
        assert tags == list(range(FRAMES))
    assert all(body == pattern(frame.tag % 200) for frame, body in pair.right.received.frames)
    assert all(digest(into) == digest(kept[transfer]) for transfer, into in landed.items())


def test_threads_withdraw_and_redirect_while_others_send(pair: Pair) -> None:
    size = 4 << 20
    kept = [memoryview(pattern(size)) for _ in range(THREADS)]
    landed = [bytearray(size) for _ in range(THREADS)]
    for transfer, into in enumerate(landed):
        pair.right.carrier.expect_payload(transfer, memoryview(into))
    start = threading.Barrier(2 * THREADS)

    def send(transfer: int) -> None:
        start.wait()
        pair.left.carrier.send_payload(transfer, kept[transfer])
        if transfer % 2:
            pair.left.carrier.withdraw_payload(transfer)
        for tag in range(50):
            pair.left.send(tag=tag, communicator=transfer)

    def receive(transfer: int) -> None:
        start.wait()
        if transfer % 2:
            pair.right.carrier.redirect_payload(transfer, None)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(THREADS) for call in (send, receive)]
    with pair.driving():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_for(lambda: len(pair.right.received.frames) == 50 * THREADS, "all frames")
        wait_for(lambda: {0, 2, 4, 6} <= set(pair.right.received.payloads), "the payloads that nobody took back")
    assert all(digest(landed[n]) == digest(kept[n]) for n in (0, 2, 4, 6))
    pair.check_usable()


def test_aborting_from_many_threads_ends_the_carrier_once(pair: Pair) -> None:
    start = threading.Barrier(THREADS)

    def abort(number: int) -> None:
        start.wait()
        pair.left.carrier.abort(f"thread {number}")

    threads = [threading.Thread(target=abort, args=(number,)) for number in range(THREADS)]
    with pair.driving():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_for(lambda: pair.right.received.lost, "the loss")
    pair.quieten()
    assert len(pair.right.received.lost) == 1
    assert pair.left.received.received == []


def _size(transfer: int) -> int:
    return (0, 1, 1000, 70_000, 1_500_000)[transfer % 5]
