"""Who is not who the membership says does not become a link: on QUIC and on TLS, dialing and being dialed."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

import pytest

from nexar.cluster.acceptor import MAX_INCOMING_PER_NODE
from nexar.cluster.handshake import send_control
from nexar.cluster.membership import Member, Membership
from nexar.errors import PeerLost
from nexar.security.authority import Authority, make_key
from nexar.security.certificates import Credentials, fingerprint
from nexar.transport.base import Carrier, ConnectRefused, Expected
from nexar.wire.control import Introduce, Introduced, Ping
from tests.hostile.mesh_scene import (
    CLUSTER,
    HONEST,
    OTHER,
    Listening,
    Party,
    certified,
    eventually,
    opened,
    somebody,
    soon,
    two,
)
from tests.processes.scale import schemes

OURS = Authority.create(CLUSTER)
AT_ONCE = 5.0
"""Seconds. A refusal comes by itself; the deadlines of these dials are far later."""


@dataclass(frozen=True)
class Claim:
    """What somebody shows, and what the honest member's membership says of the place that it wants."""

    shows: Credentials
    place: Member
    others: tuple[Member, ...] = ()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def genuine(liar: Party) -> Claim:
    return Claim(certified(OURS, liar.node.id, liar.node.key), liar.member())


def of_another_member(liar: Party) -> Claim:
    """A member, with its own key and certificate, in the place of somebody else."""
    key = make_key()
    itself = Member(88, "here", fingerprint(key.public_key()), {})
    return Claim(certified(OURS, 88, key), liar.member(node=77, key=make_key()), (itself,))


def expired(liar: Party) -> Claim:
    return Claim(certified(OURS, liar.node.id, liar.node.key, timedelta(minutes=-5)), liar.member())


def of_another_authority(liar: Party) -> Claim:
    return Claim(certified(Authority.create(CLUSTER), liar.node.id, liar.node.key), liar.member())


def of_another_cluster(liar: Party) -> Claim:
    return Claim(certified(Authority.create("theirs"), liar.node.id, liar.node.key), liar.member())


def of_nobody_in_the_membership(liar: Party) -> Claim:
    key = make_key()
    return Claim(certified(OURS, 99, key), liar.member(node=77))


def with_another_key(liar: Party) -> Claim:
    """The authority has certified two keys for one node: only the one that is pinned counts."""
    return Claim(certified(OURS, 77, liar.node.key), liar.member(node=77, key=make_key()))


UNSIGNED = "BadSignature|UnknownIssuer|unable to get local issuer"
LIES: dict[Callable[[Party], Claim], tuple[str, str]] = {
    # what the honest member notes when it is dialed, and what it raises when it dials
    of_another_member: ("claims rank 1 .* gives it rank 2", "not valid for .*000000000000004d"),
    expired: ("expired", "expired"),
    of_another_authority: (UNSIGNED, UNSIGNED),
    of_another_cluster: (UNSIGNED, UNSIGNED),
    of_nobody_in_the_membership: ("0063 is not in the membership of epoch 1", "not valid for .*000000000000004d"),
    with_another_key: ("another key than the membership pins", "pinned"),
}


def stand_opposite(stack: ExitStack, scheme: str, claim: Callable[[Party], Claim]) -> tuple[Party, Party, Claim]:
    """The honest member, and who shows what `claim` says and wants its place."""
    honest = stack.enter_context(opened(scheme, OURS))
    liar = stack.enter_context(opened(scheme, OURS))
    made = claim(liar)
    liar.show(made.shows)
    honest.mesh.adopt(two(honest.member(), made.place, *made.others))
    return honest, liar, made


def no_link(party: Party) -> bool:
    return not any(link.schemes for link in party.mesh.links().values())


@schemes("quic", "tls")
def test_members_who_are_who_they_say_become_a_link(stack: ExitStack, scheme: str) -> None:
    honest, other, _ = stand_opposite(stack, scheme, genuine)
    other.mesh.adopt(two(honest.member(), other.member()))
    assert other.link(HONEST, soon()).schemes == (scheme,)
    eventually(honest.mesh.links, "the link of the one who was dialed")
    assert not honest.refused


