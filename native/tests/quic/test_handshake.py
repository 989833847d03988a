"""Who gets in: mutual TLS, seen from both sides."""

from __future__ import annotations

import time

import certificates
import pytest
from conftest import MakeEndpoint
from harness import EVENT_TIMEOUT, Pair, connect, result
from nexar_native import quic


def refused(endpoint: quic.Endpoint) -> str:
    """The reason of the next refusal, waited for."""
    deadline = time.monotonic() + EVENT_TIMEOUT
    while time.monotonic() < deadline:
        found = endpoint.refusals()
        if found:
            ((host, port), reason) = found[0]
            assert host == "127.0.0.1"
            assert port > 0
            return reason
        endpoint.wait([], 0.01)
    raise AssertionError("no refusal was noted")


def test_both_sides_see_the_other_ones_certificate(pair: Pair) -> None:
    a, b = certificates.node("a"), certificates.node("b")
    assert pair.near.peer_certificate == b.der
    assert pair.far.peer_certificate == a.der
    assert pair.near.local_certificate == a.der
    assert pair.far.local_certificate == b.der
    assert pair.near.verified
    assert pair.far.verified
    assert pair.near.dialed
    assert not pair.far.dialed
    assert pair.near.remote_address == pair.b.address
    assert pair.far.remote_address == pair.a.address


def test_exported_keying_material_is_the_same_on_both_ends_and_nowhere_else(
    pair: Pair, make_endpoint: MakeEndpoint
) -> None:
    other = connect(pair.a, make_endpoint("b"))
    near = pair.near.export_keying_material(b"label", b"context", 32)
    assert len(near) == 32
    assert near == pair.far.export_keying_material(b"label", b"context", 32)
    assert near != pair.near.export_keying_material(b"other", b"context", 32)
    assert near != other.near.export_keying_material(b"label", b"context", 32)
    with pytest.raises(ValueError, match="length"):
        pair.near.export_keying_material(b"label", b"", 0)


def test_connect_is_held_until_the_peer_has_judged_our_certificate(
    make_endpoint: MakeEndpoint,
) -> None:
    unauthenticated = certificates.Authority("strangers").leaf("a")
    b = make_endpoint("b")
    a = make_endpoint(credentials=unauthenticated.credentials)
    with pytest.raises(quic.VerificationError) as caught:
        a.connect(b.address, "b", EVENT_TIMEOUT)
    assert caught.value.by == "peer"
    assert "UnknownIssuer" in refused(b)
    assert b.stats()["refused"] == 1


def test_a_client_without_a_certificate_is_refused(make_endpoint: MakeEndpoint) -> None:
    b = make_endpoint("b")
    with pytest.raises(quic.VerificationError) as caught:
        make_endpoint(None).connect(b.address, "b", EVENT_TIMEOUT)
    assert caught.value.by == "peer"
    assert "no certificates" in refused(b)


def test_a_server_of_a_foreign_authority_is_refused_by_us(make_endpoint: MakeEndpoint) -> None:
    unauthenticated = certificates.Authority("strangers").leaf("b")
    b = make_endpoint(credentials=unauthenticated.credentials)
    with pytest.raises(quic.VerificationError, match="UnknownIssuer") as caught:
        make_endpoint("a").connect(b.address, "b", EVENT_TIMEOUT)
    assert caught.value.by == "us"
    assert "refused our certificate" in refused(b)


def test_a_server_of_another_name_is_refused(make_endpoint: MakeEndpoint) -> None:
    b = make_endpoint("b")
    with pytest.raises(quic.VerificationError, match="not valid for name") as caught:
        make_endpoint("a").connect(b.address, "c", EVENT_TIMEOUT)
    assert caught.value.by == "us"
    assert caught.value.reason in str(caught.value)


