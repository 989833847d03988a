"""The reader alone, fed by a stream of paper."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.transport.base import CarrierLost
from nexar.transport.quic.receive_streams import FIRST_BYTES, KEPT_BYTES, OrderedReader
from nexar.wire.frame import MAX_BODY_BYTES, MAX_FRAME_BYTES, Frame, FrameKind, decode, encode, encode_finish
from tests.unit.transport.quic.scene import Memory


class PaperOperation:
    def __init__(self, count, token):
        self.count = count
        self.token = token

    def result(self):
        return self.count


class PaperStream:
    """Hands out its bytes in pieces of the given sizes, never fewer than a read asks for, then ends."""

    def __init__(self, content, pieces=()):
        self.content = memoryview(content)
        self.pieces = iter(pieces)
        self.posted = None
        self.largest_buffer = 0

    def post_read(self, buffer, completions, *, minimum, token):
        assert self.posted is None, "a second read"
        assert 1 <= minimum <= len(buffer)
        self.posted = (buffer, minimum, token)

    def run(self, reader):
        while self.posted is not None:
            (buffer, minimum, token), self.posted = self.posted, None
            count = min(len(buffer), len(self.content), max(minimum, next(self.pieces, len(buffer))))
            buffer[:count] = self.content[:count]
            self.content = self.content[count:]
            token(PaperOperation(count, token))
            self.largest_buffer = max(self.largest_buffer, reader.buffer_bytes)


class PaperReceiver:
    def __init__(self):
        self.carrier = object()  # somebody holds it
        self.completions = None
        self.frames_received = 0
        self.sink = Memory()
        self.announced = None
        self.over = 0
        self.error = None
        self.inside = False
        self.decode = decode

    def leave(self):
        assert self.inside
        self.inside = False

    def finish_announced(self, streams):
        self.announced = streams

    def stream_ended(self):
        self.over += 1

    def misbehaved(self, reason):
        self.error = CarrierLost("misbehaved", reason)

    def read_failed(self, error):
        raise error


def frame(body):
    return encode(Frame(kind=FrameKind.CONTROL, body=len(body))) + body


def read(content, pieces=()):
    receiver, stream = PaperReceiver(), PaperStream(content, pieces)
    reader = OrderedReader(receiver, stream)
    stream.run(reader)
    return receiver, stream, reader


@given(
    sizes=st.lists(st.integers(0, 200_000) | st.integers(0, 300), max_size=12),
    pieces=st.lists(st.integers(1, 70_000) | st.integers(1, 200), max_size=60),
)
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(sizes, pieces):
    bodies = [bytes([number]) * size for number, size in enumerate(sizes)]
    receiver, _, reader = read(b"".join(map(frame, bodies)), pieces)
    assert receiver.sink.bodies == bodies
    assert (receiver.over, receiver.error, receiver.frames_received) == (1, None, len(bodies))
    assert reader.buffer_bytes <= KEPT_BYTES


def test_the_largest_frame_is_assembled_and_its_memory_given_back():
    receiver, stream, reader = read(frame(bytes(MAX_BODY_BYTES)) + frame(b"next"))
    assert [len(body) for body in receiver.sink.bodies] == [MAX_BODY_BYTES, 4]
    assert stream.largest_buffer <= MAX_FRAME_BYTES
    assert reader.buffer_bytes <= KEPT_BYTES


def test_a_header_that_promises_much_commits_no_memory():
    promise = encode(Frame(kind=FrameKind.CONTROL, body=MAX_BODY_BYTES))
    receiver, stream, _ = read(promise + bytes(1000))
    assert stream.largest_buffer == FIRST_BYTES
    assert "bytes into a frame" in receiver.error.reason


def test_small_frames_leave_the_buffer_small():
    _, stream, _ = read(frame(b"x" * 8) * 1000, [112] * 1000)
    assert stream.largest_buffer == FIRST_BYTES


def test_garbage_ends_the_reading():
    receiver, _, _ = read(frame(b"good") + b"\xff" * 500)
    assert receiver.sink.bodies == [b"good"]
    assert receiver.error is not None


@pytest.mark.parametrize("kind", [FrameKind.CHUNK, FrameKind.HELLO])
def test_kinds_of_other_carriers_are_refused(kind):
    receiver, _, _ = read(encode(Frame(kind=kind, body=0)))
    assert kind.name in receiver.error.reason


def test_a_finish_is_for_the_receiver_and_not_for_the_sink():
    receiver, _, _ = read(encode_finish(7))
    assert receiver.announced == 7
    assert receiver.sink.frames == []


def test_frames_of_unknown_kinds_are_left_to_the_link():
    receiver, _, _ = read(encode(Frame(kind=200, body=0)))
    assert receiver.sink.frames[0][0].kind == 200
