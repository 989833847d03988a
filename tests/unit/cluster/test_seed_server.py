import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from nexar.cluster import seed_server as seed_server_module
from nexar.cluster.control_loop import ControlLoop
from nexar.cluster.decisions.admission import Admission
from nexar.cluster.decisions.paxos import Vote
from nexar.cluster.delay_meter import DelayMeter
from nexar.cluster.membership import Change, Departure, Membership, PinnedNode
from nexar.cluster.seed_connection import CertificateIssuer
from nexar.cluster.seed_server import SeedServer
from nexar.cluster.seed_status import FormationStatus, SeedLog, StatusBoardService
from nexar.errors import FormationTimeout, UsageError
from nexar.security.authority import Authority, make_key
from nexar.security.certificates import make_request
from nexar.security.proof import make_nonce, prove
from nexar.wire import control
from nexar.wire.hello import Hello, encode_hello
from nexar.wire.join import (
    Challenge,
    Committed,
    FormationFailed,
    JoinRefusedMessage,
    JoinRequest,
    LivenessQuery,
    Ready,
    SeedPaxosMessage,
    Welcome,
)
from tests.unit.cluster.fake_carrier import FakeCarrier, as_carrier
from tests.unit.cluster.memory_mesh import eventually

SEED = PinnedNode(900, bytes(32))
SECRET = bytes(range(32))
AUTHORITY = Authority.create("c")


class Scene:
    def __init__(
        self, size: int = 2, timeout: float = 1000.0, max_lingering: int = 2, meter: DelayMeter | None = None
    ) -> None:
        self.kept: list[Membership] = []
        self.votes: list[Vote] = []
        self.outcome = FormationStatus()
        self.seed_log = SeedLog()
        admission = Admission("c", size, started=time.monotonic(), formation_timeout=timeout, seed=SEED)
        issuer = CertificateIssuer(SECRET, AUTHORITY, b"leaf", timedelta(hours=1))
        self.board = StatusBoardService("c", size, lambda: admission.joined)
        self.control_loop = ControlLoop()
        self.seed_server = SeedServer(
            admission,
            issuer,
            self.outcome,
            self.seed_log,
            self.board,
            control_loop=self.control_loop,
            keep=self.keep,
            keep_vote=self.votes.append,
            meter=meter,
            max_lingering=max_lingering,
        )

    def close(self) -> None:
        self.seed_server.close()
        self.control_loop.close()

    def keep(self, membership: Membership) -> None:
        self.kept.append(membership)

    def connect(self, address: str = "10.0.0.1:7") -> FakeCarrier:
        carrier = FakeCarrier(address)
        self.seed_server.carrier_accepted(as_carrier(carrier))
        return carrier

    def join(self, node: int) -> FakeCarrier:
        carrier = self.connect()
        nonce = make_nonce()
        carrier.say(encode_hello(Hello(node, "candidate", nonce=nonce)))
        challenge = carrier.sent[-1]
        assert isinstance(challenge, Challenge)
        proof = prove(SECRET, "candidate", nonce, challenge.nonce, b"leaf")
        carrier.say_message(JoinRequest(proof, make_request(node, make_key()), "h", {}))
        carrier.say_message(Ready())
        return carrier


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(seed_server_module, "LINGER", 0.05)
    made = Scene()
    yield made
    made.close()


def kinds(carrier: FakeCarrier) -> list[type]:
    return [type(message) for message in carrier.sent]


def test_members_are_welcomed_and_receive_the_membership_when_all_are_there(scene: Scene) -> None:
    first = scene.join(7)
    assert kinds(first) == [Challenge, Welcome]
    assert scene.kept == []
    second = scene.join(8)
    assert kinds(first) == kinds(second) == [Challenge, Welcome, Committed]
    assert scene.outcome.membership == scene.kept[0]
    assert [note.kind for note in scene.seed_log.events[-2:]] == ["admitted", "committed"]


def test_a_membership_is_on_the_disk_before_anybody_learns_of_it(scene: Scene) -> None:
    first = scene.join(7)
    received: list[type] = []
    scene.seed_server._keep = lambda _: received.extend(kinds(first))
    scene.join(8)
    assert received == [Challenge, Welcome]
    assert kinds(first)[-1] is Committed


def test_a_membership_that_cannot_be_kept_is_sent_to_nobody(scene: Scene) -> None:
    def fail(_: Membership) -> None:
        raise UsageError("the disk is full")

    scene.seed_server._keep = fail
    carriers = [scene.join(7), scene.join(8)]
    for carrier in carriers:
        assert kinds(carrier) == [Challenge, Welcome, JoinRefusedMessage]
        assert carrier.finished
    with pytest.raises(UsageError, match="full"):
        scene.outcome.wait_formed(0)


def test_a_refused_line_ends_politely_and_is_cut_when_it_stays(scene: Scene) -> None:
    rude = scene.connect()
    rude.say(b"nonsense")
    assert kinds(rude) == [JoinRefusedMessage]
    assert rude.finished
    wait_until_aborted(rude)


def test_only_so_many_refused_unauthenticated_peers_may_linger(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seed_server_module, "LINGER", 1000.0)
    rude = [scene.connect() for _ in range(3)]
    for carrier in rude:
        carrier.say(b"nonsense")
    assert [carrier.aborted is not None for carrier in rude] == [True, False, False]
    for carrier in rude[1:]:
        carrier.half_close()


