"""Knocking at seeds that do as they are told."""

import threading
import time
from collections.abc import Callable

import pytest

from nexar.cluster import wait_notice
from nexar.cluster.join_line import LineLost
from nexar.cluster.membership import Member, Membership
from nexar.cluster.recall import Recalled
from nexar.cluster.worker import Joined, Place, Worker
from nexar.errors import FormationTimeout, JoinRefused, OperationTimeout, SeedUnreachable, VersionMismatch
from nexar.security.authority import Authority
from nexar.security.request import make_request
from nexar.transport.base import ConnectRefused
from nexar.types import UNKNOWN_NODE
from nexar.wire.handshake import PROTOCOL_VERSION
from nexar.wire.joining import (
    Apply,
    Committed,
    Current,
    FormationFailed,
    Inquire,
    JoinMessage,
    Progress,
    Ready,
    Refused,
    Renewed,
    Reserve,
    encode_join,
)
from tests.ranks import PATIENCE
from tests.unit.cluster.fake_carrier import FakeCarrier
from tests.unit.cluster.seed_side import INVITATION, AtOnce, FakeNode, Opening, SeedSide, as_node

MEMBERSHIP = Membership("ours", 1, (Member(FakeNode.id, "here", bytes(32), {}, frozenset()),))
COMMITTED = Committed(MEMBERSHIP.encode())
SHORT = 0.2


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("ours")


def join(node: FakeNode, timeout: float = PATIENCE, place: Place = Place()) -> Joined:  # noqa: B008 - it is frozen
    return Worker(as_node(node), INVITATION, timeout=timeout, random=AtOnce()).join(place)


def raising(error: Exception) -> Callable[[], FakeCarrier]:
    def answer() -> FakeCarrier:
        raise error

    return answer


def refused(*, verification: bool = False) -> Callable[[], FakeCarrier]:
    return raising(ConnectRefused("seed:1", "nobody listens", verification=verification))


class Lost(SeedSide):
    """A seed that goes away as soon as it has heard a word."""

    def greeted(self) -> None:
        self.lose()


# ---------------------------------------------------------------- coming in


def test_who_is_let_in_shows_the_certificate_and_believes_the_authority(authority: Authority) -> None:
    seed = Opening(authority, COMMITTED)
    node = FakeNode(lambda: seed)
    joined = join(node, place=Place(rank=2, launcher=5))
    assert joined.membership == MEMBERSHIP
    assert joined.welcome.size == 1
    ((credentials, trust),) = node.certified
    assert (credentials.node, credentials.cluster) == (FakeNode.id, "ours")
    assert trust.authorities == authority.certificate_pem
    application, ready = seed.sent
    assert isinstance(application, Apply)
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
    worker = Worker(as_node(node), INVITATION, timeout=PATIENCE, random=AtOnce())
    request = make_request(node.id, node.key)
    line, welcome = worker.enter("launcher", lambda proof: Reserve(proof, request, "here", 2))
    assert (welcome.first_rank, welcome.group_rank, welcome.size) == (3, 1, 4)
    assert (line.address, line.scheme) == ("seed:1", "tls")
    assert seed.hello is not None
    assert seed.hello.role == "launcher"


# ---------------------------------------------------------------- trying again


@pytest.mark.parametrize(
    "trouble", [refused(), raising(TimeoutError("no answer")), Lost], ids=["refused", "silent", "lost"]
)
def test_a_seed_that_is_not_there_yet_is_knocked_at_again(
    authority: Authority, trouble: Callable[[], FakeCarrier]
) -> None:
    node = FakeNode(trouble, trouble, lambda: Opening(authority, COMMITTED))
    assert join(node).membership == MEMBERSHIP
    assert len(node.dials) == 3


def test_a_seed_that_goes_away_before_the_commit_is_knocked_at_again(authority: Authority) -> None:
    class Leaving(Opening):
        def told(self, message: JoinMessage) -> None:
            super().told(message)
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
        def told(self, message: JoinMessage) -> None:
            super().told(message)
            self.lose()

    node = FakeNode(lambda: Leaving(authority), raising(TimeoutError("no answer")))
    with pytest.raises(SeedUnreachable) as raised:
        join(node, SHORT)
    assert "the line to the seed is gone" in raised.value.cause


