"""Dialing seeds that follow a script."""

import os
import signal
import threading
import time
from collections.abc import Callable
from random import Random

import pytest

from nexar.cluster import wait_notice
from nexar.cluster.control_loop import DialCancelled
from nexar.cluster.decisions.failure_detector import longest_extension
from nexar.cluster.join_client import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    JoinClient,
    JoinConnection,
    JoinedCluster,
    NotTheSeed,
    RankRequest,
    RefusedBySeed,
    SeedConnectionLost,
    answer_margin,
    join_refused,
    pause_before,
)
from nexar.cluster.membership import Member, Membership, encode_membership
from nexar.errors import FormationTimeout, JoinRefused, OperationTimeout, SeedUnreachable, VersionMismatch
from nexar.security.authority import Authority
from nexar.security.certificates import make_request
from nexar.security.proof import Role, prove
from nexar.transport.base import ConnectRefused
from nexar.types import UNKNOWN_NODE
from nexar.wire.frame import FrameKind
from nexar.wire.hello import PROTOCOL_VERSION
from nexar.wire.join import (
    Challenge,
    ChildDied,
    Committed,
    Current,
    FormationFailed,
    FormationProgress,
    FormationQuery,
    JoinMessage,
    JoinRefusedMessage,
    JoinRequest,
    Leave,
    Ready,
    Renewed,
    ReserveRanks,
    encode_join,
)
from tests.ranks import EVENT_TIMEOUT
from tests.unit.cluster.fake_carrier import FakeCarrier, as_carrier
from tests.unit.cluster.seed_side import CERTIFICATE, INVITATION, SECRET, AtOnce, FakeNode, Opening, SeedSide, as_node

NODE = 77
RENEWED = Renewed(b"certificate")


def soon() -> float:
    return time.monotonic() + EVENT_TIMEOUT


def over() -> float:
    return time.monotonic() - 1


def open_line(seed: SeedSide) -> JoinConnection:
    return JoinConnection(as_carrier(seed))


def greet(line: JoinConnection, role: Role = "candidate") -> bytes:
    return line.prove_each_other(INVITATION, NODE, role, frozenset({"tls"}), soon())


class Honest(SeedSide):
    def greeted(self) -> None:
        self.challenge()


# ---------------------------------------------------------------- proving


@pytest.mark.parametrize("role", ["candidate", "launcher"])
def test_who_proves_itself_is_answered_with_our_proof(role: Role) -> None:
    seed = Honest()
    proof = greet(open_line(seed), role)
    assert seed.hello is not None
    assert (seed.hello.node, seed.hello.role, seed.hello.capabilities) == (NODE, role, frozenset({"tls"}))
    assert proof == prove(SECRET, role, seed.hello.nonce, seed.nonce, CERTIFICATE)
    assert seed.admitted


@pytest.mark.parametrize(
    "seed",
    [Honest(secret=bytes(32)), Honest(certificate=b"a certificate of somebody in between"), Honest(certificate=None)],
    ids=["another secret", "another certificate", "no certificate"],
)
def test_an_impostor_receives_nothing_that_depends_on_the_secret(seed: Honest) -> None:
    with pytest.raises(NotTheSeed, match="seed:1 cannot prove") as raised:
        greet(open_line(seed))
    assert seed.sent == []
    assert seed.aborted is not None
    assert not seed.admitted
    assert SECRET.hex() not in str(raised.value)


def test_two_hellos_never_have_the_same_nonce() -> None:
    seeds = [Honest(), Honest()]
    for seed in seeds:
        greet(open_line(seed))
    assert seeds[0].hello is not None
    assert seeds[1].hello is not None
    assert seeds[0].hello.nonce != seeds[1].hello.nonce


def test_a_seed_that_answers_a_hello_with_something_else_is_not_understood() -> None:
    seed = SeedSide()
    seed.greeted = lambda: seed.say_message(RENEWED)  # type: ignore[method-assign]
    with pytest.raises(SeedConnectionLost, match="Renewed instead of Challenge"):
        greet(open_line(seed))


