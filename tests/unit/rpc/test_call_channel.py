import threading
from collections.abc import Iterator
from functools import partial
from time import monotonic

import pytest

from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.errors import NexarError, PeerLost
from nexar.links.flow_control import UnexpectedBuffers
from nexar.links.messages import Message, MessageState
from nexar.links.operation import DeferredIO
from nexar.rpc.call_channel import ANSWER, CALL, CallChannel, CallSender, call_channel_id
from nexar.transport.base import Redirected
from nexar.transport.buffer_pool import BufferPool
from nexar.types import NodeId
from nexar.wire.frame import Frame, FrameKind
from nexar.wire.rpc import MAX_BODY_BYTES

NODE = 4


class Desk:
    """Records its calls."""

    def __init__(self) -> None:
        self.refusal: str | None = None
        self.reported: list[tuple[object, ...]] = []

    def expects(self, source: int, space: int, number: int) -> str | None:
        return self.refusal

    def took(self, source: int, space: int, number: int, body: memoryview) -> None:
        self.reported.append(("took", source, space, number, bytes(body)))

    def missed(self, source: int, space: int, number: int, error: BaseException) -> None:
        self.reported.append(("missed", source, space, number, type(error).__name__))

    def lost(self, source: int, error: NexarError) -> None:
        self.reported.append(("lost", source))

    def ended(self, error: NexarError) -> None:
        self.reported.append(("ended",))


class Origin:
    """A link that keeps what it is asked for."""

    rank: int | None = 1

    def __init__(self) -> None:
        self.granted: list[memoryview] = []
        self.refused: list[str] = []
        self.consumed_count = 0

    def grant(self, message: Message, into: memoryview) -> None:
        self.granted.append(into)

    def redirect(self, message: Message, into: memoryview | None) -> Redirected:
        return Redirected.UNKNOWN

    def refuse(self, message: Message, reason: str) -> None:
        self.refused.append(reason)

    def consumed(self, message: Message) -> None:
        self.consumed_count += 1


class Scene:
    def __init__(self) -> None:
        self.handler, self.origin, self.deferred_io = Desk(), Origin(), DeferredIO()
        self.lock = threading.Lock()
        early = UnexpectedBuffers(1 << 20, BufferPool.of_profile("inference"))
        make = partial(CallChannel, self.handler)
        self.channel = make(call_channel_id(0), 0, self.lock, early, self.deferred_io, members=frozenset((NODE,)))

    def announce(self, length: int, tag: int = 9, space: int = CALL) -> Message:
        frame = Frame(kind=FrameKind.ENVELOPE, space=space, tag=tag, length=length, transfer=1)
        with self.lock:
            message = self.channel.announce(self.origin, NODE, frame, ())
        self.deferred_io.flush()
        return message


def test_calls_of_a_communicator_travel_under_a_number_of_their_own() -> None:
    assert call_channel_id(0) != 0
    assert call_channel_id((1 << 63) - 1) < 1 << 64


def test_a_whole_message_goes_to_the_desk_at_once() -> None:
    scene = Scene()
    with scene.lock:
        frame = Frame(kind=FrameKind.EAGER, space=ANSWER, tag=3, length=2)
        assert scene.channel.arrive(scene.origin, NODE, frame, (), memoryview(b"hi"))
    assert scene.handler.reported == [("took", NODE, ANSWER, 3, b"hi")]


def test_a_large_message_that_is_wanted_is_granted_and_handed_over_when_it_is_whole() -> None:
    scene = Scene()
    message = scene.announce(4)
    scene.origin.granted[0][:] = b"long"
    assert scene.handler.reported == []
    with scene.lock:
        scene.channel.payload_complete(message)
    assert scene.handler.reported == [("took", NODE, CALL, 9, b"long")]
    assert scene.origin.consumed_count == 1


def test_a_large_message_that_is_not_wanted_or_too_long_is_refused() -> None:
    scene = Scene()
    assert scene.announce(MAX_BODY_BYTES + 1).state is MessageState.FINISHED
    scene.handler.refusal = "full"
    assert scene.announce(4).state is MessageState.FINISHED
    assert scene.origin.refused == [f"{MAX_BODY_BYTES + 1} bytes are too long for a remote call", "full"]
    assert scene.origin.granted == []
    assert scene.origin.consumed_count == 2


def test_a_message_that_is_taken_back_is_missed_and_nobody_goes_on_waiting() -> None:
    scene = Scene()
    message = scene.announce(4)
    with scene.lock:
        scene.channel.withdraw(message)
    assert scene.handler.reported == [("missed", NODE, CALL, 9, "Cancelled")]
    assert len(scene.channel._posted) == 0


def test_a_message_that_does_not_come_for_the_loss_of_its_sender_is_missed() -> None:
    scene = Scene()
    message = scene.announce(4)
    error = PeerLost(node=NODE, cause="gone")
    with scene.lock:
        scene.channel.abandon(message, error)
        scene.channel.lose(NODE, error)
        scene.channel.lose(99, error)  # no member
    assert scene.handler.reported == [("missed", NODE, CALL, 9, "PeerLost"), ("lost", NODE)]


def test_the_desk_is_notified_of_the_end() -> None:
    scene = Scene()
    with scene.lock:
        scene.channel.close(PeerLost(node=NODE, cause="over"))
    assert scene.handler.reported == [("ended",)]


class RecordingHandler:
    def __init__(self) -> None:
        self.took_bodies: list[memoryview] = []

    def expects(self, source: NodeId, space: int, number: int) -> str | None:
        return None

    def took(self, source: NodeId, space: int, number: int, body: memoryview) -> None:
        self.took_bodies.append(body)

    def missed(self, source: NodeId, space: int, number: int, error: BaseException) -> None:
        raise AssertionError

    def lost(self, source: NodeId, error: NexarError) -> None:
        raise AssertionError

    def ended(self, error: NexarError) -> None:
        raise AssertionError


@pytest.fixture
def alone() -> Iterator[Communicator]:
    with local_communicators(1, Config()) as (made,):
        yield made


def test_what_is_sent_to_oneself_is_a_copy(alone: Communicator) -> None:
    desk = RecordingHandler()
    post = CallSender(alone._group, desk)
    data = bytearray(b"before")
    assert post.send(alone._group.node.id, CALL, 1, memoryview(data), monotonic()).done
    data[:] = b"after."
    assert [bytes(body) for body in desk.took_bodies] == [b"before"]


def test_an_answer_to_nobody_is_no_error(alone: Communicator) -> None:
    post = CallSender(alone._group, RecordingHandler())
    post.answer(12345, CALL, 1, memoryview(b"x"))