def test_an_attempt_that_ran_out_of_time_does_not_hide_why_the_one_before_it_failed() -> None:
    node = FakeNode(refused(), raising(TimeoutError("no answer")))
    with pytest.raises(SeedUnreachable) as raised:
        join(node, SHORT)
    assert "nobody listens" in raised.value.cause


def test_pauses_grow_with_the_attempts_and_never_go_beyond_the_deadline() -> None:
    node = FakeNode(refused())
    worker = Worker(as_node(node), INVITATION, timeout=0.5)
    begin = time.monotonic()
    with pytest.raises(SeedUnreachable):
        worker.join(Place())
    assert 0.5 <= time.monotonic() - begin < PATIENCE / 2
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
            self.say_message(Refused("full"))

    early, late = Refusing(), Opening(authority, Refused("not with this rank"))
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
            self.say(encode_join(Refused("you are too old"), PROTOCOL_VERSION + 3))

    newer = Newer()
    node = FakeNode(lambda: newer)
    with pytest.raises(VersionMismatch) as raised:
        join(node)
    assert (raised.value.ours, raised.value.theirs) == (PROTOCOL_VERSION, PROTOCOL_VERSION + 3)
    assert (len(node.dials), newer.aborted is not None) == (1, True)


def test_a_formation_that_failed_tells_what_the_seed_told(authority: Authority) -> None:
    told = FormationFailed(("node a",), 3, {"10.0.0.1:1": "wrong secret"}, 12.0)
    seed = Opening(authority, told, size=3)
    with pytest.raises(FormationTimeout) as raised:
        join(FakeNode(lambda: seed))
    error = raised.value
    assert (list(error.joined), error.expected, error.timeout) == (["node a"], 3, 12.0)
    assert error.refused == {"10.0.0.1:1": "wrong secret"}
    assert seed.aborted is not None