# ---------------------------------------------------------------- receiving


def test_messages_wait_until_they_are_taken_in_their_order() -> None:
    seed = SeedSide()
    line = open_line(seed)
    seed.say_message(RENEWED)
    seed.say_message(Leave("so long"))
    assert line.receive(soon()) == RENEWED
    assert line.expect(Leave, soon()) == Leave("so long")


def test_a_refusal_is_raised_with_the_seeds_reason() -> None:
    seed = SeedSide()
    line = open_line(seed)
    seed.say_message(JoinRefusedMessage("this cluster is full"))
    with pytest.raises(RefusedBySeed) as raised:
        line.receive(soon())
    assert (raised.value.reason, raised.value.expelled) == ("this cluster is full", 0)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (JoinRefusedMessage("nobody_left"), ""),
        (JoinRefusedMessage("full", nobody_left=True), "nobody_left"),  # of an older seed
        (JoinRefusedMessage("full", nobody_left=True, code="nobody_left"), "nobody_left"),
        (JoinRefusedMessage("nobody_left", code="not_elastic"), "not_elastic"),
        (JoinRefusedMessage("full", code="not_known_yet"), "not_known_yet"),  # of a newer seed
    ],
)
def test_the_code_of_a_refusal_is_what_the_seed_sent_whatever_its_reason_says(
    message: JoinRefusedMessage, code: str
) -> None:
    seed = SeedSide()
    line = open_line(seed)
    seed.say_message(message)
    with pytest.raises(RefusedBySeed) as raised:
        line.receive(soon())
    error = join_refused(raised.value, "seed:1")
    assert (error.code, error.nobody_left) == (code, code == "nobody_left")


def test_a_seed_that_says_nothing_is_waited_for_until_the_deadline() -> None:
    with pytest.raises(TimeoutError, match="seed:1"):
        open_line(SeedSide()).receive(over())


def test_a_seed_of_another_version_is_named_with_both() -> None:
    seed = SeedSide()
    line = open_line(seed)
    seed.say(encode_join(RENEWED, PROTOCOL_VERSION + 1))
    with pytest.raises(VersionMismatch) as raised:
        line.receive(soon())
    assert (raised.value.ours, raised.value.theirs) == (PROTOCOL_VERSION, PROTOCOL_VERSION + 1)
    assert "seed:1" in str(raised.value)
    assert seed.aborted is not None


def test_nonsense_ends_the_connection_and_stays_its_reason() -> None:
    seed = SeedSide()
    line = open_line(seed)
    seed.say(b"\x00nonsense")
    for _ in range(2):
        with pytest.raises(SeedConnectionLost, match="invalid message from the seed"):
            line.receive(soon())
    assert seed.aborted is not None


def test_nothing_but_control_frames_may_come_here() -> None:
    seed = SeedSide()
    line = open_line(seed)
    seed.say(b"data", FrameKind.EAGER)
    with pytest.raises(SeedConnectionLost, match="kind"):
        line.receive(soon())
    assert seed.aborted is not None


def test_a_seed_that_talks_without_end_is_cut_off() -> None:
    seed = SeedSide()
    line = open_line(seed)
    said = 0
    while seed.aborted is None:
        seed.say_message(RENEWED)
        said += 1
        assert said < 1000
    assert [line.receive(soon()) for _ in range(said - 1)] == [RENEWED] * (said - 1)
    with pytest.raises(SeedConnectionLost, match="too many messages"):
        line.receive(soon())


@pytest.mark.parametrize("how", ["lose", "half_close"])
def test_what_was_said_before_the_end_is_received_before_it(how: str) -> None:
    seed = SeedSide()
    line = open_line(seed)
    seed.say_message(RENEWED)
    getattr(seed, how)()
    assert line.receive(soon()) == RENEWED
    with pytest.raises(SeedConnectionLost):
        line.receive(soon())


# ---------------------------------------------------------------- sending, and the end


