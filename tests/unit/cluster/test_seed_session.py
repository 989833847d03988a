"""The line to the seed is kept, and the certificate renewed, without anybody waiting for it.

What a node reports to the seed, on the line that it has to it anyway.
"""

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from nexar.cluster import seed_session as module
from nexar.cluster.control_loop import DialCancelled
from nexar.cluster.decisions.membership_events import Loss, LossKind
from nexar.cluster.join_client import JoinConnection
from nexar.cluster.membership import Member, encode_member
from nexar.cluster.seed_session import SeedCallbacks, SeedSession
from nexar.errors import JoinRefused
from nexar.security.authority import Authority
from nexar.security.certificates import make_request
from nexar.transport.base import ConnectRefused
from nexar.wire import control
from nexar.wire.control import Ping
from nexar.wire.join import (
    MAX_JOIN_BYTES,
    JoinMessage,
    JoinRefusedMessage,
    Leave,
    LivenessQuery,
    LivenessReply,
    MemberDied,
    Renew,
    Renewed,
    SeedPaxosMessage,
    StatusUpdate,
    WaitingJoiners,
    Welcome,
    encode_join,
)
from nexar.wire.status import StatusReport, decode_status_report
from tests.ranks import EVENT_TIMEOUT
from tests.unit.cluster.fake_carrier import as_carrier
from tests.unit.cluster.seed_side import AtOnce, FakeNode, SeedSide, as_node, certificate_for


class Line(SeedSide):
    """A line on which everybody has been proven already."""

    def __init__(self) -> None:
        super().__init__()
        self.hello = object()  # type: ignore[assignment]


class Certified(FakeNode):
    """Says when it shows another certificate."""

    def __init__(self) -> None:
        super().__init__(Line)
        self.news: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def certify(self, credentials: Any, trust: Any) -> None:
        super().certify(credentials, trust)
        self.news.put(credentials.certificate_chain)


class Scene:
    """A node with a session; `again` is what comes of dialing once more."""

    def __init__(self) -> None:
        self.authority = Authority.create("ours")
        self.node = Certified()
        self.seed = Line()
        self.dials = 0
        self.knocked = threading.Event()
        self.again: Callable[[], Line] = self.nobody
        self.reported: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        """What the listeners received: which one, and what."""
        self._made: list[SeedSession] = []

    def next_notice(self) -> tuple[Any, ...]:
        return self.reported.get(timeout=EVENT_TIMEOUT)

    def listeners(self) -> SeedCallbacks:
        def telling(name: str) -> Callable[..., None]:
            return lambda *what: self.reported.put((name, *what))

        names = ("on_control", "on_died", "on_waiting", "on_lost", "on_back", "on_refused")
        return SeedCallbacks(**{name: telling(name) for name in names})

    def certificate(self, seconds: float) -> bytes:
        return certificate_for(self.authority, make_request(self.node.id, self.node.key), self.node.id, seconds)

    def stand(
        self,
        seconds: float = 3600.0,
        random: Random | None = None,
        status_report: Callable[[], StatusReport | None] | None = None,
        *,
        start: bool = True,
    ) -> SeedSession:
        authority = self.authority
        welcome = Welcome(authority.cluster, self.certificate(seconds), authority.certificate_pem, "10.0.0.9:9", 1)
        line = JoinConnection(as_carrier(self.seed))
        self._made.append(
            SeedSession(
                as_node(self.node),
                line,
                welcome,
                self._dial,
                random=random or AtOnce(),
            )
        )
        if start:
            self._made[-1].start(self.listeners(), status_report)
        return self._made[-1]

    def _dial(self) -> JoinConnection:
        self.dials += 1
        try:
            return JoinConnection(as_carrier(self.again()))
        finally:
            self.knocked.set()

    @staticmethod
    def nobody() -> Line:
        raise ConnectRefused("seed:1", "nobody listens")

    def close(self) -> None:
        for session in self._made:
            session.close()
        self.node.control_loop.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


def receive(line: Line, kind: type[JoinMessage]) -> JoinMessage:
    message = line.receive()
    assert isinstance(message, kind), message
    return message


# ---------------------------------------------------------------- renewing


def test_a_certificate_is_renewed_before_it_expires(scene: Scene) -> None:
    scene.stand(seconds=1.0)
    request = receive(scene.seed, Renew)
    assert isinstance(request, Renew)
    renewed = certificate_for(scene.authority, request.request, scene.node.id)
    scene.seed.say_message(Renewed(renewed))
    assert scene.node.news.get(timeout=EVENT_TIMEOUT).startswith(renewed)