def test_a_seed_that_lets_us_in_and_falls_silent_is_a_formation_that_failed(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nexar.cluster.worker.GRACE", 0.05)
    seed = Opening(authority, size=3)
    with pytest.raises(FormationTimeout) as raised:
        join(FakeNode(lambda: seed), SHORT)
    assert raised.value.expected == 3
    assert raised.value.timeout == SHORT + 0.05
    assert seed.aborted is not None


# ---------------------------------------------------------------- seeds in disorder


@pytest.mark.parametrize(
    "word", [Committed(b"nonsense"), Renewed(b"x")], ids=["a membership that is none", "something else"]
)
def test_a_seed_that_makes_no_sense_is_tried_again(authority: Authority, word: JoinMessage) -> None:
    first = Opening(authority, word)
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
    threading.Timer(0.05, node.recall.make).start()
    with pytest.raises(Recalled):
        join(node)
    assert seed.aborted is not None


def test_a_node_that_closes_recalls_its_worker_from_a_pause() -> None:
    node = FakeNode(refused())
    worker = Worker(as_node(node), INVITATION, timeout=600)
    threading.Timer(0.05, node.recall.make).start()
    with pytest.raises(Recalled):
        worker.join(Place())


def test_to_be_known_again_takes_one_attempt(authority: Authority) -> None:
    node = FakeNode(refused())
    worker = Worker(as_node(node), INVITATION, timeout=PATIENCE)
    with pytest.raises(ConnectRefused):
        worker.rejoin(Place())
    assert len(node.dials) == 1
    node = FakeNode(lambda: Opening(authority, COMMITTED))
    assert Worker(as_node(node), INVITATION, timeout=PATIENCE).rejoin(Place()).membership == MEMBERSHIP


def test_a_formation_that_fails_before_this_node_is_ready_is_told_all_the_same(authority: Authority) -> None:
    class Closing(Opening):
        def told(self, message: JoinMessage) -> None:
            super().told(message)
            if isinstance(message, Apply):
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
    words = [Current(earlier.encode()), Current(OTHERS.encode()), Committed(LATER.encode())]
    node = FakeNode(lambda: Opening(authority, *words))
    heard: list[Membership] = []
    joined = Worker(as_node(node), INVITATION, timeout=PATIENCE).join(Place(), heard.append)
    assert heard == [earlier, OTHERS]
    assert (joined.membership, joined.again) == (LATER, False)
    assert joined.line.epoch == 4


def test_a_joiner_waits_as_long_as_it_takes_to_be_taken_and_no_longer_than_it_wants(authority: Authority) -> None:
    node = FakeNode(lambda: Opening(authority, Current(OTHERS.encode())))
    worker = Worker(as_node(node), INVITATION, timeout=PATIENCE, join_timeout=SHORT)
    with pytest.raises(OperationTimeout, match="a checkpoint of the members") as late:
        worker.join(Place())
    assert late.value.timeout == SHORT


@pytest.mark.parametrize("waits", [True, False], ids=["and waits", "and is in already"])
def test_a_joiner_whose_seed_went_away_knocks_again(authority: Authority, *, waits: bool) -> None:
    class Fleeting(Opening):
        def told(self, message: JoinMessage) -> None:
            super().told(message)
            if isinstance(message, Ready):
                self.lose()

    gone = Fleeting(authority, Current(OTHERS.encode()))
    back = Opening(authority, *(Current(OTHERS.encode()),) * waits, Committed(LATER.encode()))
    node = FakeNode(lambda: gone, lambda: back)
    joined = Worker(as_node(node), INVITATION, timeout=PATIENCE, random=AtOnce()).join(Place())
    assert (joined.membership, joined.again) == (LATER, not waits)


def test_a_member_that_the_seed_takes_for_somebody_new_tries_again_later(authority: Authority) -> None:
    seed = Opening(authority, Current(OTHERS.encode()))
    node = FakeNode(lambda: seed)
    with pytest.raises(LineLost, match="does not know this node"):
        Worker(as_node(node), INVITATION, timeout=PATIENCE).rejoin(Place(epoch=4))
    (apply,) = [message for message in seed.sent if isinstance(message, Apply)]
    assert apply.epoch == 4


# ---------------------------------------------------------------- what the user is told


class Forming(Opening):
    """A seed whose cluster forms when somebody has asked who is missing."""

    def __init__(self, authority: Authority, progress: Progress) -> None:
        super().__init__(authority, size=2)
        self.progress = progress

    def told(self, message: JoinMessage) -> None:
        super().told(message)
        if isinstance(message, Inquire):
            self.say_message(self.progress)
            self.say_message(COMMITTED)


@pytest.mark.parametrize("reports", [True, False])
def test_who_waits_for_others_asks_who_is_missing_and_the_first_of_a_host_tells(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, reports: bool
) -> None:
    monkeypatch.setattr(wait_notice, "FIRST_NOTICE", 0.01)
    told: list[str] = []
    refused = {"node 7 at 10.0.0.7:1": "it was started as one of 3"}
    progress = Progress(joined=1, expected=2, missing=(1,), refused=refused, reports=reports)
    node = FakeNode(lambda: Forming(authority, progress))
    worker = Worker(
        as_node(node), INVITATION, timeout=PATIENCE, random=AtOnce(), tell=told.append, tells_for_host=False
    )
    worker.join(Place())
    expected = "waiting for 1 of 2 ranks: rank 1 (refused: node 7 at 10.0.0.7:1: it was started as one of 3); trying"
    assert [text[: len(expected)] for text in told] == ([expected] if reports else [])


def test_a_seed_that_does_not_answer_is_told_with_the_reason_and_the_time_that_is_left(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_notice, "FIRST_NOTICE", 0.01)
    told, heard = [], threading.Event()

    def tell(text: str) -> None:
        told.append(text)
        heard.set()

    def nobody() -> FakeCarrier:
        if heard.is_set():
            return Opening(authority, COMMITTED)
        raise ConnectRefused("seed:1", "nobody listens")

    Worker(as_node(FakeNode(nobody)), INVITATION, timeout=PATIENCE, random=AtOnce(), tell=tell).join(Place())
    assert told[0].startswith("no seed answers at seed:1, seed:2: n")
    assert "s more" in told[0]