def test_what_cannot_be_sent_any_more_is_a_lost_line() -> None:
    seed = Honest()
    line = open_line(seed)
    greet(line)
    seed.lost = True
    with pytest.raises(SeedConnectionLost, match="it is gone"):
        line.send(ChildDied(1, "killed"))


def test_leaving_is_reported_and_polite() -> None:
    seed = Honest()
    line = open_line(seed)
    greet(line)
    line.leave("done")
    assert seed.sent == [Leave("done")]
    assert seed.finished
    assert seed.aborted is None


def test_leaving_a_seed_that_is_gone_troubles_nobody() -> None:
    seed = SeedSide()
    line = open_line(seed)
    seed.lost = True
    line.leave()


def test_an_interrupt_ends_a_receive_in_another_thread() -> None:
    line = open_line(SeedSide())
    threading.Timer(0.02, line.interrupt).start()
    with pytest.raises(SeedConnectionLost, match="stopped listening"):
        line.receive(soon())


def test_ctrl_c_ends_a_receive() -> None:
    line = open_line(SeedSide())
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        line.receive(soon())


def test_a_challenge_is_only_what_a_seed_says() -> None:
    seed = SeedSide()
    line = open_line(seed)
    seed.say_message(Challenge(bytes(32), bytes(32)))
    with pytest.raises(SeedConnectionLost, match="Challenge instead of Renewed"):
        line.expect(Renewed, soon())


MEMBERSHIP = Membership("ours", 1, (Member(FakeNode.id, "here", bytes(32), {}, frozenset()),))
COMMITTED = Committed(encode_membership(MEMBERSHIP))
SHORT = 0.2


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("ours")


def join(node: FakeNode, timeout: float = EVENT_TIMEOUT, place: RankRequest = RankRequest()) -> JoinedCluster:  # noqa: B008 - it is frozen
    return JoinClient(as_node(node), INVITATION, timeout=timeout, random=AtOnce()).join(place)


def raising(error: Exception) -> Callable[[], FakeCarrier]:
    def answer() -> FakeCarrier:
        raise error

    return answer


def refused(*, verification: bool = False) -> Callable[[], FakeCarrier]:
    return raising(ConnectRefused("seed:1", "nobody listens", verification=verification))


class Lost(SeedSide):
    """A seed that goes away as soon as it has received a message."""

    def greeted(self) -> None:
        self.lose()


# ---------------------------------------------------------------- coming in


def test_who_is_let_in_shows_the_certificate_and_believes_the_authority(authority: Authority) -> None:
    seed = Opening(authority, COMMITTED)
    node = FakeNode(lambda: seed)
    joined = join(node, place=RankRequest(rank=2, launcher=5))
    assert joined.membership == MEMBERSHIP
    assert joined.welcome.size == 1
    ((credentials, trust),) = node.certified
    assert (credentials.node, credentials.cluster) == (FakeNode.id, "ours")
    assert trust.authorities == authority.certificate_pem
    application, ready = seed.sent
    assert isinstance(application, JoinRequest)
    assert isinstance(ready, Ready)
    assert (application.rank, application.launcher, application.host) == (2, 5, "here")
    assert application.addresses == {"tls": ("10.0.0.9:9",)}
    assert seed.aborted is None


def test_the_seed_is_dialed_without_a_certificate_and_by_the_key_of_the_ticket(authority: Authority) -> None:
    node = FakeNode(lambda: Opening(authority, COMMITTED))
    join(node)
    ((addresses, expected),) = node.dials
    assert set(addresses) == {"quic", "tls"}
    assert set(addresses.values()) == {INVITATION.addresses}
    assert (expected.node, expected.fingerprint, expected.anonymous) == (UNKNOWN_NODE, INVITATION.fingerprint, True)


