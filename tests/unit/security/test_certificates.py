from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from nexar.errors import UsageError
from nexar.security.authority import Authority, make_key
from nexar.security.certificates import (
    MAX_CLUSTER_CHARACTERS,
    MAX_REQUEST_BYTES,
    CertificateRequestRefused,
    ForeignCertificate,
    certificate_fingerprint,
    check_cluster,
    fingerprint,
    identify,
    make_request,
    node_name,
    read_request,
)
from nexar.types import format_node


def certificate(*names: str, with_extension: bool = True) -> bytes:
    """A certificate that says anything one likes."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "somebody")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + timedelta(days=1))
    if with_extension:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), False)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def test_a_certificate_names_node_cluster_and_key() -> None:
    authority, key = Authority.create("tea-party"), make_key()
    issued = authority.issue(0xABC, key.public_key())
    identity = identify(issued.public_bytes(Encoding.DER))
    assert (identity.node, identity.cluster) == (0xABC, "tea-party")
    assert identity.fingerprint == fingerprint(key.public_key())
    assert len(identity.fingerprint) == 32


def test_the_fingerprint_stays_when_the_certificate_is_renewed() -> None:
    authority, key = Authority.create("c"), make_key()
    first, second = (authority.issue(1, key.public_key()).public_bytes(Encoding.DER) for _ in range(2))
    assert first != second
    assert certificate_fingerprint(first) == certificate_fingerprint(second) == fingerprint(key.public_key())


@pytest.mark.parametrize("node", [1, 2**64 - 1])
def test_names_are_sixteen_digits_a_cluster_and_nexar(node: int) -> None:
    assert node_name(node, "c") == f"{node:016x}.c.nexar"
    assert identify(certificate(node_name(node, "c"))).node == node


@pytest.mark.parametrize(
    "name",
    [
        "example.org",
        "1.c.nexar",
        "00000000000000ab.c.example",
        "00000000000000ab.nexar",
        "00000000000000AB.c.nexar",
        "00000000000000ab.c.d.nexar",
        "00000000000000ab..nexar",
        "*.c.nexar",
        "00000000000000zz.c.nexar",
    ],
)
def test_other_names_are_not_ours_and_the_error_shows_them(name: str) -> None:
    with pytest.raises(ForeignCertificate) as refusal:
        identify(certificate(name))
    assert repr(name) in refusal.value.reason


def test_a_certificate_must_have_exactly_one_name() -> None:
    with pytest.raises(ForeignCertificate, match="no alternative name"):
        identify(certificate(with_extension=False))
    with pytest.raises(ForeignCertificate, match="2 DNS names"):
        identify(certificate(node_name(1, "c"), node_name(2, "c")))


def test_bytes_that_are_no_certificate_are_not_ours() -> None:
    with pytest.raises(ForeignCertificate, match="cannot be decoded"):
        identify(b"certainly not")
    with pytest.raises(ForeignCertificate, match="cannot be decoded"):
        certificate_fingerprint(b"")


GENUINE = Authority.create("c").issue(1, make_key().public_key()).public_bytes(Encoding.DER)


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_a_changed_certificate_is_read_or_is_not_ours_and_nothing_else_is_raised() -> None:
    for at in range(len(GENUINE)):
        for change in (0x01, 0x02, 0x07, 0x80, 0xFF, 0x20):
            with suppress(ForeignCertificate):
                identify(GENUINE[:at] + bytes([GENUINE[at] ^ change]) + GENUINE[at + 1 :])


def test_a_certificate_of_a_version_that_does_not_exist_is_not_ours() -> None:
    version = GENUINE.index(b"\xa0\x03\x02\x01\x02") + 4
    with pytest.raises(ForeignCertificate, match="cannot be decoded"):
        identify(GENUINE[:version] + b"\x07" + GENUINE[version + 1 :])


@pytest.mark.parametrize("name", ["", "A", "a.b", "-a", "a-", "a_b", "ä", "a" * (MAX_CLUSTER_CHARACTERS + 1)])
def test_a_cluster_needs_a_name_that_fits_into_a_certificate(name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a cluster"):
        check_cluster(name)
    with pytest.raises(UsageError):
        Authority.create(name)


def test_the_longest_cluster_name_fits() -> None:
    longest = "a" * MAX_CLUSTER_CHARACTERS
    authority = Authority.create(longest)
    assert identify(authority.issue(1, make_key().public_key()).public_bytes(Encoding.DER)).cluster == longest


NODE = 0xABC
KEY = make_key()
GOOD = make_request(NODE, KEY)


def request(key: Any, *names: str) -> bytes:
    """A request that says anything one likes."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names or (format_node(NODE),)])
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, algorithm).public_bytes(Encoding.DER)


