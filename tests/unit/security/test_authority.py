import ssl
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import given
from hypothesis import strategies as st

from nexar.errors import UsageError
from nexar.security.authority import (
    CLOCK_SKEW,
    Authority,
    make_credentials,
    make_key,
    provisional_credentials,
    read_validity,
    renew_at,
)
from nexar.security.certificates import (
    ForeignCertificate,
    Identity,
    Trust,
    fingerprint,
    identify,
    make_request,
    read_request,
)
from nexar.security.tls import client_context, server_context


def test_an_issued_certificate_is_signed_by_the_authority_and_valid_for_its_lifetime() -> None:
    authority = Authority.create("c")
    issued = authority.issue(7, make_key().public_key(), timedelta(hours=1))
    issued.verify_directly_issued_by(authority.certificate)
    assert issued.not_valid_after_utc - issued.not_valid_before_utc == timedelta(hours=1) + CLOCK_SKEW


def test_an_issued_certificate_serves_both_ends_and_signs_nothing() -> None:
    issued = Authority.create("c").issue(7, make_key().public_key())
    usage = issued.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usage) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    constraints = issued.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert not constraints.value.ca


def test_common_name_and_dns_name_are_the_same() -> None:
    issued = Authority.create("c").issue(7, make_key().public_key())
    names = issued.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["0000000000000007.c.nexar"]
    assert issued.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == "0000000000000007.c.nexar"


def test_two_authorities_of_one_name_do_not_believe_each_other() -> None:
    one, other = Authority.create("c"), Authority.create("c")
    issued = one.issue(7, make_key().public_key())
    with pytest.raises(InvalidSignature):
        issued.verify_directly_issued_by(other.certificate)


def test_the_authority_may_issue_but_not_appoint() -> None:
    constraints = Authority.create("c").certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (constraints.ca, constraints.path_length) == (True, 0)


def test_credentials_hold_the_nodes_own_key_and_do_not_show_it() -> None:
    authority, key = Authority.create("c"), make_key()
    made = make_credentials(7, "c", key, authority.issue(7, key.public_key()))
    loaded = load_pem_private_key(made.private_key, None)
    assert isinstance(loaded, ec.EllipticCurvePrivateKey)
    assert loaded.private_numbers() == key.private_numbers()
    assert "PRIVATE" not in repr(made)


def test_a_node_of_this_process_is_admitted_in_one_step() -> None:
    authority = Authority.create("c")
    made = authority.admit(9)
    issued = x509.load_pem_x509_certificate(made.certificate_chain)
    issued.verify_directly_issued_by(authority.certificate)
    assert (made.node, made.cluster) == (9, "c")
    assert authority.admit(9).private_key != made.private_key


def test_credentials_for_a_cluster_that_cannot_be_named_are_refused() -> None:
    key = make_key()
    issued = Authority.create("c").issue(1, key.public_key())
    with pytest.raises(UsageError):
        make_credentials(1, "Not A Name", key, issued)


def test_what_a_node_asks_for_is_certified_and_lasts_as_long_as_configured() -> None:
    authority, key = Authority.create("c"), make_key()
    issued = authority.issue(7, read_request(make_request(7, key), 7), timedelta(minutes=5))
    issued.verify_directly_issued_by(authority.certificate)
    assert identify(issued.public_bytes(Encoding.DER)) == Identity(7, "c", fingerprint(key.public_key()))
    assert issued.not_valid_after_utc - issued.not_valid_before_utc == timedelta(minutes=5) + CLOCK_SKEW


def test_a_key_of_another_kind_is_certified_too() -> None:
    key = Ed25519PrivateKey.generate().public_key()
    assert Authority.create("c").issue(7, key).public_key() == key


def test_no_certificate_outlives_the_authority() -> None:
    authority = Authority.create("c")
    issued = authority.issue(7, make_key().public_key(), timedelta.max)
    assert issued.not_valid_after_utc <= authority.certificate.not_valid_after_utc


def test_an_authority_that_expired_signs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexar.security.authority.AUTHORITY_LIFETIME", timedelta(seconds=-60))
    with pytest.raises(UsageError, match=r"authority of cluster 'c' expired at .* UTC; form anew"):
        Authority.create("c").admit(7)


def test_an_authority_goes_on_where_its_export_is_loaded() -> None:
    authority = Authority.create("tea-party")
    again = Authority.load(authority.export())
    assert (again.cluster, again.certificate) == ("tea-party", authority.certificate)
    again.issue(7, make_key().public_key()).verify_directly_issued_by(authority.certificate)
    assert again.export() == authority.export()


def _key_of(authority: Authority) -> bytes:
    return authority.export().removesuffix(authority.certificate_pem)


def test_what_is_not_a_whole_authority_is_refused_and_not_shown() -> None:
    authority, other = Authority.create("c"), Authority.create("c")
    member = authority.admit(7)
    for damaged in (
        b"",
        b"junk",
        authority.certificate_pem,
        _key_of(authority),
        authority.export()[:-40],
        _key_of(authority) + other.certificate_pem,
        member.private_key + member.certificate_chain,
        Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        + authority.certificate_pem,
    ):
        with pytest.raises(UsageError, match="stored authority") as refusal:
            Authority.load(damaged)
        assert "BEGIN" not in str(refusal.value)
        assert refusal.value.__suppress_context__ or refusal.value.__context__ is None


