"""A member of the cluster whose software is broken, or worse: a bare native client against our transport."""

import pytest

from nexar.security.certificates import Trust
from nexar.transport.quic.payloads import MAX_ABANDONED
from nexar.transport.quic.protocol import PREAMBLE_BYTES, StreamType, encode_preamble
from nexar.transport.quic.receive_streams import MAX_UNVERIFIED_STREAMS
from nexar.wire.frame import MAX_BODY_BYTES, Frame, FrameKind, encode, encode_finish
from tests.unit.transport.quic.scene import pin, send

ORDERED = encode_preamble(StreamType.ORDERED)


@pytest.fixture
def victim(scene):
    return scene.node(1)


@pytest.fixture
def attacker(scene, victim):
    connection = scene.unauthenticated(victim)
    scene.drive(lambda: victim.acceptor.carriers)
    return connection


def say(connection, content, *, finish=False):
    stream = connection.open_uni()
    stream.write(content)
    if finish:
        stream.finish()
    return stream


def condemned(scene, victim):
    """What the victim's sink was notified of."""
    sink = victim.acceptor.sinks[0]
    scene.drive(lambda: sink.lost)
    assert sink.lost[0].misbehaved
    assert len(sink.lost) == 1
    return sink.lost[0].reason


def test_garbage_on_an_ordered_stream_ends_the_carrier(scene, victim, attacker):
    kept = say(attacker, ORDERED + b"\xee" * 4000)
    assert "version" in condemned(scene, victim)
    del kept


def test_a_preamble_of_an_unknown_type_ends_the_carrier(scene, victim, attacker):
    kept = say(attacker, bytes([1, 99]) + bytes(PREAMBLE_BYTES - 2))
    assert "unknown type 99" in condemned(scene, victim)
    del kept


def test_a_stream_that_ends_in_its_preamble_ends_the_carrier(scene, victim, attacker):
    say(attacker, b"\x01\x01", finish=True)
    assert "preamble" in condemned(scene, victim)


def test_a_frame_above_its_limit_ends_the_carrier_before_memory_is_committed(scene, victim, attacker):
    kept = say(attacker, ORDERED + encode(Frame(kind=FrameKind.CONTROL, body=MAX_BODY_BYTES + 1)))
    assert "body" in condemned(scene, victim)
    del kept


def test_an_ordered_stream_cut_inside_a_frame_ends_the_carrier(scene, victim, attacker):
    say(attacker, ORDERED + encode(Frame(kind=FrameKind.CONTROL, body=100)) + b"short", finish=True)
    assert "into a frame" in condemned(scene, victim)


def test_an_ordered_stream_that_is_reset_ends_the_carrier(scene, victim, attacker):
    stream = say(attacker, ORDERED + encode(Frame(kind=FrameKind.CONTROL, body=0)))
    scene.drive(lambda: victim.acceptor.sinks[0].frames)
    stream.reset()
    assert "broke unexpectedly" in condemned(scene, victim)


def payload(transfer, size, content):
    return encode_preamble(StreamType.PAYLOAD, transfer, size=size) + content


def test_a_payload_that_nobody_expected_ends_the_carrier(scene, victim, attacker):
    kept = say(attacker, payload(7, 100, b"x" * 100))
    assert "was not expected" in condemned(scene, victim)
    del kept


def test_thousands_of_payloads_that_nobody_expected_cost_one_carrier_and_no_more(scene, victim, attacker):
    streams = []
    for transfer in range(5000):
        try:
            streams.append(say(attacker, payload(transfer, 100, b"x" * 100)))
        except (ConnectionError, BlockingIOError):
            break  # thrown out, or at the limit of streams: nobody reads them yet
    assert len(streams) > 1000
    assert "was not expected" in condemned(scene, victim)
    bystander = scene.node(2).dial(victim)
    send(bystander, b"unharmed")
    scene.drive(lambda: len(victim.acceptor.sinks) == 2 and victim.acceptor.sinks[1].frames)


def test_payloads_given_up_before_they_came_are_no_offence_however_many(scene, victim, attacker):
    carrier = victim.acceptor.carriers[0]
    for transfer in range(MAX_ABANDONED + 10):
        carrier.expect_payload(transfer, memoryview(bytearray(9)))
        carrier.redirect_payload(transfer, None)
    for transfer in range(20):  # the first ten are forgotten, and forgiven
        say(attacker, payload(transfer, 9, b"x" * 9), finish=True)
    scene.drive(lambda: carrier.stats()["unexpected_payloads"] == 20)
    say(attacker, payload(0, 9, b"x" * 9), finish=True)
    assert "payload 0, which was not expected" in condemned(scene, victim)


