from datetime import timedelta

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from nexar.errors import UsageError
from nexar.security.authority import CLOCK_SKEW, Authority, make_credentials, make_key


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
