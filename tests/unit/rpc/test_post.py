from collections.abc import Iterator
from time import monotonic

import pytest

from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.errors import NexarError
from nexar.rpc.exchange import CALL
from nexar.rpc.post import Post
from nexar.types import NodeId


class Desk:
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
    desk = Desk()
    post = Post(alone._group, desk)
    data = bytearray(b"before")
    assert post.send(alone._group.node.id, CALL, 1, memoryview(data), monotonic()).done
    data[:] = b"after."
    assert [bytes(body) for body in desk.took_bodies] == [b"before"]


def test_an_answer_to_nobody_is_no_error(alone: Communicator) -> None:
    post = Post(alone._group, Desk())
    post.answer(12345, CALL, 1, memoryview(b"x"))
