import threading
from functools import partial

from nexar.errors import NexarError, PeerLost
from nexar.links.early import EarlyStore
from nexar.links.message import Message, State
from nexar.links.outbox import Outbox
from nexar.rpc.exchange import ANSWER, CALL, Exchange, exchange_id
from nexar.transport.base import Redirected
from nexar.transport.buffer_pool import BufferPool
from nexar.wire.calls import MAX_BODY_BYTES
from nexar.wire.frame import Frame, Kind

NODE = 4


class Desk:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.refusal: str | None = None
        self.told: list[tuple[object, ...]] = []

    def expects(self, source: int, space: int, number: int) -> str | None:
        return self.refusal

    def took(self, source: int, space: int, number: int, body: memoryview) -> None:
        self.told.append(("took", source, space, number, bytes(body)))

    def missed(self, source: int, space: int, number: int, error: BaseException) -> None:
        self.told.append(("missed", source, space, number, type(error).__name__))

    def lost(self, source: int, error: NexarError) -> None:
        self.told.append(("lost", source))

    def ended(self, error: NexarError) -> None:
        self.told.append(("ended",))


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
        self.desk, self.origin, self.outbox = Desk(), Origin(), Outbox()
        self.lock = threading.Lock()
        early = EarlyStore(1 << 20, BufferPool.of_profile("inference"))
        make = partial(Exchange, self.desk)
        self.exchange = make(exchange_id(0), 0, self.lock, early, self.outbox, members=frozenset((NODE,)))

    def announce(self, length: int, tag: int = 9, space: int = CALL) -> Message:
        frame = Frame(kind=Kind.ENVELOPE, space=space, tag=tag, length=length, transfer=1)
        with self.lock:
            message = self.exchange.announce(self.origin, NODE, frame, ())
        self.outbox.flush()
        return message


def test_calls_of_a_communicator_travel_under_a_number_of_their_own() -> None:
    assert exchange_id(0) != 0
    assert exchange_id((1 << 63) - 1) < 1 << 64


def test_a_whole_message_goes_to_the_desk_at_once() -> None:
    scene = Scene()
    with scene.lock:
        frame = Frame(kind=Kind.EAGER, space=ANSWER, tag=3, length=2)
        assert scene.exchange.arrive(scene.origin, NODE, frame, (), memoryview(b"hi"))
    assert scene.desk.told == [("took", NODE, ANSWER, 3, b"hi")]


def test_a_large_message_that_is_wanted_is_granted_and_handed_over_when_it_is_whole() -> None:
    scene = Scene()
    message = scene.announce(4)
    scene.origin.granted[0][:] = b"long"
    assert scene.desk.told == []
    with scene.lock:
        scene.exchange.land(message)
    assert scene.desk.told == [("took", NODE, CALL, 9, b"long")]
    assert scene.origin.consumed_count == 1


def test_a_large_message_that_is_not_wanted_or_too_long_is_refused() -> None:
    scene = Scene()
    assert scene.announce(MAX_BODY_BYTES + 1).state is State.GONE
    scene.desk.refusal = "full"
    assert scene.announce(4).state is State.GONE
    assert scene.origin.refused == [f"{MAX_BODY_BYTES + 1} bytes are too long for a remote call", "full"]
    assert scene.origin.granted == []
    assert scene.origin.consumed_count == 2


def test_a_message_that_is_taken_back_is_missed_and_nobody_goes_on_waiting() -> None:
    scene = Scene()
    message = scene.announce(4)
    with scene.lock:
        scene.exchange.withdraw(message)
    assert scene.desk.told == [("missed", NODE, CALL, 9, "Cancelled")]
    assert len(scene.exchange._posted) == 0


def test_a_message_that_does_not_come_for_the_loss_of_its_sender_is_missed() -> None:
    scene = Scene()
    message = scene.announce(4)
    error = PeerLost(node=NODE, cause="gone")
    with scene.lock:
        scene.exchange.abandon(message, error)
        scene.exchange.lose(NODE, error)
        scene.exchange.lose(99, error)  # no member
    assert scene.desk.told == [("missed", NODE, CALL, 9, "PeerLost"), ("lost", NODE)]


def test_the_desk_hears_of_the_end() -> None:
    scene = Scene()
    with scene.lock:
        scene.exchange.close(PeerLost(node=NODE, cause="over"))
    assert scene.desk.told == [("ended",)]