def test_it_is_renewed_again_and_again(scene: Scene) -> None:
    scene.stand(seconds=0.5)
    for _ in range(3):
        receive(scene.seed, Renew)
        renewed = scene.certificate(0.5)
        scene.seed.say_message(Renewed(renewed))
        assert scene.node.news.get(timeout=EVENT_TIMEOUT).startswith(renewed)


def test_what_the_seed_says_waits_until_the_listeners_can_be_called(scene: Scene) -> None:
    session = scene.stand(start=False)
    scene.seed.say_message(WaitingJoiners((encode_member(JOINER),)))
    assert scene.reported.empty()
    session.start(scene.listeners())
    assert scene.next_notice() == ("on_waiting", (JOINER,))


def test_a_session_that_was_never_started_can_be_closed(scene: Scene) -> None:
    scene.stand(start=False).close()
    receive(scene.seed, Leave)


def test_other_messages_of_the_seed_disturb_nobody(scene: Scene) -> None:
    scene.stand(seconds=1.0)
    scene.seed.say_message(Leave("nothing"))
    receive(scene.seed, Renew)


def test_a_certificate_that_is_none_costs_the_line_and_nothing_else(scene: Scene) -> None:
    new = Line()
    scene.again = lambda: new
    scene.stand(seconds=1.0)
    receive(scene.seed, Renew)
    scene.seed.say_message(Renewed(b"-----BEGIN CERTIFICATE-----"))
    receive(new, Renew)
    assert scene.node.certified == []


def test_a_seed_that_does_not_answer_is_dialed_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexar.cluster.seed_session._ANSWER_TIMEOUT", 0.05)
    new = Line()
    scene.again = lambda: new
    scene.stand(seconds=1.0)
    receive(scene.seed, Renew)
    receive(new, Renew)
    assert scene.seed.aborted is not None


# ---------------------------------------------------------------- a seed that is gone


@pytest.mark.parametrize(
    "end", [SeedSide.lose, SeedSide.half_close, lambda seed: seed.say_message(JoinRefusedMessage("you?"))]
)
def test_a_line_that_ended_is_opened_anew_and_left_politely_at_the_end(
    scene: Scene, end: Callable[[SeedSide], None]
) -> None:
    new = Line()
    scene.again = lambda: new
    session = scene.stand()
    end(scene.seed)
    assert scene.knocked.wait(EVENT_TIMEOUT)
    session.close("done")
    assert (new.sent, new.finished) == ([Leave("done")], True)
    assert Leave("done") not in scene.seed.sent


def test_a_seed_that_is_gone_is_dialed_until_it_is_back(scene: Scene) -> None:
    new, tries = Line(), iter(range(3))

    def again() -> Line:
        return new if next(tries, None) is None else scene.nobody()

    scene.again = again
    scene.stand(seconds=1.5)
    scene.seed.lose()
    receive(new, Renew)  # the new line serves
    assert scene.dials == 4


def test_pauses_between_dials_grow_up_to_a_bound(scene: Scene) -> None:
    bounds: list[float] = []
    enough = threading.Event()

    class Recording(AtOnce):
        def uniform(self, a: float, b: float) -> float:
            bounds.append(b)
            if len(bounds) >= 8:
                enough.set()
            return 0.001

    scene.stand(random=Recording())
    scene.seed.lose()
    assert enough.wait(EVENT_TIMEOUT)
    assert bounds[:8] == [1, 2, 4, 8, 16, 30, 30, 30]


def test_who_is_refused_when_it_dials_again_dials_no_more(scene: Scene) -> None:
    def refuse() -> Line:
        raise JoinRefused(reason="another cluster has formed", address="seed:1")

    scene.again = refuse
    session = scene.stand()
    scene.seed.lose()
    assert scene.knocked.wait(EVENT_TIMEOUT)
    session._thread.join(EVENT_TIMEOUT)
    assert not session._thread.is_alive()
    assert scene.dials == 1


# ---------------------------------------------------------------- messages

CHOSEN = control.Chosen((0, 3, 0), b"who comes next")
JOINER = Member(9, "there", bytes(32), {"tls": ("10.0.0.8:1",)}, frozenset({"tls"}))


def test_a_message_of_the_seed_is_passed_on_and_one_of_the_future_is_not(scene: Scene) -> None:
    scene.stand()
    scene.seed.say_message(SeedPaxosMessage(b"\x81\xa4type\xa8teleport"))
    scene.seed.say_message(SeedPaxosMessage(control.encode(CHOSEN)))
    assert scene.next_notice() == ("on_control", CHOSEN)


