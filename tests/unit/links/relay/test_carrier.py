"""A relayed carrier keeps the contract of every carrier: see transport.base."""

import threading
from typing import Any, cast

import pytest

from nexar.transport.base import CarrierLost, Redirected
from nexar.wire.frame import Frame, Kind, Lane, encode
from tests.unit.links.relay.small_world import Ear, SmallWorld, say


@pytest.fixture
def world() -> SmallWorld:
    return SmallWorld(4)


def test_after_the_end_every_verb_raises_why(world: SmallWorld) -> None:
    carrier = world.nodes[0].make(2)
    carrier.abort("enough")
    carrier.abort("again")
    verbs: list[Any] = [
        lambda: say(carrier, b"x"),
        lambda: carrier.queued_bytes(Lane.DATA),
        lambda: carrier.send_payload(1, memoryview(b"")),
        lambda: carrier.withdraw_payload(1),
        lambda: carrier.expect_payload(1, memoryview(bytearray())),
        lambda: carrier.redirect_payload(1, None),
        carrier.finish,
    ]
    for verb in verbs:
        with pytest.raises(CarrierLost, match="enough") as lost:
            verb()
        assert lost.value.kind == "closed"


def test_nothing_is_sent_after_the_last_word_but_receiving_goes_on(world: SmallWorld) -> None:
    carrier = world.nodes[0].make(2)
    carrier.finish()
    carrier.finish()
    with pytest.raises(CarrierLost, match="has finished"):
        say(carrier, b"x")
    world.run()
    say(world.nodes[2].carriers[0], b"still here")
    world.run()
    assert world.nodes[0].ears[2].frames == [b"still here"]


def test_what_arrives_before_anybody_listens_waits(world: SmallWorld) -> None:
    node = world.nodes[2]
    quiet = node.carriers[0] = node.station.make(0, 1, (2, 1, 0))
    say(world.nodes[0].make(2), b"early")
    world.run()
    ear = Ear()
    quiet.attach(ear)
    assert ear.frames == []  # the driving thread hands it on
    world.run()
    assert ear.frames == [b"early"]


def test_a_chunk_that_nobody_expects_costs_the_carrier_and_both_ends_hear_so(world: SmallWorld) -> None:
    carrier = world.nodes[0].make(2)
    carrier.send_payload(3, memoryview(b"unwanted"))
    world.nodes[0].station.flush()
    world.run()
    (lost,) = world.nodes[2].ears[0].lost
    assert lost.misbehaved
    assert len(world.nodes[0].ears[2].lost) == 1


def test_a_frame_that_says_another_length_costs_the_carrier(world: SmallWorld) -> None:
    carrier = world.nodes[0].make(2)
    carrier.send_frame(Lane.DATA, 0, encode(Frame(kind=int(Kind.CREDIT), body=5)), b"four")
    world.run()
    assert [lost.misbehaved for lost in world.nodes[2].ears[0].lost] == [True]


def test_what_a_sink_raises_costs_the_carrier(world: SmallWorld, caplog: pytest.LogCaptureFixture) -> None:
    say(world.nodes[0].make(2), b"first")
    world.run()
    ear = world.nodes[2].ears[0]

    def fail(*_: object) -> None:
        raise ZeroDivisionError("on purpose")

    cast(Any, ear).frame_arrived = fail
    say(world.nodes[0].carriers[2], b"second")
    with caplog.at_level("CRITICAL"):
        world.run()
    assert [lost.kind for lost in ear.lost] == ["fault"]


def test_no_sink_runs_after_abort_has_returned(world: SmallWorld) -> None:
    say(world.nodes[0].make(2), b"first")
    world.run()
    carrier, ear = world.nodes[2].carriers[0], world.nodes[2].ears[0]
    inside, leave, aborted = threading.Event(), threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        inside.set()
        assert leave.wait(20)

    cast(Any, ear).frame_arrived = slow
    say(world.nodes[0].carriers[2], b"second")
    driving = threading.Thread(target=world.run)
    driving.start()
    assert inside.wait(20)

    def abort() -> None:
        carrier.abort("now")
        aborted.set()

    aborting = threading.Thread(target=abort)
    aborting.start()
    assert not aborted.wait(0.05)
    leave.set()
    assert aborted.wait(20)
    driving.join()
    aborting.join()


def test_a_payload_can_be_redirected_withdrawn_and_counted(world: SmallWorld) -> None:
    say(world.nodes[0].make(2), b"first")
    world.run()
    here, there = world.nodes[0].carriers[2], world.nodes[2].carriers[0]
    there.expect_payload(1, memoryview(bytearray(4)))
    assert there.redirect_payload(1, None) is Redirected.MOVED
    here.send_payload(1, memoryview(b"abcd"))
    here.withdraw_payload(1)
    world.nodes[0].station.flush()
    world.run()
    assert world.nodes[2].ears[0].payloads == []
    stats = here.stats()
    assert (stats["frames_sent"], stats["hops"], stats["payload_bytes_sent"]) == (1, 2, 0)
    assert there.stats()["frames_received"] == 1
