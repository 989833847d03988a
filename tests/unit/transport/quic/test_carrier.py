"""Frames, and how a carrier ends, over real sockets of this host."""

import gc
import threading
import weakref

import pytest

from nexar.transport.base import CarrierLost
from nexar.transport.quic.send_streams import MAX_ORDERED_STREAMS
from nexar.transport.quic.transport import QuicSettings
from nexar.wire.frame import Lane
from tests.unit.transport.quic.scene import EVENT_TIMEOUT, send

MIB = 1 << 20


def test_frames_arrive_in_order_per_lane_and_communicator(scene):
    pair = scene.pair()
    for number in range(300):
        send(pair.left, number.to_bytes(4, "little"), Lane(number % 5), number % 3, message=number)
    pair.drive(lambda: len(pair.right_sink.frames) == 300)
    conversations = {}
    for frame, _ in pair.right_sink.frames:
        conversations.setdefault((frame.lane, frame.communicator), []).append(frame.message)
    assert len(conversations) == 15
    assert all(messages == sorted(messages) for messages in conversations.values())


def test_both_directions_work_at_once(scene):
    pair = scene.pair()
    for carrier in (pair.left, pair.right):
        for _ in range(50):
            send(carrier, b"x" * 1000, Lane.DATA, 7)
    pair.drive(lambda: len(pair.left_sink.frames) == len(pair.right_sink.frames) == 50)


def test_a_body_may_come_in_several_buffers(scene):
    from nexar.wire.frame import Frame, FrameKind, encode

    pair = scene.pair()
    header = encode(Frame(kind=FrameKind.CONTROL, body=6))
    pair.left.send_frame(Lane.CONTROL, 0, header, b"ab", memoryview(b"cd"), bytearray(b"ef"))
    pair.drive(lambda: pair.right_sink.frames)
    assert pair.right_sink.bodies == [b"abcdef"]


def test_thousands_of_communicators_talk_over_a_bounded_number_of_streams(scene):
    pair = scene.pair()
    for round_number in range(2):
        for communicator in range(3000):
            send(pair.left, b"hello", Lane.DATA, communicator, message=round_number)
    pair.drive(lambda: len(pair.right_sink.frames) == 6000)
    for communicator in (0, 1, MAX_ORDERED_STREAMS + 1, 2999):
        seen = [f.message for f, _ in pair.right_sink.frames if f.communicator == communicator]
        assert seen == [0, 1]


def test_frames_flow_although_the_peer_allows_few_streams(scene):
    pair = scene.pair(QuicSettings(max_streams=2))
    for communicator in range(20):
        send(pair.left, b"crowded", Lane.DATA, communicator)
    pair.drive(lambda: len(pair.right_sink.frames) == 20)


def test_everything_sent_before_finish_arrives_before_carrier_finished(scene):
    pair = scene.pair()
    into = bytearray(8 * MIB)
    pair.right.expect_payload(1, memoryview(into))
    pair.left.send_payload(1, memoryview(bytes(8 * MIB)))
    for number in range(100):
        send(pair.left, b"last words", Lane.DATA, number)
    pair.left.finish()
    pair.left.finish()
    pair.drive(lambda: pair.right_sink.finished)
    assert pair.right_sink.calls[-1] == "finished"
    assert len(pair.right_sink.frames) == 100
    assert pair.right_sink.payloads == [1]


def test_receiving_goes_on_after_finish(scene):
    pair = scene.pair()
    pair.left.finish()
    pair.drive(lambda: pair.right_sink.finished)
    send(pair.right, b"still here")
    pair.drive(lambda: pair.left_sink.bodies == [b"still here"])
    with pytest.raises(CarrierLost, match="finished"):
        send(pair.left, b"too late")
    with pytest.raises(CarrierLost, match="finished"):
        pair.left.send_payload(1, memoryview(b"too late"))


