"""The cluster's certificate authority: a key, and the certificates it signs.

An authority serves one cluster. It certifies public keys and never sees a private one: the node makes its key, the
authority answers with a certificate. Validity begins a little in the past, because the clocks of two hosts differ, and
never ends after the authority's own, because nobody would believe the rest of it.

Exported, an authority is its private key and its certificate, both PEM; the cluster's name stands in the certificate.

What a node shows before the seed has certified it.

A node listens before it joins, because it must tell the seed where; and nobody listens without a certificate. This one
is signed by an authority that is forgotten as soon as it has signed, so nobody can ever believe it. A node replaces it
by the real one, on the same endpoint, when the seed has answered.

When a certificate is renewed. Pure: the moment and the chance come in.

At two thirds of its life at the latest, so that a seed that is away for a while is no harm; and, so that the nodes of a
cluster that formed together do not all come at once, each a little earlier by a number that it drew.
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
    """A node's private key. It stays in the process that made it."""
    return ec.generate_private_key(ec.SECP256R1())


def make_credentials(
    node: NodeId, cluster: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
) -> Credentials:
    """What a node shows: its own key with the certificate the authority gave for it."""
    return Credentials(
        node=node,
        cluster=check_cluster(cluster),
        certificate_chain=certificate.public_bytes(Encoding.PEM),
        private_key=_key_pem(key),
    )


class Authority:
    """Signs the certificates of one cluster."""

    def __init__(self, cluster: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        """From parts that exist already; `create` makes new ones."""
        self.cluster = check_cluster(cluster)
        self.certificate = certificate
        self._key = key

    @classmethod
    def create(cls, cluster: str) -> Authority:
        """A new authority with a key of its own."""
        key = ec.generate_private_key(ec.SECP256R1())
        return cls(cluster, key, _self_signed(check_cluster(cluster), key))

    @classmethod
    def load(cls, exported: bytes) -> Authority:
        """The authority that `export` wrote. UsageError, showing none of it, for anything else."""
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
        """All of it, the private key too: whoever reads this can admit nodes. For `storage`, never for the wire."""
        return _key_pem(self._key) + self.certificate_pem

    @property
    def certificate_pem(self) -> bytes:
        """What others must trust to believe this authority."""
        return self.certificate.public_bytes(Encoding.PEM)

    def issue(
        self, node: NodeId, public_key: CertificatePublicKeyTypes, lifetime: timedelta = CERTIFICATE_LIFETIME
    ) -> x509.Certificate:
        """A certificate that `public_key` is the key of `node`, for both ends of a connection. It ends with the
        authority at the latest; UsageError when that has ended already."""
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
        """Credentials for a node of this very process: makes the key and certifies it in one step."""
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
    """ValueError unless it is an authority's and names one cluster."""
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
    """Credentials that are in good form and believed by nobody. The key is for nothing else: for the certificate it
    asks for, a node makes another."""
    return Authority.create(_NO_CLUSTER).admit(node)


_LATEST: Final = 2 / 3
_EARLIEST: Final = 1 / 2
_LONGEST_PAUSE: Final = timedelta(minutes=1)


def read_validity(certificate: bytes) -> tuple[datetime, datetime]:
    """From when and until when a certificate (PEM; of a chain, the first) is valid, in UTC. Raises NotOurs."""
    try:
        loaded = x509.load_pem_x509_certificate(certificate)
        return loaded.not_valid_before_utc, loaded.not_valid_after_utc
    except UNREADABLE as error:
        raise ForeignCertificate(f"it cannot be decoded ({error})") from error


def renew_at(not_before: datetime, not_after: datetime, now: datetime, spread: float) -> datetime:
    """When to ask for the next certificate; `spread` is a number from 0 (latest) to 1 (earliest), drawn once per node.

    Never in the past, and never at once: a twentieth of the life passes first, a minute at most. So even where the
    clocks of node and seed disagree by more than a whole life, renewing does not become a busy loop. A certificate that
    expired while nobody looked is renewed after that pause too. UsageError for a spread outside 0..1.
    """
    if not 0.0 <= spread <= 1.0:
        raise UsageError(f"a spread of {spread} cannot be; draw it from 0 to 1")
    issued = not_before + CLOCK_SKEW  # the authority dates its certificates back by that much
    life = max(not_after - issued, timedelta(0))
    due = issued + life * (_LATEST - spread * (_LATEST - _EARLIEST))
    return max(due, now + min(life / 20, _LONGEST_PAUSE))
