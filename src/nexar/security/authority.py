"""The certificate authority of one cluster, provisional credentials, and renewal times.

The authority never sees a node's private key. Validity begins in the past, because clocks differ, and never exceeds the
authority's own.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from nexar.errors import UsageError
from nexar.security.certificates import (
    UNREADABLE,
    Credentials,
    ForeignCertificate,
    check_cluster,
    fingerprint,
    node_name,
)
from nexar.types import NodeId

CLOCK_SKEW: Final = timedelta(minutes=10)
AUTHORITY_LIFETIME: Final = timedelta(days=3650)
CERTIFICATE_LIFETIME: Final = timedelta(days=365)


def make_key() -> ec.EllipticCurvePrivateKey:
    """Return a new private key, which stays in this process."""
    return ec.generate_private_key(ec.SECP256R1())


def make_credentials(
    node: NodeId, cluster: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
) -> Credentials:
    """Return a key with its certificate, as PEM."""
    return Credentials(
        node=node,
        cluster=check_cluster(cluster),
        certificate_chain=certificate.public_bytes(Encoding.PEM),
        private_key=_key_pem(key),
    )


class Authority:
    """Signs the certificates of one cluster."""

    def __init__(self, cluster: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self.cluster = check_cluster(cluster)
        self.certificate = certificate
        self._key = key

    @classmethod
    def create(cls, cluster: str) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        return cls(cluster, key, _self_signed(check_cluster(cluster), key))

    @classmethod
    def load(cls, exported: bytes) -> Authority:
        """Inverse of `export`. Raise UsageError, quoting nothing."""
        try:
            key, certificate = load_pem_private_key(exported, None), x509.load_pem_x509_certificate(exported)
            certificate.verify_directly_issued_by(certificate)
            cluster = _cluster_of(certificate)
        except (*UNREADABLE, InvalidSignature, x509.ExtensionNotFound):
            raise UsageError("the stored authority cannot be read: it is damaged, or not one of nexar's") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or _differ(key, certificate):
            raise UsageError("the stored authority cannot be used: its key does not belong to its certificate")
        return cls(cluster, key, certificate)

    def export(self) -> bytes:
        """Return PEM with the private key, which lets its reader admit nodes. Never send it."""
        return _key_pem(self._key) + self.certificate_pem

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    def issue(
        self, node: NodeId, public_key: CertificatePublicKeyTypes, lifetime: timedelta = CERTIFICATE_LIFETIME
    ) -> x509.Certificate:
        """Certify a node's key for both ends of a connection, no longer than the authority is valid. Raise UsageError
        if the authority has expired.
        """
        lifetime = min(lifetime, self._time_left())
        name = node_name(node, self.cluster)
        unsigned = (
            _begin(name, self.certificate.subject, public_key, lifetime)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(_BOTH_ENDS, critical=False)
            .add_extension(self._issuer_key(), critical=False)
        )
        return unsigned.sign(self._key, hashes.SHA256())

    def admit(self, node: NodeId) -> Credentials:
        key = make_key()
        return make_credentials(node, self.cluster, key, self.issue(node, key.public_key()))

    def _time_left(self) -> timedelta:
        end, now = self.certificate.not_valid_after_utc, datetime.now(UTC)
        if end <= now:
            raise UsageError(
                f"the authority of cluster {self.cluster!r} expired at {end:%Y-%m-%d %H:%M} UTC; form anew"
            )
        return end - now

    def _issuer_key(self) -> x509.AuthorityKeyIdentifier:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())


_BOTH_ENDS: Final = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])


_SUFFIX: Final = ".nexar"


def _cluster_of(certificate: x509.Certificate) -> str:
    # Raises ValueError unless it is an authority's certificate that names one cluster.
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if not constraints.ca or not isinstance(name.value, str) or not name.value.endswith(_SUFFIX):
        raise ValueError("not the certificate of an authority")
    return name.value.removesuffix(_SUFFIX)


def _differ(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> bool:
    return fingerprint(key.public_key()) != fingerprint(certificate.public_key())


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _self_signed(cluster: str, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = cluster + _SUFFIX
    unsigned = (
        _begin(name, _subject(name), key.public_key(), AUTHORITY_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    return unsigned.sign(key, hashes.SHA256())


def _begin(
    name: str, issuer: x509.Name, public_key: CertificatePublicKeyTypes, lifetime: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


_NO_CLUSTER: Final = "provisional"


def provisional_credentials(node: NodeId) -> Credentials:
    """Return untrusted credentials, for listening before joining. Their authority is discarded. The node replaces them
    on the same endpoint, with another key.
    """
    return Authority.create(_NO_CLUSTER).admit(node)


_LATEST: Final = 2 / 3
_EARLIEST: Final = 1 / 2
_LONGEST_PAUSE: Final = timedelta(minutes=1)


def read_validity(certificate: bytes) -> tuple[datetime, datetime]:
    """Return start and end (UTC) of the first PEM certificate. Raise ForeignCertificate."""
    try:
        loaded = x509.load_pem_x509_certificate(certificate)
        return loaded.not_valid_before_utc, loaded.not_valid_after_utc
    except UNREADABLE as error:
        raise ForeignCertificate(f"it cannot be decoded ({error})") from error


def renew_at(not_before: datetime, not_after: datetime, now: datetime, spread: float) -> datetime:
    """Return when to request the next certificate. `spread`, 0 (latest) to 1 (earliest), is drawn once per node. Raise
    UsageError outside that range.
    """
    if not 0.0 <= spread <= 1.0:
        raise UsageError(f"the spread {spread} is outside 0 to 1")
    issued = not_before + CLOCK_SKEW  # the authority backdates its certificates by that much
    life = max(not_after - issued, timedelta(0))
    # At two thirds of its life at the latest, so that an absent seed does no harm; spread, so that nodes that joined
    # together do not renew together.
    due = issued + life * (_LATEST - spread * (_LATEST - _EARLIEST))
    # Never at once: otherwise renewal would be a busy loop where the clocks of node and seed disagree by more than a
    # life. An expired certificate is renewed after the same pause.
    return max(due, now + min(life / 20, _LONGEST_PAUSE))