@schemes("quic", "tls")
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_who_dials_with_a_wrong_certificate_is_refused(
    stack: ExitStack, scheme: str, lie: Callable[[Party], Claim]
) -> None:
    honest, liar, made = stand_opposite(stack, scheme, lie)
    liar.show(made.shows, credulous=True)
    liar.mesh.adopt(two(honest.member(), liar.member()))
    begin = time.monotonic()
    with pytest.raises(PeerLost):
        liar.link(HONEST, soon())
    assert time.monotonic() - begin < AT_ONCE
    eventually(lambda: honest.refused, "a refusal that is told")
    assert re.search(LIES[lie][0], honest.refused[0]), honest.refused
    assert no_link(honest)
    assert no_link(liar)


@schemes("quic", "tls")
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_who_answers_with_a_wrong_certificate_is_refused(
    stack: ExitStack, scheme: str, lie: Callable[[Party], Claim]
) -> None:
    honest, liar, _ = stand_opposite(stack, scheme, lie)
    liar.mesh.adopt(two(honest.member(), liar.member()))
    begin = time.monotonic()
    with pytest.raises(PeerLost) as raised:
        honest.link(OTHER, soon())
    assert time.monotonic() - begin < AT_ONCE
    assert re.search(LIES[lie][1], raised.value.cause), raised.value.cause
    assert no_link(honest)
    assert no_link(liar)


@schemes("quic", "tls")
def test_who_dials_without_a_certificate_is_refused(stack: ExitStack, scheme: str) -> None:
    honest, liar, _ = stand_opposite(stack, scheme, genuine)
    expected = Expected(honest.node.id, fingerprint(honest.node.key.public_key()), anonymous=True)
    with pytest.raises(ConnectRefused):
        liar.node.dialer.dial({scheme: (honest.address(),)}, expected, soon())
    eventually(lambda: honest.refused, "a refusal that is told")


# -- places -----------------------------------------------------------------------------------------------


def reported_at(epoch: int, rank: int) -> Callable[[Party, Party], Membership]:
    """What somebody believes who thinks that it has this rank at this epoch."""

    def believed(honest: Party, liar: Party) -> Membership:
        members = [honest.member(), somebody()]
        members.insert(rank, liar.member())
        return Membership(CLUSTER, epoch, tuple(members))

    return believed


@schemes("quic", "tls")
@pytest.mark.parametrize(("epoch", "rank"), [(1, 2)], ids=["another rank"])
def test_who_dials_and_claims_another_place_is_declined_and_stays_so(
    stack: ExitStack, scheme: str, epoch: int, rank: int
) -> None:
    honest, liar, _ = stand_opposite(stack, scheme, genuine)
    liar.mesh.adopt(reported_at(epoch, rank)(honest, liar))
    with pytest.raises(PeerLost, match=f"it declined: it claims rank {rank} at epoch {epoch}"):
        liar.link(HONEST, soon())
    assert f"claims rank {rank} at epoch {epoch}" in honest.refused[0]
    assert no_link(honest)


@schemes("quic", "tls")
def test_who_goes_on_after_it_was_declined_becomes_no_link(stack: ExitStack, scheme: str) -> None:
    honest, liar, _ = stand_opposite(stack, scheme, genuine)
    carrier = liar.dial(honest)
    received = Listening(carrier)
    send_control(carrier, Introduce(rank=7, epoch=1))
    eventually(lambda: received.frames, "the answer")
    send_control(carrier, Ping(1))
    eventually(lambda: received.over not in (None, "finished"), "the end of the connection")
    assert no_link(honest)


@schemes("quic", "tls")
def test_who_speaks_before_introducing_itself_becomes_no_link(stack: ExitStack, scheme: str) -> None:
    honest, liar, _ = stand_opposite(stack, scheme, genuine)
    carrier = liar.dial(honest)
    received = Listening(carrier)
    send_control(carrier, Ping(1))
    eventually(lambda: received.over, "the end of the connection")
    assert "before an introduction" in (received.over or "") or scheme == "tls"
    assert no_link(honest)


