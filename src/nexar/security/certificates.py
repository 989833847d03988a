"""Credentials, certificate identities and signing requests. The TLS handshake verifies trust, not this module.

A node's certificate has one DNS name, `<node as 16 hex digits>.<cluster>.nexar`. Its *fingerprint* is the SHA-256 of
its public key. A renewal keeps the fingerprint, so memberships pin it.

A signing request is PKCS #10, DER. Its signature proves possession of the key and covers the node id, so no node can
have another node's key certified under its own id.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from nexar.errors import UsageError
from nexar.types import NodeId, format_node, parse_node


@dataclass(frozen=True, slots=True)
class Credentials:
    """Certificates and key, PEM. The key never leaves the process or appears in a repr."""

    node: int
    cluster: str
    certificate_chain: bytes
    private_key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Trust:
    """`authorities` are PEM. `allow_anonymous` accepts clients without a certificate; their carriers are unverified."""

    authorities: bytes
    allow_anonymous: bool = False


_SUFFIX: Final = "nexar"
# The name is also in the subject's common name, which X.509 limits to 64 characters.
MAX_CLUSTER_CHARACTERS: Final = 40
# Everything that reading an untrusted certificate, key or request may raise; half of it is not a ValueError.
UNREADABLE: Final = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
_CLUSTER: Final = re.compile(rf"[a-z0-9](?:[a-z0-9-]{{0,{MAX_CLUSTER_CHARACTERS - 2}}}[a-z0-9])?")


class ForeignCertificate(ValueError):
    """No nexar authority issues this certificate."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not a node's certificate: {reason}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Identity:
    """The holder of a certificate."""

    node: NodeId
    cluster: str
    fingerprint: bytes


def node_name(node: NodeId, cluster: str) -> str:
    """Return the DNS name in a node's certificate."""
    return f"{format_node(node)}.{check_cluster(cluster)}.{_SUFFIX}"


def check_cluster(cluster: str) -> str:
    """Return `cluster`. Raise UsageError if it cannot be part of a DNS name."""
    if not _CLUSTER.fullmatch(cluster):
        raise UsageError(
            f"{cluster!r} cannot name a cluster; take 1 to {MAX_CLUSTER_CHARACTERS} of a-z, 0-9 and inner hyphens"
        )
    return cluster


def identify(certificate: bytes) -> Identity:
    """Return the holder of a DER certificate. Raise ForeignCertificate."""
    loaded = _load(certificate)
    node, cluster = _parse_name(_dns_name(loaded))
    return Identity(node, cluster, fingerprint(_public_key(loaded)))


def fingerprint(public_key: CertificatePublicKeyTypes) -> bytes:
    """SHA-256 of the key's SubjectPublicKeyInfo."""
    return hashlib.sha256(public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()


def certificate_fingerprint(certificate: bytes) -> bytes:
    """Raise ForeignCertificate."""
    return fingerprint(_public_key(_load(certificate)))


def _load(certificate: bytes) -> x509.Certificate:
    try:
        return x509.load_der_x509_certificate(certificate)
    except UNREADABLE as error:
        raise ForeignCertificate(f"it cannot be decoded ({error})") from error


def _public_key(certificate: x509.Certificate) -> CertificatePublicKeyTypes:
    try:
        return certificate.public_key()
    except UNREADABLE as error:
        raise ForeignCertificate(f"its key cannot be decoded ({error})") from error


def _dns_name(certificate: x509.Certificate) -> str:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound as error:
        raise ForeignCertificate("it has no alternative name") from error
    except UNREADABLE as error:
        raise ForeignCertificate(f"its extensions cannot be decoded ({error})") from error
    names = extension.value.get_values_for_type(x509.DNSName)
    if len(names) != 1:
        raise ForeignCertificate(f"it has {len(names)} DNS names instead of one")
    return names[0]


def _parse_name(name: str) -> tuple[NodeId, str]:
    node, _, rest = name.partition(".")
    cluster, _, suffix = rest.partition(".")
    if suffix != _SUFFIX or not _CLUSTER.fullmatch(cluster):
        raise ForeignCertificate(f"it names {name!r}, not <node>.<cluster>.{_SUFFIX}")
    try:
        return parse_node(node), cluster
    except ValueError as error:
        raise ForeignCertificate(f"it names {name!r}: {error}") from error


MAX_REQUEST_BYTES: Final = 4096

RequestedKey: TypeAlias = ec.EllipticCurvePublicKey | Ed25519PublicKey

_CURVES: Final = ("secp256r1", "secp384r1")


class CertificateRequestRefused(ValueError):
    """A signing request is refused."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the request for a certificate is refused: {reason}")
        self.reason = reason


def make_request(node: NodeId, key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a DER signing request of `node`."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, format_node(node))])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return request.public_bytes(Encoding.DER)


def read_request(request: bytes, node: NodeId) -> RequestedKey:
    """Return the key to certify: P-256, P-384 or Ed25519. Raise CertificateRequestRefused."""
    if len(request) > MAX_REQUEST_BYTES:
        raise CertificateRequestRefused(f"it has {len(request)} bytes, more than {MAX_REQUEST_BYTES}")
    try:
        loaded = x509.load_der_x509_csr(request)
        # before the signature: checking the signature of an unusual key could be made expensive
        key = _check_key(loaded)
        _check_signature(loaded)
        _check_node(loaded, node)
    except CertificateRequestRefused:
        raise
    except UNREADABLE as error:
        raise CertificateRequestRefused("it cannot be decoded") from error
    return key


def _check_key(request: x509.CertificateSigningRequest) -> RequestedKey:
    key = request.public_key()
    if isinstance(key, Ed25519PublicKey):
        return key
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _CURVES:
        return key
    raise CertificateRequestRefused("its key is neither on P-256, P-384 nor Ed25519")


def _check_signature(request: x509.CertificateSigningRequest) -> None:
    if not request.is_signature_valid:
        raise CertificateRequestRefused("its signature is wrong, so it does not prove possession of the key")


def _check_node(request: x509.CertificateSigningRequest, node: NodeId) -> None:
    names = [attribute.value for attribute in request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if names != [format_node(node)]:
        raise CertificateRequestRefused(f"it was not made for node {format_node(node)}")
