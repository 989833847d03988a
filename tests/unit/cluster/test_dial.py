"""One dial, with a peer that answers as a test wants."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from nexar.cluster.dial import Dial, DialFailed, NoLonger, Superseded
from nexar.cluster.membership import Member
from nexar.cluster.recall import Recall, Recalled
from nexar.transport.base import Buffer, Carrier, ConnectRefused, Expected
from nexar.wire.frame import Lane
from nexar.wire.messages import Declined, Introduce, Introduced, Message, Ping, decode, encode
from tests.ranks import PATIENCE
from tests.unit.cluster.fake_carrier import FakeCarrier, as_carrier

PEER = Member(9, "here", bytes(32), {"tls": ("10.0.0.1:1",)}, frozenset())
ME = Introduce(rank=0, epoch=2)
RIGHT = Introduced(rank=4, epoch=2)


class Answerer(FakeCarrier):
    """Answers the introduction with one message, or with none."""

    def __init__(self, answer: Message | None = None) -> None:
        super().__init__(verified=True)
        self.answer = answer
        self.introduced = threading.Event()

    def send_frame(self, lane: Lane, communicator: int, header: bytes, *body: Buffer) -> None:
        self._check()
        assert decode(b"".join(body)) == ME
        self.introduced.set()
        if self.answer is not None:
            self.say(encode(self.answer))


class Surroundings:
    """What a dial asks of its node, and of its link."""

    def __init__(self, answer: FakeCarrier | Exception, memory: FakeCarrier | Exception | None = None) -> None:
        self.recall = Recall()
        self.dialer = self
        self.adopted: list[Carrier] = []
        self.expected: Expected | None = None
        self.deadline: float | None = None
        self.host = PEER.host
        self.memory_address: str | None = None
        self._answer = answer
        self._memory = memory

    def ways_to(self, member: Member) -> Mapping[str, Sequence[str]]:
        return member.addresses

    def dial(
        self, addresses: Mapping[str, Sequence[str]], expected: Expected, deadline: float, recall: Recall
    ) -> Carrier:
        self.expected = expected
        self.deadline = deadline
        if isinstance(self._answer, Exception):
            raise self._answer
        return as_carrier(self._answer)

    def connect_memory(self, address: str, peer: int, deadline: float) -> Carrier:
        self.memory_address = address
        if isinstance(self._memory, Exception):
            raise self._memory
        assert self._memory is not None
        return as_carrier(self._memory)

    def adopt(self, carrier: Carrier) -> None:
        self.adopted.append(carrier)


def fault_of(node: int, claim: Introduced) -> str | None:
    """What the membership says; the circle's own laws are told in test_circle."""
    assert node == PEER.node
    return None if claim.rank == RIGHT.rank else f"it claims rank {claim.rank}, and has rank {RIGHT.rank}"


def dial(where: Surroundings) -> Dial:
    return Dial(cast(Any, where), PEER, cast(Any, where), ME, fault_of)


def soon() -> float:
    return time.monotonic() + PATIENCE


def test_who_answers_from_the_right_place_becomes_the_link() -> None:
    peer = Answerer(RIGHT)
    where = Surroundings(peer)
    dialing = dial(where)
    dialing.run(soon())
    assert dialing.opened
    assert where.adopted == [as_carrier(peer)]
    assert where.expected == Expected(PEER.node, PEER.fingerprint)
    assert peer.aborted is None


def test_a_dial_may_have_less_time_to_connect_than_to_be_answered() -> None:
    where = Surroundings(Answerer(RIGHT))
    connect_by = time.monotonic() + 1.0
    dial(where).run(soon(), connect_by)
    assert where.deadline == connect_by


def test_shared_memory_comes_on_top_where_the_peer_offers_it() -> None:
    peer, memory = Answerer(Introduced(rank=4, epoch=2, shared_memory="shm:secret")), FakeCarrier()
    where = Surroundings(peer, memory)
    dial(where).run(soon())
    assert where.adopted == [as_carrier(peer), as_carrier(memory)]
    assert where.memory_address == "shm:secret"


