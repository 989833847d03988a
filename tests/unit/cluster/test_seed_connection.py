from datetime import timedelta

import pytest
from cryptography import x509

from nexar.cluster.decisions import admission_events as events
from nexar.cluster.seed_connection import CertificateIssuer, SeedConnection
from nexar.cluster.seed_status import StatusBoardService
from nexar.security.authority import Authority, make_key
from nexar.security.certificates import fingerprint, make_request
from nexar.security.proof import make_nonce, prove, proves
from nexar.wire import control
from nexar.wire.frame import FrameKind
from nexar.wire.hello import PROTOCOL_VERSION, Hello, encode_hello
from nexar.wire.join import (
    MAX_JOIN_BYTES,
    Challenge,
    ChildDied,
    Current,
    JoinRefusedMessage,
    JoinRequest,
    Leave,
    LivenessQuery,
    LivenessReply,
    MemberDied,
    Renew,
    Renewed,
    ReserveRanks,
    SeedPaxosMessage,
    WaitingJoiners,
    Welcome,
    encode_join,
)
from tests.unit.cluster.fake_carrier import FakeCarrier, as_carrier

SECRET = bytes(range(32))
NODE = 7
HELLO = Hello(NODE, "candidate", nonce=make_nonce())
KEY = make_key()
REQUEST = make_request(NODE, KEY)
AUTHORITY = Authority.create("c")


class Scene:
    def __init__(self) -> None:
        self.carrier = FakeCarrier()
        self.events: list[events.AdmissionEvent] = []
        self.ended: list[SeedConnection] = []
        issuer = CertificateIssuer(SECRET, AUTHORITY, b"leaf", timedelta(hours=1))
        self.board = StatusBoardService("c", 2, lambda: 0)
        self.line = SeedConnection(
            3,
            as_carrier(self.carrier),
            issuer,
            board=self.board,
            report=self.events.append,
            ended=self.ended.append,
        )
        self.line.open()

    def greet(self) -> None:
        self.carrier.say(encode_hello(HELLO))
        self.line.challenge()

    def proof(self, role: str = "candidate") -> bytes:
        (challenge,) = self.carrier.sent
        assert isinstance(challenge, Challenge)
        return prove(SECRET, role, HELLO.nonce, challenge.nonce, b"leaf")  # type: ignore[arg-type]

    def apply(self) -> None:
        self.greet()
        self.carrier.say_message(JoinRequest(self.proof(), REQUEST, "h", {}))

    def said(self) -> events.AdmissionEvent:
        return self.events[-1]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_first_message_is_the_hello(scene: Scene) -> None:
    scene.carrier.say(encode_hello(HELLO))
    assert scene.events == [events.HelloReceived(3, HELLO)]


def test_an_application_is_checked_proof_first(scene: Scene) -> None:
    scene.apply()
    said = scene.said()
    assert isinstance(said, events.JoinRequested)
    assert said.proof_ok
    assert said.fingerprint == fingerprint(KEY.public_key())


