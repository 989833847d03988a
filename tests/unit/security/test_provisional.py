import ssl

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding

from nexar.security.authority import Authority
from nexar.security.credentials import Trust
from nexar.security.identity import identify
from nexar.security.provisional import provisional_credentials
from nexar.security.tls import client_context, server_context


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