@pytest.mark.parametrize("side", ["server", "client"])
def test_an_expired_certificate_is_refused(make_endpoint: MakeEndpoint, side: str) -> None:
    expired = certificates.authority().leaf("b" if side == "server" else "a", expired=True)
    b = make_endpoint("b", credentials=expired.credentials if side == "server" else None)
    a = make_endpoint("a", credentials=expired.credentials if side == "client" else None)
    with pytest.raises(quic.VerificationError, match=r"(?i)expired") as caught:
        a.connect(b.address, "b", EVENT_TIMEOUT)
    assert caught.value.by == ("us" if side == "server" else "peer")
    assert "xpired" in refused(b)


def test_a_pinned_key_is_accepted_whatever_the_name(make_endpoint: MakeEndpoint) -> None:
    leaf = certificates.Authority("nobody knows").leaf("whatever")
    b = make_endpoint(credentials=leaf.credentials)
    pinned = quic.Trust(fingerprints=[leaf.fingerprint])
    pair = connect(make_endpoint("a"), b, "some.other.name", trust=pinned)
    assert pair.near.verified


def test_a_key_that_is_not_pinned_is_refused(make_endpoint: MakeEndpoint) -> None:
    b = make_endpoint("b")
    pinned = quic.Trust(fingerprints=[certificates.node("c").fingerprint])
    with pytest.raises(quic.VerificationError) as caught:
        make_endpoint("a").connect(b.address, "b", EVENT_TIMEOUT, trust=pinned)
    assert caught.value.by == "us"


def test_a_client_is_judged_by_its_pinned_key_too(make_endpoint: MakeEndpoint) -> None:
    only_a = quic.Trust(fingerprints=[certificates.node("a").fingerprint])
    b = make_endpoint("b", trust=only_a)
    assert connect(make_endpoint("a"), b).far.verified
    with pytest.raises(quic.VerificationError) as caught:
        make_endpoint("c").connect(b.address, "b", EVENT_TIMEOUT)
    assert caught.value.by == "peer"


def test_trust_in_nobody_lets_nobody_in(make_endpoint: MakeEndpoint) -> None:
    b = make_endpoint("b", trust=quic.Trust())
    with pytest.raises(quic.VerificationError):
        make_endpoint("a").connect(b.address, "b", EVENT_TIMEOUT)


def test_an_anonymous_client_is_marked_unverified(make_endpoint: MakeEndpoint) -> None:
    trust = quic.Trust(certificates.authority().pem, allow_anonymous=True)
    pair = connect(make_endpoint("a"), make_endpoint("b", trust=trust), anonymous=True)
    assert not pair.far.verified
    assert pair.far.peer_certificate is None
    assert pair.near.verified
    assert pair.near.local_certificate is None


def test_a_presented_certificate_is_verified_even_where_none_is_needed(
    make_endpoint: MakeEndpoint,
) -> None:
    trust = quic.Trust(certificates.authority().pem, allow_anonymous=True)
    b = make_endpoint("b", trust=trust)
    unauthenticated = certificates.Authority("strangers").leaf("a")
    with pytest.raises(quic.VerificationError):
        make_endpoint(credentials=unauthenticated.credentials).connect(b.address, "b", EVENT_TIMEOUT)


def test_without_verification_the_connection_is_marked_unverified(
    make_endpoint: MakeEndpoint,
) -> None:
    unauthenticated = certificates.Authority("strangers").leaf("x")
    b = make_endpoint(credentials=unauthenticated.credentials)
    pair = connect(make_endpoint("a"), b, "b", verify=False)
    assert not pair.near.verified
    assert pair.near.peer_certificate == unauthenticated.der


def test_replaced_credentials_serve_new_connections_only(make_endpoint: MakeEndpoint) -> None:
    other = certificates.Authority("others")
    a, b = make_endpoint("a"), make_endpoint("b")
    old = connect(a, b)
    leaf = other.leaf("b")
    both = quic.Trust(certificates.authority().pem + other.pem)
    b.replace_credentials(leaf.credentials, both)
    new = connect(a, b, trust=both)
    assert new.near.peer_certificate == leaf.der
    assert old.near.peer_certificate == certificates.node("b").der
    here, there = old.stream()
    here.write(b"still")
    buffer = bytearray(5)
    assert result(b, there.post_read(buffer)) == 5