def test_memory_that_a_peer_on_another_host_offers_is_not_looked_at() -> None:
    peer = Answerer(Introduced(rank=4, epoch=2, shared_memory="shm:secret"))
    where = Surroundings(peer, AssertionError("it was dialed"))
    where.host = "elsewhere"
    dial(where).run(soon())
    assert where.adopted == [as_carrier(peer)]


@pytest.mark.parametrize("trouble", [ConnectRefused("shm", "another namespace"), TimeoutError("nothing")])
def test_where_memory_cannot_be_shared_the_network_serves(trouble: Exception, caplog: pytest.LogCaptureFixture) -> None:
    peer = Answerer(Introduced(rank=4, epoch=2, shared_memory="shm:secret"))
    where = Surroundings(peer, trouble)
    with caplog.at_level(logging.INFO, "nexar.cluster.dial"):
        dial(where).run(soon())
    assert where.adopted == [as_carrier(peer)]
    assert "the network serves instead" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Introduced(rank=5, epoch=2), "it claims rank 5, and has rank 4"),
        (Declined("no such epoch"), "it declined: no such epoch"),
        (Ping(1), "broke at once: it answered an introduction with Ping"),
    ],
    ids=["rank", "declined", "nonsense"],
)
def test_who_answers_wrongly_is_left(answer: Message, words: str) -> None:
    peer = Answerer(answer)
    where = Surroundings(peer)
    dialing = dial(where)
    with pytest.raises(DialFailed, match=words):
        dialing.run(soon())
    assert (dialing.opened, where.adopted) == (False, [])
    assert peer.aborted is not None


def test_who_is_no_member_any_more_hears_since_when_and_why() -> None:
    peer = Answerer(Declined("it was silent", expelled=3))
    with pytest.raises(NoLonger, match="went on without this node in epoch 3: it was silent") as raised:
        dial(Surroundings(peer)).run(soon())
    assert (raised.value.epoch, raised.value.reason) == (3, "it was silent")
    assert peer.aborted is not None


def test_a_dial_that_is_not_needed_any_more_is_no_failure() -> None:
    peer = Answerer(Declined("ours has won", superseded=True))
    with pytest.raises(Superseded):
        dial(Surroundings(peer)).run(soon())
    assert peer.aborted is not None


def test_who_never_answers_is_left_at_the_deadline_and_an_answer_after_it_is_not_taken() -> None:
    peer = Answerer()
    where = Surroundings(peer)
    with pytest.raises(DialFailed, match="did not answer"):
        dial(where).run(time.monotonic() + 0.02)
    assert peer.aborted is not None
    peer.say(encode(RIGHT))
    assert where.adopted == []


def test_a_connection_that_breaks_is_told_with_its_reason() -> None:
    peer = Answerer()
    threading.Timer(0.02, peer.lose).start()
    with pytest.raises(DialFailed, match="broke at once: it is gone"):
        dial(Surroundings(peer)).run(soon())


def test_a_connection_that_is_gone_before_a_word_is_said_is_told_too() -> None:
    peer = Answerer()
    peer.lost = True
    with pytest.raises(DialFailed, match="cannot connect: it is gone"):
        dial(Surroundings(peer)).run(soon())


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (ConnectRefused("there", "quic: no; tls: no"), "cannot connect: quic: no; tls: no"),
        (TimeoutError("tls: no answer"), "cannot connect: tls: no answer"),
        (Recalled(), "this node is closed"),
    ],
)
def test_a_dial_that_does_not_get_through_says_why(trouble: Exception, words: str) -> None:
    with pytest.raises(DialFailed, match=words):
        dial(Surroundings(trouble)).run(soon())


def test_a_node_that_closes_ends_the_wait_for_the_answer() -> None:
    peer = Answerer()
    where = Surroundings(peer)
    threading.Timer(0.02, where.recall.make).start()
    with pytest.raises(DialFailed, match="this node is closed"):
        dial(where).run(soon())
    assert peer.aborted is not None


def test_nobody_waits_for_the_answer_of_who_is_no_member_any_more() -> None:
    peer = Answerer()
    dialing = dial(Surroundings(peer))
    dialing.recall.make()
    with pytest.raises(DialFailed, match="it is no member any more"):
        dialing.run(soon())
    assert peer.aborted is not None