def test_members_that_linger_are_not_counted() -> None:
    scene = Scene(size=9, timeout=0.2, max_lingering=1)
    carriers = [scene.join(node) for node in (7, 8, 9)]
    with pytest.raises(FormationTimeout):
        scene.outcome.wait_formed(10)
    for carrier in carriers:
        assert kinds(carrier)[-1] is FormationFailed
        assert carrier.aborted is None
        carrier.half_close()
    scene.close()


def test_the_own_delay_is_measured_until_the_cluster_has_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seed_server_module, "_MEASURE_INTERVAL", 0.01)
    monkeypatch.setattr(seed_server_module, "LINGER", 0.05)
    measured: list[float] = []

    class Meter(DelayMeter):
        def timer_ran(self, due: float, now: float) -> None:
            assert now >= due
            measured.append(due)

    scene = Scene(meter=Meter(1.0))
    eventually(lambda: len(measured) > 3, "measurements")
    scene.join(7)
    scene.join(8)
    eventually(lambda: scene.seed_server._measure_at is None, "no measurements when it has formed")
    scene.close()


def test_whom_the_transports_refuse_is_noted_and_reported(scene: Scene) -> None:
    scene.seed_server.candidate_refused("10.0.0.9:1", "bad\ncertificate")
    (note,) = scene.seed_log.events
    assert (note.kind, note.address, note.reason) == ("refused", "10.0.0.9:1", "bad certificate")
    assert scene.seed_server.describe_refused() == {"a peer at 10.0.0.9:1": "bad certificate"}


def test_who_shows_a_certificate_is_sent_away(scene: Scene) -> None:
    carrier = FakeCarrier(verified=True)
    scene.seed_server.carrier_accepted(as_carrier(carrier))
    assert carrier.aborted is not None
    assert scene.seed_log.events[-1].kind == "refused"


def test_who_is_in_is_known(scene: Scene) -> None:
    scene.connect()
    scene.join(7)
    assert scene.seed_server.describe_joined() == ["node 0000000000000007 at 10.0.0.1:7"]


def test_closing_sends_a_closing_message_and_waits_for_the_others(scene: Scene) -> None:
    carrier, silent = scene.join(7), scene.connect()
    scene.seed_server.close("we are closed")
    assert kinds(carrier)[-1] is JoinRefusedMessage
    assert carrier.finished
    assert carrier.aborted is not None  # it did not answer
    assert silent.aborted is not None
    late = scene.connect()
    assert late.aborted is not None


def test_what_one_event_causes_is_done_before_what_the_next_one_does(scene: Scene) -> None:
    """An action that leads to an event, here a line lost while it is notified, waits for its turn."""
    first = scene.join(7)
    first.send_frame = lambda *_: first.lose()  # type: ignore[method-assign]
    scene.join(8)
    assert [note.kind for note in scene.seed_log.events[-2:]] == ["committed", "gone"]


def wait_until_aborted(carrier: FakeCarrier) -> None:
    deadline = time.monotonic() + 10
    while carrier.aborted is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)


# ---------------------------------------------------------------- members that go on


def formed(scene: Scene) -> tuple[FakeCarrier, FakeCarrier]:
    return scene.join(7), scene.join(8)


def prepare(ballot: int) -> SeedPaxosMessage:
    return SeedPaxosMessage(control.encode(control.Prepare((0, 1, 0), control.BallotNumber(ballot, 7))))


def messages(carrier: FakeCarrier) -> list[object]:
    return [control.decode(message.body) for message in carrier.sent if isinstance(message, SeedPaxosMessage)]


def test_a_vote_is_on_the_disk_before_it_is_sent(scene: Scene) -> None:
    first, _ = formed(scene)
    received: list[object] = []
    scene.seed_server._keep_vote = lambda _: received.extend(messages(first))
    first.say_message(prepare(1))
    assert received == []
    assert [type(sent) for sent in messages(first)] == [control.Promise]


def test_a_vote_that_cannot_be_kept_is_sent_to_nobody(scene: Scene) -> None:
    def fail(_: Vote) -> None:
        raise UsageError("the disk is full")

    first, second = formed(scene)
    scene.seed_server._keep_vote = fail
    first.say_message(prepare(1))
    assert messages(first) == []
    assert kinds(first)[-1] is kinds(second)[-1] is JoinRefusedMessage


def test_what_was_chosen_is_kept_and_reported_to_all(scene: Scene) -> None:
    first, second = formed(scene)
    chosen = control.Chosen((0, 1, 0), Change(2, left=(Departure(8, "silent"),)).encode())
    first.say_message(SeedPaxosMessage(control.encode(chosen)))
    assert [membership.epoch for membership in scene.kept] == [1, 2]
    assert scene.outcome.membership is scene.kept[-1]
    assert chosen in messages(second)
    refusal = second.sent[-1]
    assert isinstance(refusal, JoinRefusedMessage)
    assert (refusal.reason, refusal.expelled) == ("silent", 2)


def test_a_member_that_does_not_answer_is_noticed_in_time(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexar.cluster.decisions.seed_voter.PROBE_TIMEOUT", 0.02)
    first, second = formed(scene)
    without_8 = Change(2, left=(Departure(8, "silent"),)).encode()
    first.say_message(prepare(1))
    accept = control.Accept((0, 1, 0), control.BallotNumber(1, 7), without_8)
    first.say_message(SeedPaxosMessage(control.encode(accept)))
    assert kinds(second)[-1] is LivenessQuery
    deadline = time.monotonic() + 10
    while not any(isinstance(sent, control.Accepted) for sent in messages(first)):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert scene.votes[-1].value == without_8
