from datetime import timedelta

import pytest
from cryptography import x509

from nexar.cluster.notary import Notary
from nexar.security.authority import Authority, make_key
from nexar.security.identity import fingerprint
from nexar.security.proof import make_nonce, prove, proves
from nexar.wire.handshake import Hello

SECRET = bytes(range(32))


@pytest.fixture
def notary() -> Notary:
    return Notary(SECRET, Authority.create("c"), b"the certificate", timedelta(hours=1))


def test_its_challenge_proves_that_it_knows_the_secret_on_this_connection(notary: Notary) -> None:
    hello, nonce = Hello(7, "candidate", nonce=make_nonce()), make_nonce()
    challenge = notary.challenge(hello, nonce)
    assert challenge.nonce == nonce
    assert proves(challenge.proof, SECRET, "seed", hello.nonce, nonce, b"the certificate")


def test_a_proof_is_good_for_its_role_and_its_nonces_alone(notary: Notary) -> None:
    hello, nonce = Hello(7, "candidate", nonce=make_nonce()), make_nonce()
    proof = prove(SECRET, "candidate", hello.nonce, nonce, b"the certificate")
    assert notary.is_proven(proof, "candidate", hello, nonce)
    assert not notary.is_proven(proof, "launcher", hello, nonce)
    assert not notary.is_proven(proof, "candidate", hello, make_nonce())


def test_it_certifies_a_key_for_its_lifetime(notary: Notary) -> None:
    key = make_key().public_key()
    made = x509.load_pem_x509_certificate(notary.certify(7, key))
    made.verify_directly_issued_by(notary.authority.certificate)
    assert fingerprint(made.public_key()) == fingerprint(key)


def test_it_does_not_show_its_secret(notary: Notary) -> None:
    assert str(SECRET) not in repr(notary)