def test_nothing_listening_is_a_timeout_at_the_deadline(make_endpoint: MakeEndpoint) -> None:
    a, gone = make_endpoint("a"), make_endpoint("b")
    address = gone.address
    gone.close()
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        a.connect(address, "b", 0.3)
    assert 0.25 < time.monotonic() - start < 5


def test_nothing_listening_is_a_connect_error_at_the_handshake_timeout(
    make_endpoint: MakeEndpoint,
) -> None:
    a, gone = make_endpoint("a", handshake_timeout=0.3), make_endpoint("b")
    address = gone.address
    gone.close()
    with pytest.raises(quic.ConnectError, match="timed out") as caught:
        a.connect(address, "b")
    assert not isinstance(caught.value, quic.VerificationError)
    assert caught.value.kind == "timed_out"
    with pytest.raises(quic.ConnectError, match="timed out"):
        result(a, a.post_connect(address, "b"))


def test_the_timeout_of_a_dial_rules_and_not_that_of_handshakes(make_endpoint: MakeEndpoint) -> None:
    a, gone = make_endpoint("a", handshake_timeout=0.05), make_endpoint("b")
    address = gone.address
    gone.close()
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        a.connect(address, "b", 0.4)
    assert time.monotonic() - start >= 0.4
    deadline = time.monotonic() + EVENT_TIMEOUT
    while a.stats()["handshakes"] and time.monotonic() < deadline:
        a.wait([], 0.01)
    assert a.stats()["handshakes"] == 0


@pytest.mark.parametrize("dialer_knows", [True, False])
def test_another_authority_of_the_same_name_is_a_failed_verification(
    make_endpoint: MakeEndpoint, dialer_knows: bool
) -> None:
    namesake = certificates.Authority()  # the default name is that of the others
    leaf = namesake.leaf("b" if dialer_knows else "a")
    if dialer_knows:  # the listener is the impostor, and the dialer refuses
        b, a = make_endpoint(credentials=leaf.credentials), make_endpoint("a")
    else:
        b, a = make_endpoint("b"), make_endpoint(credentials=leaf.credentials)
    with pytest.raises(quic.VerificationError) as caught:
        a.connect(b.address, "b", EVENT_TIMEOUT)
    assert caught.value.by == ("us" if dialer_knows else "peer")
    assert caught.value.kind == "verification"


def test_another_protocol_is_refused(make_endpoint: MakeEndpoint) -> None:
    b = make_endpoint("b", alpn=b"other")
    with pytest.raises(quic.ConnectError) as caught:
        make_endpoint("a").connect(b.address, "b", EVENT_TIMEOUT)
    assert not isinstance(caught.value, quic.VerificationError)
    assert caught.value.kind == "failed"


def test_an_endpoint_without_credentials_only_dials(make_endpoint: MakeEndpoint) -> None:
    b = make_endpoint(None)
    with pytest.raises((TimeoutError, quic.ConnectError)):
        make_endpoint("a", handshake_timeout=0.5).connect(b.address, "b", 2)


@pytest.mark.parametrize(
    ("chain", "key"),
    [(b"", None), (b"junk", None), (None, b""), (None, b"junk"), (b"\xff\xfe", None)],
)
def test_unreadable_pem_is_refused(chain: bytes | None, key: bytes | None) -> None:
    leaf = certificates.node("a")
    with pytest.raises(ValueError, match=r"certificate_chain|private_key"):
        quic.Credentials(leaf.pem if chain is None else chain, leaf.key_pem if key is None else key)


def test_a_key_that_does_not_fit_the_certificate_is_refused() -> None:
    with pytest.raises(ValueError, match="private_key"):
        quic.Credentials(certificates.node("a").pem, certificates.node("b").key_pem)


def test_junk_authorities_and_fingerprints_are_refused() -> None:
    with pytest.raises(ValueError, match="authorities"):
        quic.Trust(b"junk")
    with pytest.raises(ValueError, match="fingerprints"):
        quic.Trust(fingerprints=[b"short"])
    with pytest.raises(ValueError, match="certificate_der"):
        quic.spki_fingerprint(b"junk")