def test_a_death_and_who_waits_are_passed_on(scene: Scene) -> None:
    scene.stand()
    scene.seed.say_message(MemberDied(8, 2, "was killed by SIGKILL", "launcher"))
    scene.seed.say_message(WaitingJoiners((encode_member(JOINER),)))
    scene.seed.say_message(WaitingJoiners())
    assert scene.next_notice() == ("on_died", 8, 2, Loss(LossKind.LAUNCHER_REPORT, "was killed by SIGKILL"))
    assert scene.next_notice() == ("on_waiting", (JOINER,))
    assert scene.next_notice() == ("on_waiting", ())


@pytest.mark.parametrize("by", ["seed", "", "somebody_new"])
@pytest.mark.parametrize("words", ["its connection to the seed broke: reset", "was killed by SIGKILL"])
def test_whose_report_of_a_death_it_is_depends_on_the_field_and_not_on_the_words(
    scene: Scene, by: str, words: str
) -> None:
    scene.stand()
    scene.seed.say_message(MemberDied(8, 2, words, by))
    scene.seed.say_message(MemberDied(8, 2, words, "launcher"))
    assert scene.next_notice() == ("on_died", 8, 2, Loss(LossKind.SEED_CONNECTION_BROKEN, words))
    assert scene.next_notice() == ("on_died", 8, 2, Loss(LossKind.LAUNCHER_REPORT, words))


def test_who_is_asked_whether_it_is_there_says_so(scene: Scene) -> None:
    scene.stand()
    scene.seed.say_message(LivenessQuery(5))
    assert receive(scene.seed, LivenessReply) == LivenessReply(5)


def test_a_seed_that_answers_is_there(scene: Scene) -> None:
    session = scene.stand()
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
    session.ping(EVENT_TIMEOUT, answers.put)
    query = receive(scene.seed, LivenessQuery)
    assert isinstance(query, LivenessQuery)
    scene.seed.say_message(LivenessReply(query.number + 1))  # of nobody's
    scene.seed.say_message(LivenessReply(query.number))
    assert answers.get(timeout=EVENT_TIMEOUT)
    assert scene.node.control_loop.next_due() is None


@pytest.mark.parametrize("end", ["silence", "loss", "close"])
def test_a_seed_that_does_not_answer_is_not_there(scene: Scene, end: str) -> None:
    session = scene.stand()
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
    timeout = 0.0 if end == "silence" else EVENT_TIMEOUT
    session.ping(timeout, answers.put)
    receive(scene.seed, LivenessQuery)
    if end == "loss":
        scene.seed.lose()
    elif end == "close":
        session.close()
    assert not answers.get(timeout=EVENT_TIMEOUT)
    scene.close()
    assert answers.empty(), "it is told once"


def test_a_seed_without_a_connection_does_not_answer(scene: Scene) -> None:
    session = scene.stand()
    scene.seed.lose()
    assert scene.next_notice()[0] == "on_lost"
    answers: list[bool] = []
    session.ping(EVENT_TIMEOUT, answers.append)
    assert answers == [False]


def test_a_message_to_the_seed_is_sent_while_there_is_a_line_that_is_read(scene: Scene) -> None:
    session = scene.stand(random=Random(1))
    assert session.send_control(CHOSEN)
    assert receive(scene.seed, SeedPaxosMessage) == SeedPaxosMessage(control.encode(CHOSEN))
    scene.seed.queued = MAX_JOIN_BYTES + 1
    assert not session.send_control(CHOSEN)
    scene.seed.lose()
    assert not session.send_control(CHOSEN)
    session.close()
    assert not session.send_control(CHOSEN)


@pytest.mark.parametrize(
    "nonsense", [SeedPaxosMessage(b"what?"), WaitingJoiners((b"who?",)), WaitingJoiners((encode_member(JOINER)[:-3],))]
)
def test_messages_that_make_no_sense_cost_the_line_and_nothing_else(scene: Scene, nonsense: JoinMessage) -> None:
    new = Line()
    scene.again = lambda: new
    scene.stand()
    scene.seed.say_message(nonsense)
    assert scene.next_notice()[0] == "on_lost"
    assert scene.next_notice() == ("on_back", 0)
    new.say_message(LivenessQuery(1))
    receive(new, LivenessReply)


