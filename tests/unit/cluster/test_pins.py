from typing import cast

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from nexar.cluster.circle import Circle
from nexar.cluster.membership import Attendant, Member, Membership
from nexar.cluster.pins import why_not
from nexar.security.authority import Authority, make_key
from nexar.security.identity import fingerprint
from nexar.transport.base import Carrier, Peer

KEY, OTHER_KEY = make_key(), make_key()
PIN = fingerprint(KEY.public_key())
MEMBER, LAUNCHER, STRANGER = 7, 8, 9
MEMBERSHIP = Membership("ours", 3, (Member(MEMBER, "here", PIN, {}, frozenset()),), (Attendant(LAUNCHER, PIN),))


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("ours")


class From:
    """A carrier that says who is at its other end."""

    def __init__(self, node: int, certificate: bytes | None, scheme: str = "tls", *, verified: bool = True) -> None:
        self.scheme = scheme
        self.peer = Peer(node, certificate, verified, "10.0.0.1:1")


def judge(node: int, certificate: bytes | None, scheme: str = "tls", *, verified: bool = True) -> str | None:
    return why_not(cast(Carrier, From(node, certificate, scheme, verified=verified)), Circle(99, MEMBERSHIP))


def certificate(authority: Authority, node: int = MEMBER, key: object = KEY) -> bytes:
    return authority.issue(node, key.public_key()).public_bytes(Encoding.DER)  # type: ignore[attr-defined]


def test_a_member_with_the_key_that_is_pinned_is_let_in(authority: Authority) -> None:
    assert judge(MEMBER, certificate(authority)) is None


def test_a_genuine_certificate_for_another_key_is_not_enough(authority: Authority) -> None:
    assert "another key" in (judge(MEMBER, certificate(authority, key=OTHER_KEY)) or "")


def test_a_node_that_is_not_in_the_membership_is_named_with_the_epoch(authority: Authority) -> None:
    reason = judge(STRANGER, certificate(authority, STRANGER)) or ""
    assert "0000000000000009 is not in the membership of epoch 3" in reason


def test_a_launcher_is_known_and_has_no_link(authority: Authority) -> None:
    assert "holds no rank" in (judge(LAUNCHER, certificate(authority, LAUNCHER)) or "")


def test_who_has_not_proven_itself_is_refused_whatever_it_says(authority: Authority) -> None:
    assert "not proven" in (judge(MEMBER, certificate(authority), verified=False) or "")


def test_a_certificate_that_cannot_be_read_is_no_certificate() -> None:
    assert "not readable" in (judge(MEMBER, b"nonsense") or "")


@pytest.mark.parametrize(("scheme", "enough"), [("shm", True), ("memory", True), ("tls", False), ("quic", False)])
def test_without_a_certificate_only_what_proves_by_other_means_is_let_in(scheme: str, enough: bool) -> None:
    assert (judge(MEMBER, None, scheme) is None) == enough
