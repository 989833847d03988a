"""A sink that hands its carrier to another: what came before was its own, what comes after is the other's."""

from collections.abc import Callable

import pytest

from nexar.transport.base import Carrier
from nexar.wire.frame import Frame, Lane
from tests.conformance.harness import Pair, Recorder, pattern

FRAMES, TURN = 200, 70


def hand_over_at(old: Recorder, new: Recorder, tag: int) -> None:
    def hand_over(carrier: Carrier, frame: Frame) -> None:
        if frame.tag == tag:
            carrier.attach(new)

    old.on_frame = hand_over


def test_frames_behind_the_one_that_handed_over_go_to_the_new_sink_and_none_is_lost(pair: Pair) -> None:
    old, new = pair.right.received, Recorder()
    hand_over_at(old, new, TURN)
    for tag in range(FRAMES):
        pair.left.send(b"many of them arrive in one piece", tag=tag)
    pair.until(lambda: len(old.frames) + len(new.frames) == FRAMES, "all frames")
    assert old.tags == list(range(TURN + 1))
    assert new.tags == list(range(TURN + 1, FRAMES))
    assert new.faults == []


def test_every_lane_goes_to_the_new_sink(pair: Pair) -> None:
    old, new = pair.right.received, Recorder()
    hand_over_at(old, new, 0)
    pair.left.send(b"", tag=0, lane=Lane.CONTROL)
    pair.until(lambda: old.frames, "the frame that hands over")
    for lane in Lane:
        pair.left.send(b"", tag=1 + lane, lane=lane)
    pair.until(lambda: len(new.frames) == len(Lane), "a frame of each lane")
    assert sorted(new.tags) == [1 + lane for lane in Lane]
    assert old.tags == [0]


def test_a_payload_is_reported_to_the_owner_of_the_carrier_when_it_lands(pair: Pair) -> None:
    old, new = pair.right.received, Recorder()
    hand_over_at(old, new, 5)
    into = bytearray(300_000)
    pair.right.carrier.expect_payload(1, memoryview(into))
    pair.left.send(b"", tag=5)
    pair.until(lambda: old.frames, "the frame that hands over")
    pair.left.carrier.send_payload(1, memoryview(pattern(300_000)))
    pair.until(lambda: new.payloads == [1], "the payload")
    assert into == pattern(300_000)
    assert old.payloads == []


def _finish(pair: Pair) -> None:
    pair.left.carrier.finish()


def _abort(pair: Pair) -> None:
    pair.left.carrier.abort("had enough")


@pytest.mark.parametrize(("end", "reported"), [(_finish, "finished"), (_abort, "lost")], ids=["finished", "lost"])
def test_the_end_is_reported_to_the_new_sink_alone(pair: Pair, end: Callable[[Pair], None], reported: str) -> None:
    old, new = pair.right.received, Recorder()
    hand_over_at(old, new, 1)
    pair.left.send(b"", tag=1)
    pair.until(lambda: old.frames, "the frame that hands over")
    end(pair)
    pair.until(lambda: new.received, "the end")
    assert [what for what, _ in new.received] == [reported]
    assert [what for what, _ in old.received] == ["frame"]


def test_a_sink_may_hand_over_and_the_next_one_again(pair: Pair) -> None:
    first, second, third = pair.right.received, Recorder(), Recorder()
    hand_over_at(first, second, 3)
    hand_over_at(second, third, 6)
    for tag in range(10):
        pair.left.send(b"", tag=tag)
    pair.until(lambda: third.tags and third.tags[-1] == 9, "the last frame")
    assert (first.tags, second.tags, third.tags) == ([0, 1, 2, 3], [4, 5, 6], [7, 8, 9])


def test_a_sink_that_aborts_and_hands_over_has_ended_the_carrier_for_both(pair: Pair) -> None:
    old, new = pair.right.received, Recorder()

    def give_up(carrier: Carrier, frame: Frame) -> None:
        carrier.abort("nobody shall have it")
        carrier.attach(new)

    old.on_frame = give_up
    pair.left.send(b"", tag=1)
    pair.until(lambda: pair.left.received.lost, "the loss at the other side")
    pair.quieten()
    assert [what for what, _ in old.received] == ["frame"]
    assert new.received == []
