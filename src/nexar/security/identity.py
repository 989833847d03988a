"""Who a certificate says its holder is.

A node's certificate names it once, as the DNS name `<node as 16 hex digits>.<cluster>.nexar`. Its *fingerprint* is the
SHA-256 of its public key (SubjectPublicKeyInfo, DER): it stays when the certificate is renewed, so it is what a
membership pins. Nothing here trusts anything: whether the certificate is genuine was decided by the handshake.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from nexar.errors import UsageError
from nexar.types import NodeId, format_node, parse_node

_SUFFIX: Final = "nexar"
MAX_CLUSTER_CHARACTERS: Final = 40
"""The name also stands in the subject's common name, which X.509 limits to 64 characters."""
UNREADABLE: Final = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""All that reading a stranger's certificate, key or request may raise; half of it is not a ValueError."""
_CLUSTER: Final = re.compile(rf"[a-z0-9](?:[a-z0-9-]{{0,{MAX_CLUSTER_CHARACTERS - 2}}}[a-z0-9])?")


class NotOurs(ValueError):
    """A certificate that no nexar authority would have issued. `reason` says what is wrong with it."""

    def __init__(self, reason: str) -> None:
        """`reason`: a clause that fits behind a colon."""
        super().__init__(f"not a node's certificate: {reason}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Identity:
    """What a certificate says of its holder."""

    node: NodeId
    cluster: str
    fingerprint: bytes


def node_name(node: NodeId, cluster: str) -> str:
    """The DNS name of a node, as it stands in its certificate."""
    return f"{format_node(node)}.{check_cluster(cluster)}.{_SUFFIX}"


def check_cluster(cluster: str) -> str:
    """`cluster` itself if it can be part of a name; UsageError if not."""
    if not _CLUSTER.fullmatch(cluster):
        raise UsageError(
            f"{cluster!r} cannot name a cluster; take 1 to {MAX_CLUSTER_CHARACTERS} of a-z, 0-9 and inner hyphens"
        )
    return cluster


def identify(certificate: bytes) -> Identity:
    """Who the DER-encoded certificate names. Raises NotOurs."""
    loaded = _load(certificate)
    node, cluster = _parse_name(_dns_name(loaded))
    return Identity(node, cluster, fingerprint(_public_key(loaded)))


def fingerprint(public_key: CertificatePublicKeyTypes) -> bytes:
    """SHA-256 of the key's SubjectPublicKeyInfo."""
    return hashlib.sha256(public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()


def certificate_fingerprint(certificate: bytes) -> bytes:
    """Fingerprint of the key in a DER-encoded certificate, whomever it names. Raises NotOurs."""
    return fingerprint(_public_key(_load(certificate)))


def _load(certificate: bytes) -> x509.Certificate:
    try:
        return x509.load_der_x509_certificate(certificate)
    except UNREADABLE as error:
        raise NotOurs(f"it cannot be decoded ({error})") from error


def _public_key(certificate: x509.Certificate) -> CertificatePublicKeyTypes:
    try:
        return certificate.public_key()
    except UNREADABLE as error:
        raise NotOurs(f"its key cannot be decoded ({error})") from error


def _dns_name(certificate: x509.Certificate) -> str:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound as error:
        raise NotOurs("it has no alternative name") from error
    except UNREADABLE as error:
        raise NotOurs(f"its extensions cannot be decoded ({error})") from error
    names = extension.value.get_values_for_type(x509.DNSName)
    if len(names) != 1:
        raise NotOurs(f"it has {len(names)} DNS names instead of one")
    return names[0]


def _parse_name(name: str) -> tuple[NodeId, str]:
    node, _, rest = name.partition(".")
    cluster, _, suffix = rest.partition(".")
    if suffix != _SUFFIX or not _CLUSTER.fullmatch(cluster):
        raise NotOurs(f"it names {name!r}, not <node>.<cluster>.{_SUFFIX}")
    try:
        return parse_node(node), cluster
    except ValueError as error:
        raise NotOurs(f"it names {name!r}: {error}") from error