class Answerer:
    """An acceptor that says one thing to whoever dials, or nothing."""

    def __init__(self, answer: Introduced | Ping | None) -> None:
        self._answer = answer
        self.carriers: list[Carrier] = []
        self.received: list[Listening] = []

    def carrier_accepted(self, carrier: Carrier) -> None:
        self.carriers.append(carrier)
        self.received.append(Listening(carrier))
        if self._answer is not None:
            send_control(carrier, self._answer)

    def candidate_refused(self, address: str, reason: str) -> None:
        raise AssertionError(reason)


@schemes("quic", "tls")
@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (Introduced(rank=0, epoch=1), "it claims rank 0 at epoch 1, the membership gives it rank 1"),
        (Ping(1), "answered an introduction with Ping"),
    ],
    ids=["another rank", "something else"],
)
def test_who_answers_wrongly_is_left(stack: ExitStack, scheme: str, answer: Introduced | Ping, cause: str) -> None:
    honest, liar, _ = stand_opposite(stack, scheme, genuine)
    answerer = Answerer(answer)
    liar.node.listen(answerer)
    begin = time.monotonic()
    with pytest.raises(PeerLost, match=cause):
        honest.link(OTHER, soon())
    assert time.monotonic() - begin < AT_ONCE
    eventually(lambda: answerer.received[0].over, "the end of the connection: the dialer does not keep it")
    assert no_link(honest)


@schemes("quic", "tls")
def test_who_never_answers_costs_no_more_than_the_deadline(stack: ExitStack, scheme: str) -> None:
    honest, liar, _ = stand_opposite(stack, scheme, genuine)
    answerer = Answerer(None)
    liar.node.listen(answerer)
    with pytest.raises(PeerLost, match="did not answer"):
        honest.link(OTHER, time.monotonic() + 0.5)
    eventually(lambda: answerer.received[0].over, "the end of the connection")


TOO_MANY = 4
"""More than a node may have on their way to becoming a link."""


def dial_too_often(liar: Party, honest: Party) -> list[Listening]:
    """As often as it may, and a little more; until the oldest have gone for the newest."""
    silent = [Listening(liar.dial(honest)) for _ in range(MAX_INCOMING_PER_NODE + TOO_MANY)]
    eventually(lambda: sum(each.over is not None for each in silent) == TOO_MANY, "the end of the oldest")
    return silent


@schemes("quic", "tls")
def test_a_member_that_dials_and_says_nothing_holds_some_connections_and_keeps_nobody_out(
    stack: ExitStack, scheme: str
) -> None:
    honest, liar, _ = stand_opposite(stack, scheme, genuine)
    dial_too_often(liar, honest)
    assert honest.refused == ["it has dialed too often without becoming a link"] * TOO_MANY
    liar.mesh.adopt(two(honest.member(), liar.member()))
    assert liar.link(HONEST, soon()).schemes == (scheme,)


@schemes("quic", "tls")
def test_a_member_that_introduces_itself_and_never_goes_on_is_remembered_a_few_times(
    stack: ExitStack, scheme: str
) -> None:
    honest, liar, _ = stand_opposite(stack, scheme, genuine)
    for _ in range(MAX_INCOMING_PER_NODE + TOO_MANY):
        carrier = liar.dial(honest)
        received = Listening(carrier)
        send_control(carrier, Introduce(rank=OTHER, epoch=1))
        eventually(lambda received=received: received.frames, "the answer")  # type: ignore[misc]
    (pair,) = honest.mesh._peers.listed()
    assert len(pair.state.waiting) == MAX_INCOMING_PER_NODE
    assert no_link(honest)


@schemes("quic", "tls")
def test_certified_nodes_that_come_before_the_membership_is_known_are_few(stack: ExitStack, scheme: str) -> None:
    honest = stack.enter_context(opened(scheme, OURS))
    eager = stack.enter_context(opened(scheme, OURS))
    dial_too_often(eager, honest)
    honest.mesh.adopt(two(honest.member(), eager.member()))
    eager.mesh.adopt(two(honest.member(), eager.member()))
    assert eager.link(HONEST, soon()).schemes == (scheme,)