def test_when_both_have_finished_the_connection_is_closed_and_nobody_learns_of_a_loss(scene):
    pair = scene.pair()
    for carrier in (pair.left, pair.right):
        send(carrier, b"goodbye", Lane.RPC, 3)
        carrier.finish()
    both = (pair.left_node.transport, pair.right_node.transport)
    pair.drive(lambda: not any(transport._carriers for transport in both))
    for sink in (pair.left_sink, pair.right_sink):
        assert sink.bodies == [b"goodbye"]
        assert (sink.finished, sink.lost) == (1, [])
    for carrier in (pair.left, pair.right):
        for verb in (carrier.finish, lambda: send(carrier, b"anybody?")):  # noqa: B023
            with pytest.raises(CarrierLost, match="both sides have finished") as raised:
                verb()
            assert raised.value.kind == "closed"


def test_nothing_is_lost_when_one_side_finishes_while_the_other_does_not_look(scene):
    pair = scene.pair()
    for _ in range(200):
        send(pair.left, b"x" * 20_000, Lane.DATA)
    pair.left.finish()
    pair.right.finish()
    left = pair.left_node.transport
    for _ in range(200):  # only the left side looks: whatever it may decide, the right side has not read yet
        left.sleep(0.001, 0.0)
    pair.drive(lambda: pair.right_sink.finished and not left._carriers)
    assert len(pair.right_sink.frames) == 200


def test_a_peer_that_leaves_after_its_finish_is_lost_to_who_had_not_finished(scene):
    pair = scene.pair()
    pair.left.finish()
    pair.drive(lambda: pair.right_sink.finished)
    pair.left_node.transport.close()
    scene.nodes.remove(pair.left_node)
    pair.drive(lambda: pair.right_sink.lost)
    assert pair.right_sink.calls == ["finished", "lost"]


def test_an_abort_waits_for_the_sink_that_another_thread_runs(scene):
    pair = scene.pair()
    entered, release, left = threading.Event(), threading.Event(), []

    def linger(carrier, frame, body):
        entered.set()
        release.wait(EVENT_TIMEOUT)
        left.append(frame)

    pair.right_sink.on_frame = linger
    send(pair.left, b"x")
    driver = threading.Thread(target=pair.drive, args=(lambda: left,))
    driver.start()
    assert entered.wait(EVENT_TIMEOUT)
    aborter = threading.Thread(target=lambda: (pair.right.abort("now"), left.append("aborted")))
    aborter.start()
    release.set()
    aborter.join(EVENT_TIMEOUT)
    driver.join(EVENT_TIMEOUT)
    assert left[-1] == "aborted"
    assert len(left) == 2


def test_an_abort_is_silent_here_and_reported_there(scene):
    pair = scene.pair()
    pair.left.abort("enough")
    pair.left.abort("enough of it")
    pair.drive(lambda: pair.right_sink.lost)
    assert pair.right_sink.lost[0].kind == "peer"
    assert "enough" in pair.right_sink.lost[0].reason
    assert pair.left_sink.calls == []
    for verb in (
        lambda: send(pair.left, b""),
        lambda: pair.left.send_payload(1, memoryview(b"")),
        lambda: pair.left.expect_payload(1, memoryview(bytearray())),
    ):
        with pytest.raises(CarrierLost, match="enough") as raised:
            verb()
        assert raised.value.kind == "closed"


@pytest.mark.parametrize("attempt", range(5))
def test_an_abort_with_many_streams_in_use_is_never_taken_for_misbehaviour(scene, attempt):
    pair = scene.pair()
    for communicator in range(50):
        send(pair.left, b"x" * 1000, Lane.DATA, communicator)
    pair.drive(lambda: len(pair.right_sink.frames) > 10 * attempt)
    pair.left.abort("enough")
    pair.drive(lambda: pair.right_sink.lost)
    assert pair.right_sink.lost[0].kind == "peer"


