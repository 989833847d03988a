from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from nexar.errors import UsageError
from nexar.security.authority import Authority, make_key
from nexar.security.identity import (
    MAX_CLUSTER_CHARACTERS,
    NotOurs,
    certificate_fingerprint,
    check_cluster,
    fingerprint,
    identify,
    node_name,
)


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


def test_a_certificate_tells_node_cluster_and_key() -> None:
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
    with pytest.raises(NotOurs) as refusal:
        identify(certificate(name))
    assert repr(name) in refusal.value.reason


def test_a_certificate_must_have_exactly_one_name() -> None:
    with pytest.raises(NotOurs, match="no alternative name"):
        identify(certificate(with_extension=False))
    with pytest.raises(NotOurs, match="2 DNS names"):
        identify(certificate(node_name(1, "c"), node_name(2, "c")))


def test_bytes_that_are_no_certificate_are_not_ours() -> None:
    with pytest.raises(NotOurs, match="cannot be decoded"):
        identify(b"certainly not")
    with pytest.raises(NotOurs, match="cannot be decoded"):
        certificate_fingerprint(b"")


GENUINE = Authority.create("c").issue(1, make_key().public_key()).public_bytes(Encoding.DER)


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_a_changed_certificate_is_read_or_is_not_ours_and_nothing_else_is_raised() -> None:
    for at in range(len(GENUINE)):
        for change in (0x01, 0x02, 0x07, 0x80, 0xFF, 0x20):
            with suppress(NotOurs):
                identify(GENUINE[:at] + bytes([GENUINE[at] ^ change]) + GENUINE[at + 1 :])


def test_a_certificate_of_a_version_that_does_not_exist_is_not_ours() -> None:
    version = GENUINE.index(b"\xa0\x03\x02\x01\x02") + 4
    with pytest.raises(NotOurs, match="cannot be decoded"):
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