def test_without_a_proof_the_request_is_not_even_looked_at(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexar.cluster.seed_connection.read_request", lambda *_: pytest.fail("it was looked at"))
    scene.greet()
    scene.carrier.say_message(JoinRequest(bytes(32), b"rubbish", "h", {}))
    said = scene.said()
    assert isinstance(said, events.JoinRequested)
    assert (said.proof_ok, said.fingerprint) == (False, b"")


def test_a_bad_request_behind_a_good_proof_is_named(scene: Scene) -> None:
    scene.greet()
    scene.carrier.say_message(JoinRequest(scene.proof(), b"rubbish", "h", {}))
    assert isinstance(said := scene.said(), events.BadMessage)
    assert "request" in said.reason


def test_a_launcher_proves_itself_as_one(scene: Scene) -> None:
    scene.greet()
    scene.carrier.say_message(ReserveRanks(scene.proof("launcher"), REQUEST, "h", 2))
    assert isinstance(said := scene.said(), events.RanksRequested)
    assert said.proof_ok


def test_farewells_and_deaths_are_passed_on(scene: Scene) -> None:
    scene.greet()
    scene.carrier.say_message(ChildDied(1, "why"))
    scene.carrier.say_message(Leave("done"))
    assert scene.events[1:] == [events.ChildReported(3, 1, "why"), events.LeaveReceived(3, "done")]


def test_who_was_let_in_may_renew(scene: Scene) -> None:
    scene.apply()
    assert b"CERTIFICATE" in scene.line.admit()
    assert scene.carrier.admitted
    scene.carrier.say_message(Renew(REQUEST))
    assert isinstance(scene.carrier.sent[-1], Renewed)


def test_who_was_let_in_is_notified_that_the_seed_is_there(scene: Scene) -> None:
    scene.apply()
    scene.line.admit()
    scene.carrier.say_message(LivenessQuery(7))
    assert scene.carrier.sent[-1] == LivenessReply(7)


def test_who_renews_and_never_reads_is_thrown_out(scene: Scene) -> None:
    scene.apply()
    scene.line.admit()
    scene.carrier.queued = MAX_JOIN_BYTES + 1
    scene.carrier.say_message(Renew(REQUEST))
    assert isinstance(said := scene.events[-1], events.BadMessage)
    assert "does not read" in said.reason


def test_who_renews_and_is_gone_costs_nothing(scene: Scene) -> None:
    scene.apply()
    scene.line.admit()
    scene.carrier.lost = True
    scene.carrier.say_message(Renew(REQUEST))


@pytest.mark.parametrize(
    ("message", "part"),
    [
        (Renew(REQUEST), "before it was admitted"),
        (LivenessQuery(1), "before it was admitted"),
        (Welcome("c", b"x", b"x", "", 1), "only a seed"),
        (JoinRefusedMessage(""), "only"),
    ],
)
def test_what_makes_no_sense_is_a_bad_message(scene: Scene, message: Renew, part: str) -> None:
    scene.greet()
    scene.carrier.say_message(message)
    assert isinstance(said := scene.said(), events.BadMessage)
    assert part in said.reason


def test_frames_of_other_kinds_are_bad_messages(scene: Scene) -> None:
    scene.carrier.say(b"", kind=FrameKind.TERMS)
    assert isinstance(scene.said(), events.BadMessage)


def test_another_version_is_named_with_ours(scene: Scene) -> None:
    scene.carrier.say(encode_hello(HELLO, version=9))
    assert scene.said() == events.BadMessage(3, f"it speaks protocol 9, the seed speaks protocol {PROTOCOL_VERSION}")


def test_a_large_message_needs_admission(scene: Scene) -> None:
    scene.apply()
    died = ChildDied(1, "x" * 10_000)
    scene.carrier.say_message(died)
    assert isinstance(scene.said(), events.BadMessage)
    scene.line.admit()
    scene.carrier.say_message(died)
    assert isinstance(scene.said(), events.ChildReported)


def test_a_line_that_is_closed_without_a_closing_message_is_gone(scene: Scene) -> None:
    scene.carrier.half_close()
    assert scene.events == [events.ConnectionEnded(3, "it closed the connection")]
    assert scene.carrier.finished
    assert scene.ended == [scene.line]


def test_a_loss_is_gone_and_a_breach_is_refused(scene: Scene) -> None:
    scene.carrier.lose()
    scene.carrier.lose("misbehaved")
    assert scene.events == [events.ConnectionEnded(3, "it is gone"), events.BadMessage(3, "it is gone")]


def test_behind_the_closing_message_nothing_is_said_or_received(scene: Scene) -> None:
    scene.line.finish()
    scene.line.send(JoinRefusedMessage("too late"))
    scene.carrier.say(encode_hello(HELLO))
    scene.carrier.half_close()
    assert (scene.carrier.sent, scene.events, scene.ended) == ([], [], [scene.line])


def test_what_is_said_on_a_lost_line_is_void(scene: Scene) -> None:
    scene.carrier.lost = True
    scene.line.send(JoinRefusedMessage("nobody hears this"))
    scene.line.finish()
    assert scene.ended == [scene.line]


def test_abort_ends_it_now(scene: Scene) -> None:
    scene.line.abort("enough")
    assert scene.carrier.aborted == "enough"
    assert scene.ended == [scene.line]


# ---------------------------------------------------------------- members


def test_messages_and_answers_of_members_become_events(scene: Scene) -> None:
    scene.apply()
    chosen = control.Chosen((0, 1, 0), b"who comes next")
    scene.carrier.say_message(SeedPaxosMessage(control.encode(chosen)))
    assert scene.said() == events.MemberMessageReceived(3, chosen)
    scene.carrier.say_message(LivenessReply(5))
    assert scene.said() == events.MemberAnswered(3, 5)
    scene.carrier.say_message(ChildDied(2, "ended", well=True))
    assert scene.said() == events.ChildReported(3, 2, "ended", well=True)


def test_a_message_of_the_future_is_passed_over_and_nonsense_is_not(scene: Scene) -> None:
    scene.apply()
    received = len(scene.events)
    scene.carrier.say_message(SeedPaxosMessage(b"\x81\xa4type\xa8teleport"))
    assert len(scene.events) == received
    scene.carrier.say_message(SeedPaxosMessage(b"what?"))
    assert isinstance(scene.said(), events.BadMessage)


def test_what_only_a_seed_says_is_refused(scene: Scene) -> None:
    scene.apply()
    for message in (WaitingJoiners(), MemberDied(1, 1, "gone"), Current(b"x")):
        scene.carrier.say_message(message)
        said = scene.said()
        assert isinstance(said, events.BadMessage)
        assert "only a seed sends" in said.reason


def test_who_does_not_read_its_messages_is_gone(scene: Scene) -> None:
    scene.apply()
    scene.line.notify(encode_join(WaitingJoiners()))
    assert scene.carrier.sent[-1] == WaitingJoiners()
    scene.carrier.queued = 9 * MAX_JOIN_BYTES
    scene.line.notify(encode_join(WaitingJoiners()))
    assert scene.said() == events.ConnectionEnded(3, "it does not read what the seed sends")
    assert scene.carrier.aborted is not None
    scene.line.notify(encode_join(WaitingJoiners()))  # it is over
    assert len(scene.ended) == 1


@pytest.fixture
def issuer() -> CertificateIssuer:
    return CertificateIssuer(SECRET, Authority.create("c"), b"the certificate", timedelta(hours=1))


def test_its_challenge_proves_that_it_knows_the_secret_on_this_connection(issuer: CertificateIssuer) -> None:
    hello, nonce = Hello(7, "candidate", nonce=make_nonce()), make_nonce()
    challenge = issuer.challenge(hello, nonce)
    assert challenge.nonce == nonce
    assert proves(challenge.proof, SECRET, "seed", hello.nonce, nonce, b"the certificate")


def test_a_proof_is_good_for_its_role_and_its_nonces_alone(issuer: CertificateIssuer) -> None:
    hello, nonce = Hello(7, "candidate", nonce=make_nonce()), make_nonce()
    proof = prove(SECRET, "candidate", hello.nonce, nonce, b"the certificate")
    assert issuer.is_proven(proof, "candidate", hello, nonce)
    assert not issuer.is_proven(proof, "launcher", hello, nonce)
    assert not issuer.is_proven(proof, "candidate", hello, make_nonce())


def test_it_certifies_a_key_for_its_lifetime(issuer: CertificateIssuer) -> None:
    key = make_key().public_key()
    made = x509.load_pem_x509_certificate(issuer.certify(7, key))
    made.verify_directly_issued_by(issuer.authority.certificate)
    assert fingerprint(made.public_key()) == fingerprint(key)


def test_it_does_not_show_its_secret(issuer: CertificateIssuer) -> None:
    assert str(SECRET) not in repr(issuer)