def test_a_launcher_asks_for_ranks_and_gets_its_place(authority: Authority) -> None:
    seed = Opening(authority, size=4)
    node = FakeNode(lambda: seed)
    worker = JoinClient(as_node(node), INVITATION, timeout=EVENT_TIMEOUT, random=AtOnce())
    request = make_request(node.id, node.key)
    line, welcome = worker.enter("launcher", lambda proof: ReserveRanks(proof, request, "here", 2))
    assert (welcome.first_rank, welcome.group_rank, welcome.size) == (3, 1, 4)
    assert line.address == "seed:1"
    assert seed.hello is not None
    assert seed.hello.role == "launcher"


# ---------------------------------------------------------------- trying again


@pytest.mark.parametrize(
    "trouble", [refused(), raising(TimeoutError("no answer")), Lost], ids=["refused", "silent", "lost"]
)
def test_a_seed_that_is_not_there_yet_is_dialed_again(authority: Authority, trouble: Callable[[], FakeCarrier]) -> None:
    node = FakeNode(trouble, trouble, lambda: Opening(authority, COMMITTED))
    assert join(node).membership == MEMBERSHIP
    assert len(node.dials) == 3


def test_a_seed_that_goes_away_before_the_commit_is_dialed_again(authority: Authority) -> None:
    class Leaving(Opening):
        def reported(self, message: JoinMessage) -> None:
            super().reported(message)
            self.lose()

    first = Leaving(authority)
    node = FakeNode(lambda: first, lambda: Opening(authority, COMMITTED))
    assert join(node).membership == MEMBERSHIP
    assert first.aborted is not None


def test_a_seed_that_never_comes_is_reported_with_all_that_was_tried() -> None:
    node = FakeNode(refused())
    with pytest.raises(SeedUnreachable) as raised:
        join(node, SHORT)
    assert raised.value.addresses == INVITATION.addresses
    assert raised.value.attempts == len(node.dials) > 1
    assert "nobody listens" in raised.value.cause


def test_a_seed_that_goes_away_for_good_after_it_had_let_us_in_is_reported_as_such(authority: Authority) -> None:
    class Leaving(Opening):
        def reported(self, message: JoinMessage) -> None:
            super().reported(message)
            self.lose()

    node = FakeNode(lambda: Leaving(authority), raising(TimeoutError("no answer")))
    with pytest.raises(SeedUnreachable) as raised:
        join(node, SHORT)
    assert "connection to the seed lost" in raised.value.cause


def test_an_attempt_that_ran_out_of_time_does_not_hide_why_the_one_before_it_failed() -> None:
    node = FakeNode(refused(), raising(TimeoutError("no answer")))
    with pytest.raises(SeedUnreachable) as raised:
        join(node, SHORT)
    assert "nobody listens" in raised.value.cause


def test_pauses_grow_with_the_attempts_and_never_go_beyond_the_deadline() -> None:
    node = FakeNode(refused())
    worker = JoinClient(as_node(node), INVITATION, timeout=0.5)
    begin = time.monotonic()
    with pytest.raises(SeedUnreachable):
        worker.join(RankRequest())
    assert 0.5 <= time.monotonic() - begin < EVENT_TIMEOUT / 2
    assert worker.attempts < 100


def test_even_without_time_there_is_one_attempt(authority: Authority) -> None:
    node = FakeNode(refused())
    with pytest.raises(SeedUnreachable):
        join(node, 0.0)
    assert len(node.dials) == 1


# ---------------------------------------------------------------- what another attempt would not change


def test_a_key_that_is_not_the_tickets_is_final() -> None:
    node = FakeNode(refused(verification=True))
    with pytest.raises(SeedUnreachable, match="take the ticket, or the token") as raised:
        join(node)
    assert str(raised.value).startswith("a seed answered at seed:1, but it does not know this token\n")
    assert len(node.dials) == 1