@pytest.mark.parametrize(("ca", "name"), [(False, "c.nexar"), (True, "c.example"), (None, "c.nexar")])
def test_a_certificate_of_somebody_elses_authority_is_refused(ca: bool | None, name: str) -> None:
    key, now = make_key(), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + timedelta(days=1))
    if ca is not None:
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    certificate = builder.sign(key, SHA256()).public_bytes(Encoding.PEM)
    with pytest.raises(UsageError, match="stored authority"):
        Authority.load(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate)


def test_provisional_credentials_name_the_node_and_can_be_shown() -> None:
    made = provisional_credentials(7)
    shown = x509.load_pem_x509_certificate(made.certificate_chain)
    assert identify(shown.public_bytes(Encoding.DER)).node == made.node == 7
    server_context(made, Trust(b""))


def test_nobody_believes_them_not_even_who_has_some_of_its_own() -> None:
    one, other = (x509.load_pem_x509_certificate(provisional_credentials(7).certificate_chain) for _ in range(2))
    for issuer in (one, other, Authority.create("provisional").certificate):
        with pytest.raises((InvalidSignature, ValueError)):
            one.verify_directly_issued_by(issuer)


def test_a_dial_that_verifies_refuses_them() -> None:
    trust = Trust(Authority.create("c").certificate_pem)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context(None, trust).wrap_bio(down, up, False, "0000000000000007.provisional.nexar")
    server = server_context(provisional_credentials(7), Trust(b"", allow_anonymous=True)).wrap_bio(up, down, True)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    with pytest.raises(ssl.SSLWantReadError):
        server.do_handshake()
    with pytest.raises(ssl.SSLCertVerificationError):
        client.do_handshake()


def test_the_key_is_new_each_time_and_does_not_show() -> None:
    one, other = provisional_credentials(7), provisional_credentials(7)
    assert one.private_key != other.private_key
    assert "PRIVATE" not in repr(one)


ISSUED = datetime(2030, 1, 1, tzinfo=UTC)
NOT_BEFORE = ISSUED - CLOCK_SKEW

lives = st.floats(1, 1e9).map(lambda seconds: timedelta(seconds=seconds))
shares = st.floats(0, 1)


def test_the_validity_of_a_certificate_is_what_the_authority_gave() -> None:
    chain = Authority.create("c").admit(1).certificate_chain
    not_before, not_after = read_validity(chain)
    assert not_after - not_before == timedelta(days=365) + CLOCK_SKEW
    assert not_before.tzinfo is UTC
    assert not_before < datetime.now(UTC) < not_after


@pytest.mark.parametrize("junk", [b"", b"junk", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_what_is_no_certificate_has_no_validity(junk: bytes) -> None:
    with pytest.raises(ForeignCertificate):
        read_validity(junk)


def test_a_certificate_is_renewed_at_two_thirds_of_its_life() -> None:
    assert renew_at(NOT_BEFORE, ISSUED + timedelta(hours=3), ISSUED, 0.0) == ISSUED + timedelta(hours=2)


def test_the_spread_brings_it_forward_to_one_half_at_most() -> None:
    assert renew_at(NOT_BEFORE, ISSUED + timedelta(hours=3), ISSUED, 1.0) == ISSUED + timedelta(hours=1.5)


def test_a_life_shorter_than_the_clocks_may_differ_is_still_used() -> None:
    """Counted from the date that the authority set back, it would be due before it was issued."""
    assert renew_at(NOT_BEFORE, ISSUED + timedelta(seconds=60), ISSUED, 0.0) == ISSUED + timedelta(seconds=40)


@given(lives, shares, shares)
def test_renewal_comes_before_the_end_and_leaves_a_third_for_trying_again(
    life: timedelta, age: float, spread: float
) -> None:
    now = ISSUED + life * age
    moment = renew_at(NOT_BEFORE, ISSUED + life, now, spread)
    assert now < moment <= max(now + life / 20, ISSUED + life * 0.67)


@given(lives, st.floats(-100, 100), shares)
def test_whatever_the_clocks_say_renewing_is_no_busy_loop(life: timedelta, skew: float, spread: float) -> None:
    now = ISSUED + min(life, timedelta(days=365)) * skew
    assert renew_at(NOT_BEFORE, ISSUED + life, now, spread) - now >= min(life / 20, timedelta(minutes=1))


def test_an_expired_certificate_is_renewed_within_a_minute() -> None:
    late = ISSUED + timedelta(days=500)
    assert renew_at(NOT_BEFORE, ISSUED + timedelta(days=365), late, 0.5) == late + timedelta(minutes=1)


@pytest.mark.parametrize("spread", [-0.1, 1.1, float("nan")])
def test_a_spread_is_a_share(spread: float) -> None:
    with pytest.raises(UsageError, match="0 to 1"):
        renew_at(NOT_BEFORE, ISSUED, ISSUED, spread)
