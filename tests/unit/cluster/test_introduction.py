import pytest

from nexar.cluster.introduction import Answering, Dialed
from nexar.transport.base import Buffer, CarrierLost
from nexar.wire.frame import Frame, Kind, Lane
from nexar.wire.messages import Declined, Introduce, Introduced, Message, Ping, Unknown, decode, encode
from tests.unit.cluster.fake_carrier import FakeCarrier, as_carrier

ME, YOU = Introduce(rank=0, epoch=1), Introduced(rank=1, epoch=1)


class Line(FakeCarrier):
    """Remembers control messages of members."""

    def __init__(self) -> None:
        super().__init__(verified=True)
        self.said: list[Message | Unknown] = []

    def send_frame(self, lane: Lane, communicator: int, header: bytes, *body: Buffer) -> None:
        self._check()
        self.said.append(decode(b"".join(body)))

    def hear(self, message: Message, kind: int = Kind.CONTROL) -> None:
        self.say(encode(message), kind)


class Answerer:
    """What a mesh is told."""

    def __init__(self) -> None:
        self.line = Line()
        self.introduced: list[Introduce] = []
        self.confirmed: list[bytes] = []
        self.ended = 0
        self.answering = Answering(as_carrier(self.line), self._introduced, self._confirmed, self._ended)

    def _introduced(self, answering: Answering, introduce: Introduce) -> None:
        assert answering.carrier is as_carrier(self.line)
        self.introduced.append(introduce)

    def _confirmed(self, answering: Answering, frame: Frame, body: memoryview) -> None:
        assert self.ended == 0
        self.confirmed.append(bytes(body))

    def _ended(self, answering: Answering) -> None:
        self.ended += 1


@pytest.fixture
def answerer() -> Answerer:
    return Answerer()


def test_a_dialer_that_was_welcomed_and_goes_on_is_handed_over_with_its_frame(answerer: Answerer) -> None:
    answerer.line.hear(ME)
    assert (answerer.introduced, answerer.confirmed) == ([ME], [])
    answerer.answering.welcome(YOU)
    assert answerer.line.said == [YOU]
    answerer.line.hear(Ping(1))
    assert answerer.confirmed == [encode(Ping(1))]


def test_a_dialer_that_was_declined_and_goes_on_is_thrown_out(answerer: Answerer) -> None:
    answerer.line.hear(ME)
    answerer.answering.decline("wrong rank")
    assert answerer.line.said == [Declined("wrong rank")]
    assert answerer.line.finished
    answerer.line.hear(Ping(1))
    assert (answerer.confirmed, answerer.ended) == ([], 1)
    assert answerer.line.aborted is not None


def test_a_dialer_that_goes_on_before_it_was_answered_is_thrown_out(answerer: Answerer) -> None:
    answerer.line.hear(ME)
    answerer.line.hear(ME)
    assert (answerer.confirmed, answerer.ended) == ([], 1)
    assert "without having been welcomed" in (answerer.line.aborted or "")


@pytest.mark.parametrize("kind", [Kind.CONTROL, Kind.EAGER])
def test_a_dialer_that_says_anything_else_first_is_thrown_out(answerer: Answerer, kind: Kind) -> None:
    answerer.line.hear(Ping(1), kind)
    assert (answerer.introduced, answerer.ended) == ([], 1)
    assert "before introducing yourself" in (answerer.line.aborted or "")


def test_a_dialer_that_is_lost_or_leaves_is_forgotten() -> None:
    lost, left = Answerer(), Answerer()
    lost.line.lose()
    left.line.half_close()
    assert (lost.ended, left.ended) == (1, 1)


def test_a_dialer_that_is_gone_when_it_is_answered_costs_nothing(answerer: Answerer) -> None:
    answerer.line.hear(ME)
    answerer.line.lost = True
    answerer.answering.welcome(YOU)
    assert answerer.line.said == []


def test_the_dialer_takes_one_answer() -> None:
    line, answers = Line(), []
    Dialed(as_carrier(line), ME, lambda _, answer: answers.append(answer))
    assert line.said == [ME]
    line.hear(YOU)
    line.hear(Declined("no"))
    assert answers == [YOU]


def test_nonsense_is_an_answer_too() -> None:
    line, answers = Line(), []
    Dialed(as_carrier(line), ME, lambda _, answer: answers.append(answer))
    line.say(b"\xc1")
    assert isinstance(answers[0], CarrierLost)
    assert answers[0].misbehaved