@pytest.mark.parametrize("size", [0, 99, 101, 2**63])
def test_a_payload_of_another_size_ends_the_carrier_before_a_byte_lands(scene, victim, attacker, size):
    memory = bytearray(100)
    victim.acceptor.carriers[0].expect_payload(3, memoryview(memory))
    say(attacker, payload(3, size, b"x" * 101), finish=True)
    assert f"{size} bytes instead of 100" in condemned(scene, victim)
    assert not any(memory)
    assert victim.acceptor.sinks[0].payloads == []


def test_a_payload_that_is_too_short_ends_the_carrier(scene, victim, attacker):
    victim.acceptor.carriers[0].expect_payload(3, memoryview(bytearray(100)))
    say(attacker, payload(3, 100, b"x" * 99), finish=True)
    assert "1 bytes short" in condemned(scene, victim)
    assert victim.acceptor.sinks[0].payloads == []


def test_a_payload_that_is_too_long_touches_nothing_behind_its_memory(scene, victim, attacker):
    memory = bytearray(200)
    victim.acceptor.carriers[0].expect_payload(3, memoryview(memory)[:100])
    kept = say(attacker, payload(3, 100, b"x" * 150))
    assert "longer" in condemned(scene, victim)
    assert memory == b"x" * 100 + bytes(100)
    del kept


def test_a_second_stream_for_one_payload_ends_the_carrier(scene, victim, attacker):
    victim.acceptor.carriers[0].expect_payload(3, memoryview(bytearray(100)))
    kept = [say(attacker, payload(3, 100, b"x")) for _ in range(2)]
    assert "second stream" in condemned(scene, victim)
    del kept


def test_more_streams_than_announced_end_the_carrier(scene, victim, attacker):
    say(attacker, ORDERED + encode_finish(1), finish=True)
    scene.drive(lambda: victim.acceptor.sinks[0].finished)
    say(attacker, ORDERED, finish=True)
    assert "2 streams after 1" in condemned(scene, victim)


def test_a_second_finish_ends_the_carrier(scene, victim, attacker):
    kept = say(attacker, ORDERED + encode_finish(1) * 2)
    assert "second FINISH" in condemned(scene, victim)
    del kept


def test_a_peer_that_stops_an_ordered_stream_loses_the_connection(scene, victim, attacker):
    carrier = victim.acceptor.carriers[0]
    endpoint = scene.raw[0]
    accepting = attacker.post_accept_uni()
    send(carrier, b"listen!")
    endpoint.wait([accepting], 10)
    accepting.result().stop(7)

    def nag():
        try:
            send(carrier, b"listen!")
        except ConnectionError:
            return True
        return False

    scene.drive(nag)
    assert "does not read" in condemned(scene, victim)


def test_the_attacker_is_notified_why(scene, victim, attacker):
    kept = say(attacker, ORDERED + b"\xee" * 4000)
    condemned(scene, victim)
    closed = attacker.post_closed()
    scene.raw[0].wait([closed], 10)
    with pytest.raises(ConnectionError) as raised:
        closed.result()
    assert raised.value.code == 3
    assert "version" in raised.value.reason
    del kept


def test_an_unauthenticated_peer_gets_a_few_streams_and_no_more(scene):
    seed = scene.node(1, trust=Trust(scene.trust.authorities, allow_anonymous=True))
    candidate = scene.node(0, credentials=None, trust=Trust(b""))
    carrier = candidate.dial(seed, node=0, fingerprint=pin(seed.credentials))
    scene.drive(lambda: seed.acceptor.carriers)
    send(carrier, b"let me in")
    scene.drive(lambda: seed.acceptor.sinks[0].frames)
    for communicator in range(1, MAX_UNVERIFIED_STREAMS + 1):
        send(carrier, b"and more of this", communicator=communicator)
    assert "is not authenticated" in condemned(scene, seed)


def test_the_reason_of_a_close_writes_nothing_into_our_logs_but_itself(scene, victim, attacker):
    attacker.close(2, "no\nWARNING all is well\x1b[2J")
    sink = victim.acceptor.sinks[0]
    scene.drive(lambda: sink.lost)
    assert sink.lost[0].reason == "the peer aborted: no WARNING all is well [2J"