def test_an_impostor_is_final_and_learns_nothing(authority: Authority) -> None:
    impostor = Opening(authority, COMMITTED)
    impostor.secret = bytes(32)
    node = FakeNode(lambda: impostor)
    with pytest.raises(SeedUnreachable, match=r"cannot prove[^;]*\n.*take the ticket, or the token") as raised:
        join(node)
    assert str(raised.value).startswith("a seed answered at seed:1, but it does not know this token\n")
    assert raised.value.timeout is None, "nobody has waited"
    assert (len(node.dials), impostor.sent, node.certified) == (1, [], [])
    assert impostor.aborted is not None


def test_a_refusal_is_final_before_and_after_the_welcome(authority: Authority) -> None:
    class Refusing(SeedSide):
        def greeted(self) -> None:
            self.say_message(JoinRefusedMessage("full"))

    early, late = Refusing(), Opening(authority, JoinRefusedMessage("not with this rank"))
    for seed, reason in ((early, "full"), (late, "not with this rank")):
        node = FakeNode(lambda seed=seed: seed)  # type: ignore[misc]
        with pytest.raises(JoinRefused) as raised:
            join(node)
        assert raised.value.reason == reason
        assert len(node.dials) == 1
        assert seed.aborted is not None


def test_another_version_is_final_and_both_are_named() -> None:
    class Newer(SeedSide):
        def greeted(self) -> None:
            self.say(encode_join(JoinRefusedMessage("you are too old"), PROTOCOL_VERSION + 3))

    newer = Newer()
    node = FakeNode(lambda: newer)
    with pytest.raises(VersionMismatch) as raised:
        join(node)
    assert (raised.value.ours, raised.value.theirs) == (PROTOCOL_VERSION, PROTOCOL_VERSION + 3)
    assert (len(node.dials), newer.aborted is not None) == (1, True)


def test_a_formation_that_failed_repeats_the_reason_of_the_seed(authority: Authority) -> None:
    reported = FormationFailed(("node a",), 3, {"10.0.0.1:1": "wrong secret"}, 12.0)
    seed = Opening(authority, reported, size=3)
    with pytest.raises(FormationTimeout) as raised:
        join(FakeNode(lambda: seed))
    error = raised.value
    assert (list(error.joined), error.expected, error.timeout) == (["node a"], 3, 12.0)
    assert error.refused == {"10.0.0.1:1": "wrong secret"}
    assert seed.aborted is not None


