from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from nexar.security.authority import make_key
from nexar.security.request import MAX_REQUEST_BYTES, RequestRefused, make_request, read_request
from nexar.types import format_node

NODE = 0xABC
KEY = make_key()
GOOD = make_request(NODE, KEY)


def request(key: Any, *names: str) -> bytes:
    """A request that says anything one likes."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names or (format_node(NODE),)])
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, algorithm).public_bytes(Encoding.DER)


def refusal(given_request: bytes, node: int = NODE) -> str:
    with pytest.raises(RequestRefused) as refused:
        read_request(given_request, node)
    assert refused.value.reason in str(refused.value)
    return refused.value.reason


def test_a_request_tells_the_key_and_not_its_private_half() -> None:
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
    with suppress(RequestRefused):
        assert read_request(GOOD[:at] + bytes([GOOD[at] ^ change]) + GOOD[at + 1 :], NODE) == KEY.public_key()


@given(st.binary(max_size=400))
def test_any_bytes_are_refused_and_nothing_else_is_raised(junk: bytes) -> None:
    refusal(junk)
