"""A relayed carrier keeps the contract of every carrier: see transport.base.

Where the chunks of a relayed payload land.
"""

import threading
from typing import Any, cast

import pytest

from nexar.links.relay.carrier import RelayPayloads, UnexpectedChunk
from nexar.transport.base import CarrierLost, Redirected
from nexar.wire.frame import Frame, FrameKind, Lane, decode, encode, encode_chunk
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


def test_nothing_is_sent_after_the_closing_message_but_receiving_goes_on(world: SmallWorld) -> None:
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
    quiet = node.carriers[0] = node.relay.make(0, 1, (2, 1, 0))
    say(world.nodes[0].make(2), b"early")
    world.run()
    ear = Ear()
    quiet.attach(ear)
    assert ear.frames == []  # the driving thread hands it on
    world.run()
    assert ear.frames == [b"early"]


def test_an_unexpected_chunk_costs_the_carrier_and_both_ends_are_notified(world: SmallWorld) -> None:
    carrier = world.nodes[0].make(2)
    carrier.send_payload(3, memoryview(b"unwanted"))
    world.nodes[0].relay.flush()
    world.run()
    (lost,) = world.nodes[2].ears[0].lost
    assert lost.misbehaved
    assert len(world.nodes[0].ears[2].lost) == 1


def test_a_frame_that_says_another_length_costs_the_carrier(world: SmallWorld) -> None:
    carrier = world.nodes[0].make(2)
    carrier.send_frame(Lane.DATA, 0, encode(Frame(kind=int(FrameKind.CREDIT), body=5)), b"four")
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
    world.nodes[0].relay.flush()
    world.run()
    assert world.nodes[2].ears[0].payloads == []
    stats = here.stats()
    assert (stats["frames_sent"], stats["hops"], stats["payload_bytes_sent"]) == (1, 2, 0)
    assert there.stats()["frames_received"] == 1


def chunk(transfer: int, offset: int, size: int) -> Frame:
    return decode(encode_chunk(transfer, offset, size), 0)


def test_chunks_land_one_behind_the_other() -> None:
    landings, into = RelayPayloads(), bytearray(5)
    landings.expect(1, memoryview(into))
    assert not landings.take(chunk(1, 0, 3), memoryview(b"abc"))
    assert landings.take(chunk(1, 3, 2), memoryview(b"de"))
    assert into == b"abcde"
    assert landings.bytes == 5
    assert landings.redirect(1, None) is Redirected.COMPLETE


def test_an_empty_payload_lands_at_once() -> None:
    landings = RelayPayloads()
    landings.expect(1, memoryview(bytearray()))
    assert landings.take(chunk(1, 0, 0), memoryview(b""))


def test_the_rest_lands_elsewhere_and_the_old_memory_is_free() -> None:
    landings, old, new = RelayPayloads(), bytearray(4), bytearray(4)
    landings.expect(1, memoryview(old))
    landings.take(chunk(1, 0, 2), memoryview(b"ab"))
    assert landings.redirect(1, memoryview(new)) is Redirected.MOVED
    assert landings.take(chunk(1, 2, 2), memoryview(b"cd"))
    assert old == b"ab\0\0"
    assert new == b"abcd"


def test_what_is_discarded_is_not_reported_and_harms_nobody() -> None:
    landings = RelayPayloads()
    landings.expect(1, memoryview(bytearray(4)))
    assert landings.redirect(1, None) is Redirected.MOVED
    assert not landings.take(chunk(1, 0, 4), memoryview(b"abcd"))
    assert landings.redirect(1, None) is Redirected.UNKNOWN


def test_what_nobody_expects_breaks_the_protocol() -> None:
    landings = RelayPayloads()
    with pytest.raises(UnexpectedChunk, match="payload 1 is not expected"):
        landings.take(chunk(1, 0, 1), memoryview(b"a"))
    landings.expect(1, memoryview(bytearray(2)))
    with pytest.raises(UnexpectedChunk, match="at byte 1"):
        landings.take(chunk(1, 1, 1), memoryview(b"a"))
    with pytest.raises(UnexpectedChunk):
        landings.take(chunk(1, 0, 3), memoryview(b"abc"))


def test_memory_that_cannot_be_written_or_is_expected_already_is_refused() -> None:
    landings = RelayPayloads()
    with pytest.raises(ValueError, match="read-only"):
        landings.expect(1, memoryview(b"abc"))
    landings.expect(1, memoryview(bytearray(1)))
    with pytest.raises(ValueError, match="already"):
        landings.expect(1, memoryview(bytearray(1)))


def test_what_has_stopped_writes_nothing() -> None:
    landings, into = RelayPayloads(), bytearray(1)
    landings.expect(1, memoryview(into))
    landings.stop()
    assert landings.redirect(1, None) is Redirected.UNKNOWN
