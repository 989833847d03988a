import threading
from typing import Any

import pytest

from nexar.communicator.serialization import encode_object
from nexar.errors import (
    Cancelled,
    LinkClosed,
    PeerLost,
    PeerMisbehaved,
    RemoteError,
    RpcCancelled,
    RpcOverloaded,
    RpcTimeout,
    UnknownFunction,
    UsageError,
)
from nexar.rpc.call_channel import CALL
from nexar.rpc.caller import Caller, CallTarget
from nexar.wire.rpc import Body, BodyKind, encode
from tests.unit.rpc.scene import FakePost, Values

NODE = 77
WHOM = CallTarget(rank=3, node=NODE, function="f", seconds=5.0, pickle=False)


class Scene:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.post = FakePost()
        self.caller = Caller(self.lock, self.post, Values())  # type: ignore[arg-type]

    def begin(self, *arguments: Any) -> Any:
        """A call that waits, and what it waits for."""
        run = self.caller.call(WHOM, arguments, {}, 0.0)
        (pending,) = next(run)
        return run, pending

    def answer(self, number: int, body: Body, source: int = NODE) -> None:
        with self.lock:
            self.caller.answered(source, number, encode(body))


def result_of(run: Any) -> Any:
    with pytest.raises(StopIteration) as end:
        next(run)
    return end.value.value


def test_a_call_is_posted_and_returns_what_is_answered() -> None:
    scene = Scene()
    run, pending = scene.begin(1, 2)
    (node, space, number, body), *_ = scene.post.posted
    assert (node, space, number, body.function, body.seconds) == (NODE, CALL, pending.number, "f", 5.0)
    scene.answer(number, Body(BodyKind.RETURNED, pieces=encode_object({"a": 1})))
    assert pending.done
    assert result_of(run) == {"a": 1}
    assert len(scene.post.posted) == 1


@pytest.mark.parametrize(
    ("body", "kind", "facts"),
    [
        (Body(BodyKind.UNKNOWN, "g\nh (id 1)"), UnknownFunction, {"registered": ("g", "h (id 1)")}),
        (Body(BodyKind.RAISED, "the traceback"), RemoteError, {"traceback": "the traceback"}),
        (Body(BodyKind.OVERLOADED, number=64), RpcOverloaded, {"limit": 64}),
        (Body(BodyKind.EXPIRED), RpcTimeout, {"timeout": 5.0}),
        (Body(BodyKind.CANCELLED, "closed"), RpcCancelled, {"reason": "closed"}),
    ],
)
def test_each_answer_that_is_no_result_is_an_error_of_its_own(body: Body, kind: type, facts: dict[str, Any]) -> None:
    scene = Scene()
    run, pending = scene.begin()
    scene.answer(pending.number, body)
    with pytest.raises(kind) as raised:
        next(run)
    assert vars(raised.value) == {"rank": 3, "function": "f", **facts}


def test_an_answer_of_another_node_or_another_call_is_dropped() -> None:
    scene = Scene()
    _, pending = scene.begin()
    scene.answer(pending.number, Body(BodyKind.RETURNED, pieces=encode_object(1)), source=78)
    scene.answer(pending.number + 1, Body(BodyKind.RETURNED, pieces=encode_object(1)))
    assert not pending.done


def test_an_answer_that_cannot_be_read_is_the_peers_fault() -> None:
    for row in (memoryview(b"nonsense"), encode(Body(BodyKind.RETURNED, pieces=[memoryview(b"\xff")]))):
        scene = Scene()
        run, pending = scene.begin()
        with scene.lock:
            scene.caller.answered(NODE, pending.number, row)
        with pytest.raises(PeerMisbehaved, match="its answer to remote call f on rank 3"):
            next(run)


def test_who_gives_up_notifies_the_other_side_once_and_what_comes_is_dropped() -> None:
    scene = Scene()
    run, pending = scene.begin()
    run.close()
    pending.cancel()
    assert [body.what for body in scene.post.bodies()] == [BodyKind.CALL, BodyKind.WITHDRAW]
    assert isinstance(pending.error, Cancelled)
    scene.answer(pending.number, Body(BodyKind.RETURNED, pieces=encode_object(1)))


def test_a_call_that_cannot_be_sent_leaves_nothing_behind() -> None:
    scene = Scene()
    scene.post.fault = PeerLost(rank=0, node=NODE, cause="refused")
    with pytest.raises(PeerLost, match=r"lost rank 3.* during remote call f on rank 3: refused"):
        next(scene.caller.call(WHOM, (), {}, 0.0))
    assert scene.caller._pending == {}
    assert scene.post.posted == []


def test_a_lost_peer_ends_its_calls_and_no_others() -> None:
    scene = Scene()
    _, pending = scene.begin()
    other = scene.caller.call(WHOM._replace(node=78), (), {}, 0.0)
    (waits,) = next(other)
    with scene.lock:
        scene.caller.lost(NODE, PeerLost(node=NODE, cause="it died"))
    assert isinstance(pending.error, PeerLost)
    assert (pending.error.rank, pending.error.operation) == (3, "remote call f on rank 3")
    assert not waits.done


def test_when_all_is_over_pending_and_later_calls_raise() -> None:
    scene = Scene()
    _, pending = scene.begin()
    with scene.lock:
        scene.caller.end(LinkClosed(owner="it"))
    assert isinstance(pending.error, LinkClosed)
    with pytest.raises(LinkClosed):
        next(scene.caller.call(WHOM, (), {}, 0.0))


def test_a_call_that_nobody_received_is_cancelled() -> None:
    scene = Scene()
    _, pending = scene.begin()
    with scene.lock:
        scene.caller.communicator_closed(78, pending.number)
        assert not pending.done
        scene.caller.communicator_closed(NODE, pending.number)
    assert isinstance(pending.error, RpcCancelled)


def test_an_answer_that_was_announced_and_does_not_come_is_an_error() -> None:
    scene = Scene()
    _, pending = scene.begin()
    with scene.lock:
        assert scene.caller.expects(NODE, pending.number)
        scene.caller.missed(NODE, pending.number, UsageError("no memory"))
    assert isinstance(pending.error, UsageError)


def test_arguments_that_cannot_be_sent_are_refused_before_anything_happens() -> None:
    scene = Scene()
    with pytest.raises(UsageError, match="cannot be sent"):
        scene.caller.call(WHOM, (object(),), {}, 0.0)
    assert scene.post.posted == []
