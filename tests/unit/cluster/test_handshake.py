"""One dial, with a peer that answers as a test wants.

Which sidecars are opened and taken.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest

from nexar.cluster.control_loop import CancelToken, DialCancelled
from nexar.cluster.handshake import (
    AnsweringHandshake,
    DialingHandshake,
    DialSuperseded,
    NoLongerMember,
    PeerDial,
    PeerDialFailed,
    SidecarDialer,
)
from nexar.cluster.membership import Member
from nexar.transport.base import Buffer, Carrier, CarrierLost, ConnectRefused, Expected
from nexar.wire.control import Declined, Introduce, Introduced, Message, Ping, Unknown, decode, encode
from nexar.wire.frame import Frame, FrameKind, Lane
from tests.ranks import EVENT_TIMEOUT
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
        self.cancel_token = CancelToken()
        self.dialer = self
        self.adopted: list[Carrier] = []
        self.expected: Expected | None = None
        self.deadline: float | None = None
        self.host = PEER.host
        self.memory_address: str | None = None
        self._answer = answer
        self._memory = memory

    def dial_addresses(self, member: Member) -> Mapping[str, Sequence[str]]:
        return member.addresses

    def dial(
        self, addresses: Mapping[str, Sequence[str]], expected: Expected, deadline: float, cancel_token: CancelToken
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
    """What the membership says; the laws of peering are in test_peering."""
    assert node == PEER.node
    return None if claim.rank == RIGHT.rank else f"it claims rank {claim.rank}, and has rank {RIGHT.rank}"


def dial(where: Surroundings) -> PeerDial:
    return PeerDial(cast(Any, where), PEER, cast(Any, where), ME, fault_of)


def soon() -> float:
    return time.monotonic() + EVENT_TIMEOUT


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
    with caplog.at_level(logging.INFO, "nexar.cluster.handshake"):
        dial(where).run(soon())
    assert where.adopted == [as_carrier(peer)]
    assert "using the network" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("answer", "messages"),
    [
        (Introduced(rank=5, epoch=2), "it claims rank 5, and has rank 4"),
        (Declined("no such epoch"), "it declined: no such epoch"),
        (Ping(1), "broke at once: it answered an introduction with Ping"),
    ],
    ids=["rank", "declined", "nonsense"],
)
def test_who_answers_wrongly_is_left(answer: Message, messages: str) -> None:
    peer = Answerer(answer)
    where = Surroundings(peer)
    dialing = dial(where)
    with pytest.raises(PeerDialFailed, match=messages):
        dialing.run(soon())
    assert (dialing.opened, where.adopted) == (False, [])
    assert peer.aborted is not None


def test_who_is_no_member_any_more_learns_since_when_and_why() -> None:
    peer = Answerer(Declined("it was silent", expelled=3))
    with pytest.raises(NoLongerMember, match="went on without this node in epoch 3: it was silent") as raised:
        dial(Surroundings(peer)).run(soon())
    assert (raised.value.epoch, raised.value.reason) == (3, "it was silent")
    assert peer.aborted is not None


def test_a_dial_that_is_not_needed_any_more_is_no_failure() -> None:
    peer = Answerer(Declined("ours has won", superseded=True))
    with pytest.raises(DialSuperseded):
        dial(Surroundings(peer)).run(soon())
    assert peer.aborted is not None


def test_who_never_answers_is_left_at_the_deadline_and_an_answer_after_it_is_not_taken() -> None:
    peer = Answerer()
    where = Surroundings(peer)
    with pytest.raises(PeerDialFailed, match="did not answer"):
        dial(where).run(time.monotonic() + 0.02)
    assert peer.aborted is not None
    peer.say(encode(RIGHT))
    assert where.adopted == []


def test_a_connection_that_breaks_is_reported_with_its_reason() -> None:
    peer = Answerer()
    threading.Timer(0.02, peer.lose).start()
    with pytest.raises(PeerDialFailed, match="broke at once: it is gone"):
        dial(Surroundings(peer)).run(soon())


def test_a_connection_that_is_lost_before_the_first_message_is_reported_too() -> None:
    peer = Answerer()
    peer.lost = True
    with pytest.raises(PeerDialFailed, match="cannot connect: it is gone"):
        dial(Surroundings(peer)).run(soon())


@pytest.mark.parametrize(
    ("trouble", "messages"),
    [
        (ConnectRefused("there", "quic: no; tls: no"), "cannot connect: quic: no; tls: no"),
        (TimeoutError("tls: no answer"), "cannot connect: tls: no answer"),
        (DialCancelled(), "this node is closed"),
    ],
)
def test_a_dial_that_does_not_get_through_says_why(trouble: Exception, messages: str) -> None:
    with pytest.raises(PeerDialFailed, match=messages):
        dial(Surroundings(trouble)).run(soon())


def test_a_node_that_closes_ends_the_wait_for_the_answer() -> None:
    peer = Answerer()
    where = Surroundings(peer)
    threading.Timer(0.02, where.cancel_token.cancel).start()
    with pytest.raises(PeerDialFailed, match="this node is closed"):
        dial(where).run(soon())
    assert peer.aborted is not None


def test_nobody_waits_for_the_answer_of_who_is_no_member_any_more() -> None:
    peer = Answerer()
    dialing = dial(Surroundings(peer))
    dialing.cancel_token.cancel()
    with pytest.raises(PeerDialFailed, match="it is no longer a member"):
        dialing.run(soon())
    assert peer.aborted is not None


THIS_NODE, YOU = Introduce(rank=0, epoch=1), Introduced(rank=1, epoch=1)


class Line(FakeCarrier):
    """Remembers control messages of members."""

    def __init__(self) -> None:
        super().__init__(verified=True)
        self.said: list[Message | Unknown] = []

    def send_frame(self, lane: Lane, communicator: int, header: bytes, *body: Buffer) -> None:
        self._check()
        self.said.append(decode(b"".join(body)))

    def receive(self, message: Message, kind: int = FrameKind.CONTROL) -> None:
        self.say(encode(message), kind)


class AnsweringSide:
    """What a mesh is notified of."""

    def __init__(self) -> None:
        self.line = Line()
        self.introduced: list[Introduce] = []
        self.confirmed: list[bytes] = []
        self.ended = 0
        self.answering = AnsweringHandshake(as_carrier(self.line), self._introduced, self._confirmed, self._ended)

    def _introduced(self, answering: AnsweringHandshake, introduce: Introduce) -> None:
        assert answering.carrier is as_carrier(self.line)
        self.introduced.append(introduce)

    def _confirmed(self, answering: AnsweringHandshake, frame: Frame, body: memoryview) -> None:
        assert self.ended == 0
        self.confirmed.append(bytes(body))

    def _ended(self, answering: AnsweringHandshake) -> None:
        self.ended += 1


@pytest.fixture
def answerer() -> AnsweringSide:
    return AnsweringSide()


def test_a_dialer_that_was_welcomed_and_goes_on_is_handed_over_with_its_frame(answerer: AnsweringSide) -> None:
    answerer.line.receive(THIS_NODE)
    assert (answerer.introduced, answerer.confirmed) == ([THIS_NODE], [])
    answerer.answering.welcome(YOU)
    assert answerer.line.said == [YOU]
    answerer.line.receive(Ping(1))
    assert answerer.confirmed == [encode(Ping(1))]


def test_a_dialer_that_was_declined_and_goes_on_is_thrown_out(answerer: AnsweringSide) -> None:
    answerer.line.receive(THIS_NODE)
    answerer.answering.decline("wrong rank")
    assert answerer.line.said == [Declined("wrong rank")]
    assert answerer.line.finished
    answerer.line.receive(Ping(1))
    assert (answerer.confirmed, answerer.ended) == ([], 1)
    assert answerer.line.aborted is not None


def test_a_dialer_that_goes_on_before_it_was_answered_is_thrown_out(answerer: AnsweringSide) -> None:
    answerer.line.receive(THIS_NODE)
    answerer.line.receive(THIS_NODE)
    assert (answerer.confirmed, answerer.ended) == ([], 1)
    assert "before the introduction was accepted" in (answerer.line.aborted or "")


@pytest.mark.parametrize("kind", [FrameKind.CONTROL, FrameKind.EAGER])
def test_a_dialer_that_says_anything_else_first_is_thrown_out(answerer: AnsweringSide, kind: FrameKind) -> None:
    answerer.line.receive(Ping(1), kind)
    assert (answerer.introduced, answerer.ended) == ([], 1)
    assert "before an introduction" in (answerer.line.aborted or "")


def test_a_dialer_that_is_lost_or_leaves_is_forgotten() -> None:
    lost, left = AnsweringSide(), AnsweringSide()
    lost.line.lose()
    left.line.half_close()
    assert (lost.ended, left.ended) == (1, 1)


def test_a_dialer_that_is_gone_when_it_is_answered_costs_nothing(answerer: AnsweringSide) -> None:
    answerer.line.receive(THIS_NODE)
    answerer.line.lost = True
    answerer.answering.welcome(YOU)
    assert answerer.line.said == []


def test_the_dialer_takes_one_answer() -> None:
    line, answers = Line(), []
    DialingHandshake(as_carrier(line), THIS_NODE, lambda _, answer: answers.append(answer))
    assert line.said == [THIS_NODE]
    line.receive(YOU)
    line.receive(Declined("no"))
    assert answers == [YOU]


def test_nonsense_is_an_answer_too() -> None:
    line, answers = Line(), []
    DialingHandshake(as_carrier(line), THIS_NODE, lambda _, answer: answers.append(answer))
    line.say(b"\xc1")
    assert isinstance(answers[0], CarrierLost)
    assert answers[0].misbehaved


SIDECAR_PEER = Member(9, "there", bytes(32), {"tls": ("10.0.0.1:1",)}, frozenset())


class SidecarSurroundings:
    """A node, its dialer, a link and its sidecar, as far as they are asked. What is done aside is done at once."""

    peer = SIDECAR_PEER.node
    failure: Exception | None = None

    def __init__(self, sidecar: str | None, *schemes: str) -> None:
        self.sidecar: Any = sidecar
        self.schemes = schemes
        self.cancel_token = CancelToken()
        self.dialer = self
        self.tried = 0
        self.failures = 0
        self.refusal: Exception = ConnectRefused("10.0.0.1:1", "a firewall")

    def try_in_thread(self, task: Callable[[], None], otherwise: str) -> bool:
        task()

    def connect_sidecar(self, member: Member, deadline: float) -> Carrier:
        assert member is SIDECAR_PEER
        self.tried += 1
        raise self.refusal

    def open(self, sidecars: SidecarDialer, offered: str) -> None:
        link = cast(Any, LinkOf(self))
        sidecars.open(SIDECAR_PEER, link, ME, offered, lambda _, __: None)


class LinkOf:
    def __init__(self, where: SidecarSurroundings) -> None:
        self.peer, self.schemes, self.failure = where.peer, where.schemes, where.failure
        self.sidecar = self
        self._where = where

    def open_failed(self) -> None:
        self._where.failures += 1


def sidecars(where: SidecarSurroundings) -> SidecarDialer:
    return SidecarDialer(cast(Any, where))


@pytest.mark.parametrize(
    ("ours", "theirs", "schemes", "tried"),
    [
        ("tcp", "tcp", ["quic"], 1),
        ("tls", "tls", ["quic"], 1),
        ("tcp", "tls", ["quic"], 0),
        ("tcp", "", ["quic"], 0),
        (None, "", ["quic"], 0),
        (None, "tcp", ["quic"], 0),
        ("tls", "tls", ["tls"], 0),
        ("tcp", "tcp", ["quic", "shm"], 0),
    ],
)
def test_it_is_opened_where_both_want_the_same_and_it_is_of_use(
    ours: str | None, theirs: str, schemes: list[str], tried: int
) -> None:
    where = SidecarSurroundings(ours, *schemes)
    where.open(sidecars(where), theirs)
    assert where.tried == tried


def test_failures_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    where = SidecarSurroundings("tcp", "quic")
    opening = sidecars(where)
    with caplog.at_level(logging.WARNING, "nexar.cluster.handshake"):
        for _ in range(3):
            where.open(opening, "tcp")
    assert where.failures == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "a firewall" in caplog.text


@pytest.mark.parametrize("end", ["recall", "link"])
def test_what_fails_because_everything_ends_is_no_failure(end: str, caplog: pytest.LogCaptureFixture) -> None:
    where = SidecarSurroundings("tcp", "quic")
    if end == "recall":
        where.cancel_token.cancel()
    else:
        where.failure = CarrierLost("closed", "over")
    with caplog.at_level(logging.DEBUG, "nexar.cluster.handshake"):
        where.open(sidecars(where), "tcp")
    assert where.failures == 0
    assert not caplog.records


@pytest.mark.parametrize(
    ("ours", "scheme", "sidecar", "messages"),
    [
        ("tcp", "tcp", True, None),
        ("tls", "tls", True, None),
        (None, "tls", False, None),
        ("tcp", "quic", False, None),
        (None, "tcp", False, "not encrypted"),
        ("tcp", "tcp", False, "not encrypted"),
        (None, "tls", True, "takes no sidecars, not tls"),
        ("tcp", "tls", True, "takes tcp sidecars, not tls"),
    ],
)
def test_what_is_taken_and_what_is_not(ours: str | None, scheme: str, sidecar: bool, messages: str | None) -> None:
    carrier = FakeCarrier(verified=True)
    carrier.scheme = scheme
    verdict = sidecars(SidecarSurroundings(ours)).why_refused(
        as_carrier(carrier), Introduce(rank=0, epoch=2, sidecar=sidecar)
    )
    assert (verdict is None) == (messages is None)
    assert (messages or "") in (verdict or "")