def test_a_seed_that_lets_us_in_and_falls_silent_is_a_formation_that_failed(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nexar.cluster.join_client.GRACE", 0.05)
    seed = Opening(authority, size=3)
    with pytest.raises(FormationTimeout) as raised:
        join(FakeNode(lambda: seed), SHORT)
    assert raised.value.expected == 3
    assert raised.value.timeout == SHORT + answer_margin(SHORT) == SHORT + 0.05 + longest_extension(SHORT)
    assert seed.aborted is not None


# ---------------------------------------------------------------- seeds in disorder


@pytest.mark.parametrize(
    "sent", [Committed(b"nonsense"), Renewed(b"x")], ids=["a membership that is none", "something else"]
)
def test_a_seed_that_makes_no_sense_is_tried_again(authority: Authority, sent: JoinMessage) -> None:
    first = Opening(authority, sent)
    node = FakeNode(lambda: first, lambda: Opening(authority, COMMITTED))
    assert join(node).membership == MEMBERSHIP
    assert first.aborted is not None


def test_a_certificate_that_is_none_is_no_traceback_of_ours(authority: Authority) -> None:
    class Scribbling(Opening):
        def certify(self, message: object) -> bytes:
            return b"-----BEGIN CERTIFICATE-----\nnonsense"

    with pytest.raises(SeedUnreachable, match="cannot be used"):
        join(FakeNode(lambda: Scribbling(authority, COMMITTED)), SHORT)


# ---------------------------------------------------------------- closing meanwhile, and coming back


@pytest.mark.parametrize("silent", [SeedSide, lambda: Opening(Authority.create("ours"))], ids=["hello", "membership"])
def test_a_node_that_closes_recalls_its_worker_from_a_silent_seed(silent: Callable[[], SeedSide]) -> None:
    seed = silent()
    node = FakeNode(lambda: seed)
    threading.Timer(0.05, node.cancel_token.cancel).start()
    with pytest.raises(DialCancelled):
        join(node)
    assert seed.aborted is not None


def test_a_node_that_closes_recalls_its_worker_from_a_pause() -> None:
    node = FakeNode(refused())
    worker = JoinClient(as_node(node), INVITATION, timeout=600)
    threading.Timer(0.05, node.cancel_token.cancel).start()
    with pytest.raises(DialCancelled):
        worker.join(RankRequest())


def test_to_be_known_again_takes_one_attempt(authority: Authority) -> None:
    node = FakeNode(refused())
    worker = JoinClient(as_node(node), INVITATION, timeout=EVENT_TIMEOUT)
    with pytest.raises(ConnectRefused):
        worker.rejoin(RankRequest())
    assert len(node.dials) == 1
    node = FakeNode(lambda: Opening(authority, COMMITTED))
    assert JoinClient(as_node(node), INVITATION, timeout=EVENT_TIMEOUT).rejoin(RankRequest()).membership == MEMBERSHIP


def test_a_formation_that_fails_before_this_node_is_ready_is_reported_all_the_same(authority: Authority) -> None:
    class Closing(Opening):
        def reported(self, message: JoinMessage) -> None:
            super().reported(message)
            if isinstance(message, JoinRequest):
                self.half_close()
                self.finished, self.lost = False, True  # from now on nothing can be sent

    failed = FormationFailed(("node 1",), 2, {"rank 1": "it ended before the cluster had formed"}, 3.0)
    with pytest.raises(FormationTimeout, match="rank 1: it ended before"):
        join(FakeNode(lambda: Closing(authority, failed)))


# ---------------------------------------------------------------- coming late

LATER = Membership("ours", 4, (*MEMBERSHIP.members, Member(5, "there", bytes(32), {}, frozenset())))
OTHERS = Membership("ours", 3, LATER.members[1:])


def test_a_joiner_learns_whom_it_will_join_until_it_is_in(authority: Authority) -> None:
    earlier = Membership("ours", 2, OTHERS.members)
    messages = [
        Current(encode_membership(earlier)),
        Current(encode_membership(OTHERS)),
        Committed(encode_membership(LATER)),
    ]
    node = FakeNode(lambda: Opening(authority, *messages))
    received: list[Membership] = []
    joined = JoinClient(as_node(node), INVITATION, timeout=EVENT_TIMEOUT).join(RankRequest(), received.append)
    assert received == [earlier, OTHERS]
    assert (joined.membership, joined.again) == (LATER, False)
    assert joined.connection.epoch == 4


def test_a_joiner_waits_as_long_as_it_takes_to_be_taken_and_no_longer_than_it_wants(authority: Authority) -> None:
    node = FakeNode(lambda: Opening(authority, Current(encode_membership(OTHERS))))
    worker = JoinClient(as_node(node), INVITATION, timeout=EVENT_TIMEOUT, join_timeout=SHORT)
    with pytest.raises(OperationTimeout, match="a checkpoint of the members") as late:
        worker.join(RankRequest())
    assert late.value.timeout == SHORT
    assert "raise the limit (NEXAR_JOIN_TIMEOUT_SECS)" in str(late.value)


@pytest.mark.parametrize("waits", [True, False], ids=["and waits", "and is in already"])
def test_a_joiner_whose_seed_went_away_dials_again(authority: Authority, *, waits: bool) -> None:
    class Fleeting(Opening):
        def reported(self, message: JoinMessage) -> None:
            super().reported(message)
            if isinstance(message, Ready):
                self.lose()

    gone = Fleeting(authority, Current(encode_membership(OTHERS)))
    back = Opening(authority, *(Current(encode_membership(OTHERS)),) * waits, Committed(encode_membership(LATER)))
    node = FakeNode(lambda: gone, lambda: back)
    joined = JoinClient(as_node(node), INVITATION, timeout=EVENT_TIMEOUT, random=AtOnce()).join(RankRequest())
    assert (joined.membership, joined.again) == (LATER, not waits)


def test_a_member_that_the_seed_takes_for_somebody_new_tries_again_later(authority: Authority) -> None:
    seed = Opening(authority, Current(encode_membership(OTHERS)))
    node = FakeNode(lambda: seed)
    with pytest.raises(SeedConnectionLost, match="does not know this node"):
        JoinClient(as_node(node), INVITATION, timeout=EVENT_TIMEOUT).rejoin(RankRequest(epoch=4))
    (apply,) = [message for message in seed.sent if isinstance(message, JoinRequest)]
    assert apply.epoch == 4


# ---------------------------------------------------------------- what the user sees


class Forming(Opening):
    """A seed whose cluster forms when somebody has asked who is missing."""

    def __init__(self, authority: Authority, progress: FormationProgress) -> None:
        super().__init__(authority, size=2)
        self.progress = progress

    def reported(self, message: JoinMessage) -> None:
        super().reported(message)
        if isinstance(message, FormationQuery):
            self.say_message(self.progress)
            self.say_message(COMMITTED)


@pytest.mark.parametrize("reports", [True, False])
def test_who_waits_for_others_asks_who_is_missing_and_the_first_of_a_host_prints_it(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, reports: bool
) -> None:
    monkeypatch.setattr(wait_notice, "FIRST_NOTICE", 0.01)
    reported: list[str] = []
    refused = {"node 7 at 10.0.0.7:1": "it was started as one of 3"}
    progress = FormationProgress(joined=1, expected=2, missing=(1,), refused=refused, reports=reports)
    node = FakeNode(lambda: Forming(authority, progress))
    worker = JoinClient(
        as_node(node), INVITATION, timeout=EVENT_TIMEOUT, random=AtOnce(), tell=reported.append, tells_for_host=False
    )
    worker.join(RankRequest())
    expected = "waiting for 1 of 2 ranks: rank 1 (refused: node 7 at 10.0.0.7:1: it was started as one of 3); trying"
    assert [text[: len(expected)] for text in reported] == ([expected] if reports else [])


def test_a_seed_that_does_not_answer_is_reported_with_the_reason_and_the_time_that_is_left(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_notice, "FIRST_NOTICE", 0.01)
    reported, received = [], threading.Event()

    def tell(text: str) -> None:
        reported.append(text)
        received.set()

    def nobody() -> FakeCarrier:
        if received.is_set():
            return Opening(authority, COMMITTED)
        raise ConnectRefused("seed:1", "nobody listens")

    JoinClient(as_node(FakeNode(nobody)), INVITATION, timeout=EVENT_TIMEOUT, random=AtOnce(), tell=tell).join(
        RankRequest()
    )
    assert reported[0].startswith("no seed answers at seed:1, seed:2: n")
    assert "s more" in reported[0]


class Longest(Random):
    """Always draws the upper bound."""

    def uniform(self, a: float, b: float) -> float:
        return b


def test_the_first_attempt_is_made_at_once() -> None:
    assert pause_before(0, Longest()) == 0.0


def test_the_bound_of_a_pause_doubles_up_to_the_longest() -> None:
    assert [pause_before(attempt, Longest()) for attempt in (1, 2, 3)] == [
        FIRST_PAUSE,
        2 * FIRST_PAUSE,
        4 * FIRST_PAUSE,
    ]
    assert pause_before(50, Longest()) == LONGEST_PAUSE


def test_an_hour_of_attempts_is_counted_without_trouble() -> None:
    assert pause_before(5000, Longest()) == LONGEST_PAUSE


def test_pauses_are_anywhere_below_their_bound() -> None:
    random = Random(1)
    pauses = [pause_before(10, random) for _ in range(1000)]
    assert min(pauses) < 0.1 * LONGEST_PAUSE
    assert 0.9 * LONGEST_PAUSE < max(pauses) <= LONGEST_PAUSE