def refusal(given_request: bytes, node: int = NODE) -> str:
    with pytest.raises(CertificateRequestRefused) as refused:
        read_request(given_request, node)
    assert refused.value.reason in str(refused.value)
    return refused.value.reason


def test_a_request_has_the_key_and_not_its_private_half() -> None:
    key = make_key()
    made = make_request(NODE, key)
    assert read_request(made, NODE) == key.public_key()
    assert key.private_numbers().private_value.to_bytes(32, "big") not in made
    assert key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) in made


@pytest.mark.parametrize(
    "make",
    [
        lambda: ec.generate_private_key(ec.SECP256R1()),
        lambda: ec.generate_private_key(ec.SECP384R1()),
        ed25519.Ed25519PrivateKey.generate,
    ],
    ids=["P-256", "P-384", "Ed25519"],
)
def test_strong_keys_are_accepted(make: Callable[[], Any]) -> None:
    key = make()
    assert read_request(request(key), NODE) == key.public_key()


@pytest.mark.parametrize(
    "make",
    [
        lambda: rsa.generate_private_key(65537, 2048),
        lambda: ec.generate_private_key(ec.SECP521R1()),
        lambda: ec.generate_private_key(ec.SECP256K1()),
    ],
    ids=["RSA", "P-521", "secp256k1"],
)
def test_other_keys_are_refused(make: Callable[[], Any]) -> None:
    assert "its key is neither" in refusal(request(make()))


def test_somebody_elses_key_is_refused() -> None:
    """The key of one request in another: the signature does not fit any more."""
    mine, theirs = make_key(), make_key()
    spliced = _replace_key(make_request(NODE, mine), mine, theirs)
    assert "signature is wrong" in refusal(spliced)


def _replace_key(made: bytes, old: ec.EllipticCurvePrivateKey, new: ec.EllipticCurvePrivateKey) -> bytes:
    one, other = (key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) for key in (old, new))
    assert one in made
    return made.replace(one, other)


@pytest.mark.parametrize("names", [("somebody",), ("0000000000000abd",), (format_node(NODE),) * 2])
def test_a_request_made_for_another_node_is_refused(names: tuple[str, ...]) -> None:
    assert refusal(request(make_key(), *names)) == "it was not made for node 0000000000000abc"


def test_a_request_is_for_one_node() -> None:
    assert "not made for node 0000000000000001" in refusal(GOOD, node=1)


def test_a_large_request_is_refused_unread() -> None:
    assert refusal(bytes(MAX_REQUEST_BYTES + 1)) == "it has 4097 bytes, more than 4096"


@pytest.mark.parametrize("junk", [b"", b"x", b"\x30\x80", GOOD[:-1], GOOD + b"\0", bytes(MAX_REQUEST_BYTES)])
def test_what_is_no_request_cannot_be_decoded(junk: bytes) -> None:
    assert refusal(junk) == "it cannot be decoded"


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_no_change_of_a_request_brings_another_key_in(at: int, change: int) -> None:
    """A few changes leave its meaning as it was: how many bits of the signature are padding, say."""
    with suppress(CertificateRequestRefused):
        assert read_request(GOOD[:at] + bytes([GOOD[at] ^ change]) + GOOD[at + 1 :], NODE) == KEY.public_key()


@given(st.binary(max_size=400))
def test_any_bytes_are_refused_and_nothing_else_is_raised(junk: bytes) -> None:
    refusal(junk)