def test_a_seed_with_a_pending_message_is_dialed_soon(scene: Scene) -> None:
    class Patient(AtOnce):
        def uniform(self, a: float, b: float) -> float:
            return 0.0 if b < 1 else 1000.0

    session = scene.stand(random=Patient())
    scene.seed.lose()
    assert scene.next_notice()[0] == "on_lost"
    scene.again = Line
    assert not session.send_control(CHOSEN)
    assert scene.next_notice() == ("on_back", 0)
    assert session.send_control(CHOSEN)


def test_the_loss_and_the_return_of_the_seed_are_reported(scene: Scene) -> None:
    scene.again = Line
    scene.stand()
    scene.seed.lose()
    assert scene.next_notice() == ("on_lost", "connection to the seed lost: it is gone")
    assert scene.next_notice() == ("on_back", 0)


def test_whom_the_seed_refuses_is_notified_why(scene: Scene) -> None:
    def refuse() -> Line:
        raise JoinRefused(reason="it was silent", address="seed:1", expelled=3)

    scene.again = refuse
    scene.stand()
    scene.seed.lose()
    assert scene.next_notice()[0] == "on_lost"
    name, refused = scene.next_notice()
    assert (name, refused.reason, refused.expelled) == ("on_refused", "it was silent", 3)


def test_who_learns_on_its_connection_that_it_was_expelled_does_not_dial_again(scene: Scene) -> None:
    session = scene.stand()
    scene.seed.say_message(JoinRefusedMessage("it was silent", 3))
    assert scene.next_notice()[0] == "on_lost"
    name, refused = scene.next_notice()
    assert (name, refused.reason, refused.expelled) == ("on_refused", "it was silent", 3)
    session._thread.join(EVENT_TIMEOUT)
    assert not scene.knocked.is_set()


# ---------------------------------------------------------------- the end


def test_closing_notifies_the_seed_and_ends_the_thread(scene: Scene) -> None:
    session = scene.stand()
    session.close("bye")
    session.close("bye")
    assert (scene.seed.sent, scene.seed.finished) == ([Leave("bye")], True)
    assert not session._thread.is_alive()


def test_closing_while_the_seed_is_gone_is_prompt(scene: Scene) -> None:
    session = scene.stand(random=Random(1))
    scene.seed.lose()
    session.close()
    assert not session._thread.is_alive()


def test_closing_cancels_a_dial_under_way(scene: Scene) -> None:
    def dialing() -> Line:
        scene.knocked.set()
        scene.node.cancel_token.pause(EVENT_TIMEOUT)
        raise AssertionError("it was not called back")

    scene.again = dialing
    session = scene.stand()
    scene.seed.lose()
    assert scene.knocked.wait(EVENT_TIMEOUT)
    session.close()
    assert not session._thread.is_alive()
    with pytest.raises(DialCancelled):
        scene.node.cancel_token.pause(0)


def test_a_message_whose_handler_raises_costs_the_line_and_nothing_else(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    new = Line()
    scene.again = lambda: new
    with monkeypatch.context() as patch, caplog.at_level("CRITICAL"):
        patch.setattr(SeedSession, "_members", broken)
        scene.stand()
        scene.seed.say_message(WaitingJoiners())
        assert scene.next_notice()[0] == "on_lost"
        assert scene.next_notice()[0] == "on_back"
    new.say_message(MemberDied(5, 1, "gone"))
    assert scene.next_notice() == ("on_died", 5, 1, Loss(LossKind.SEED_CONNECTION_BROKEN, "gone"))


def test_what_the_node_does_is_reported_at_once_and_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STATUS_INTERVAL", 0.001)
    numbers = itertools.count(1)
    scene.stand(status_report=lambda: StatusReport(0, 1, pid=next(numbers)))
    for number in (1, 2, 3):
        news = receive(scene.seed, StatusUpdate)
        assert isinstance(news, StatusUpdate)
        assert decode_status_report(news.body) == StatusReport(0, 1, pid=number)


def test_a_node_with_nothing_to_report_sends_nothing(scene: Scene) -> None:
    asked = threading.Event()
    session = scene.stand(status_report=asked.set)
    assert asked.wait(EVENT_TIMEOUT)
    session.send_control(Ping(1))
    assert isinstance(scene.seed.receive(), SeedPaxosMessage)


def test_news_that_cannot_be_made_do_not_cost_the_session(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    session = scene.stand(status_report=lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    scene.seed.say(encode_join(LivenessQuery(5)))
    assert receive(scene.seed, LivenessReply) == LivenessReply(5)
    session.send_control(Ping(1))
    assert isinstance(scene.seed.receive(), SeedPaxosMessage)
    assert "this node sends the seed no further reports" in caplog.text