def test_a_lost_carrier_raises_its_reason_from_every_verb(scene):
    pair = scene.pair()
    pair.left.abort("I am off")
    pair.drive(lambda: pair.right_sink.lost)
    with pytest.raises(CarrierLost, match="I am off") as raised:
        send(pair.right, b"hello?")
    assert raised.value.kind == pair.right_sink.lost[0].kind == "peer"
    pair.drive(lambda: not pair.right_node.transport.poll())
    assert len(pair.right_sink.lost) == 1


def test_frames_sent_just_before_an_abort_of_the_peer_come_before_the_loss(scene):
    pair = scene.pair()
    send(pair.left, b"last")
    pair.drive(lambda: pair.right_sink.frames)
    pair.left.abort("bye")
    pair.drive(lambda: pair.right_sink.lost)
    assert pair.right_sink.calls == ["frame", "lost"]


def test_a_sink_may_use_and_abort_its_carrier(scene):
    pair = scene.pair()

    def answer_and_leave(carrier, frame, body):
        send(carrier, bytes(body))
        if frame.message == 2:
            carrier.abort("heard enough")

    pair.right_sink.on_frame = answer_and_leave
    for number in range(5):
        send(pair.left, b"ping", message=number)
    pair.drive(lambda: pair.left_sink.lost)
    assert [frame.message for frame, _ in pair.right_sink.frames] == [0, 1, 2]


def test_a_sink_that_raises_costs_its_carrier_and_nothing_else(scene):
    pair = scene.pair()
    second = pair.left_node.dial(pair.right_node)
    scene.drive(lambda: len(pair.right_node.acceptor.carriers) == 2)

    def explode(carrier, frame, body):
        raise RuntimeError("boom")

    pair.right_sink.on_frame = explode
    send(pair.left, b"fuse")
    with pytest.raises(RuntimeError, match="boom"):
        pair.drive(lambda: pair.right_sink.lost)
    pair.drive(lambda: pair.right_sink.lost)
    assert pair.right_sink.lost[0].kind == "fault"
    send(second, b"unharmed")
    scene.drive(lambda: pair.right_node.acceptor.sinks[1].bodies == [b"unharmed"])


def test_verbs_of_many_threads_lose_nothing(scene):
    pair = scene.pair()

    def talk(communicator):
        for number in range(200):
            send(pair.left, b"x" * 100, Lane.DATA, communicator % 4, message=number, tag=communicator)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    pair.drive(lambda: len(pair.right_sink.frames) == 1600)
    for thread in threads:
        thread.join()
    for tag in range(8):
        assert [f.message for f, _ in pair.right_sink.frames if f.tag == tag] == list(range(200))


def test_stats_count(scene):
    pair = scene.pair()
    send(pair.left, b"x" * 5000)
    pair.drive(lambda: pair.right_sink.frames)
    assert pair.left.stats()["frames_sent"] == 1
    assert pair.left.stats()["bytes_sent"] > 5000
    assert pair.right.stats()["frames_received"] == 1
    assert pair.left.queued_bytes(Lane.CONTROL) == 0
    pair.left.abort("enough")
    assert pair.left.stats()["frames_sent"] == 1


def lose_a_carrier(scene, into):
    """Weak references to both ends of a carrier that was in use and is lost."""
    pair = scene.pair()
    pair.right.expect_payload(1, memoryview(into))
    send(pair.left, b"x")
    pair.drive(lambda: pair.right_sink.frames)
    pair.left.abort("done")
    pair.drive(lambda: pair.right_sink.lost)
    pair.drive(lambda: not any(node.transport.poll() for node in scene.nodes))
    pair.right_node.acceptor.carriers.clear()
    return [weakref.ref(pair.left), weakref.ref(pair.right)]


def test_an_ended_carrier_is_garbage(scene):
    into = bytearray(MIB)
    gone = lose_a_carrier(scene, into)
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    into.clear()  # BufferError if anybody still held it
