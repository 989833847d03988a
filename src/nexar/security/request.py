"""A node asks for its certificate: it sends its public key, signed with the private one, which stays where it is.

The request is an X.509 signing request (PKCS #10, DER). Its signature shows that the asker holds the key, and the node
id in it that the asker meant this node: nobody gets somebody else's key certified under an id of its own. Nothing else
in it counts; name, usage and lifetime of the certificate are the authority's.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from nexar.security.identity import UNREADABLE
from nexar.types import NodeId, format_node

MAX_REQUEST_BYTES: Final = 4096

RequestedKey: TypeAlias = ec.EllipticCurvePublicKey | Ed25519PublicKey

_CURVES: Final = ("secp256r1", "secp384r1")


class RequestRefused(ValueError):
    """A request that is not certified. `reason` says why."""

    def __init__(self, reason: str) -> None:
        """`reason`: a clause that fits behind a colon."""
        super().__init__(f"the request for a certificate is refused: {reason}")
        self.reason = reason


def make_request(node: NodeId, key: ec.EllipticCurvePrivateKey) -> bytes:
    """A request, DER, that `key`'s public half be certified as the key of `node`."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, format_node(node))])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return request.public_bytes(Encoding.DER)


def read_request(request: bytes, node: NodeId) -> RequestedKey:
    """The public key that `node` wants certified. Raises RequestRefused, whatever the bytes are: for more than
    MAX_REQUEST_BYTES, for a key that is not on P-256, P-384 or Ed25519, for a wrong signature or another node."""
    if len(request) > MAX_REQUEST_BYTES:
        raise RequestRefused(f"it has {len(request)} bytes, more than {MAX_REQUEST_BYTES}")
    try:
        loaded = x509.load_der_x509_csr(request)
        key = _check_key(loaded)  # before the signature: checking one of an odd key could be made costly
        _check_signature(loaded)
        _check_node(loaded, node)
    except RequestRefused:
        raise
    except UNREADABLE as error:
        raise RequestRefused("it cannot be decoded") from error
    return key


def _check_key(request: x509.CertificateSigningRequest) -> RequestedKey:
    key = request.public_key()
    if isinstance(key, Ed25519PublicKey):
        return key
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _CURVES:
        return key
    raise RequestRefused("its key is neither on P-256, P-384 nor Ed25519")


def _check_signature(request: x509.CertificateSigningRequest) -> None:
    if not request.is_signature_valid:
        raise RequestRefused("its signature is wrong, so the key is not shown to be the asker's")


def _check_node(request: x509.CertificateSigningRequest, node: NodeId) -> None:
    names = [attribute.value for attribute in request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if names != [format_node(node)]:
        raise RequestRefused(f"it was not made for node {format_node(node)}")
