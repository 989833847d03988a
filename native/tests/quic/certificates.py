"""Certificates for the tests: authorities and the leaves they sign, made on the spot."""

from __future__ import annotations

import datetime as dt
import functools
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from nexar_native import quic

DAY = dt.timedelta(days=1)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


class Leaf:
    """A certificate chain and its key."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.pem = _pem(certificate)
        self.der = certificate.public_bytes(serialization.Encoding.DER)
        self.key_pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        self.fingerprint = quic.spki_fingerprint(self.der)

    @property
    def credentials(self) -> quic.Credentials:
        return quic.Credentials(self.pem, self.key_pem)


class Authority:
    """Signs leaves."""

    def __init__(self, name: str = "tests") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        now = dt.datetime.now(dt.UTC)
        self._certificate = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + 365 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = _pem(self._certificate)

    def leaf(self, *names: str, expired: bool = False) -> Leaf:
        key = ec.generate_private_key(ec.SECP256R1())
        now = dt.datetime.now(dt.UTC)
        start, end = (now - 3 * DAY, now - DAY) if expired else (now - DAY, now + 30 * DAY)
        alternatives = x509.SubjectAlternativeName([_alternative(name) for name in names])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_name(names[0]))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(alternatives, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Leaf(certificate, key)


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


@functools.cache
def authority() -> Authority:
    return Authority()


@functools.cache
def node(name: str) -> Leaf:
    return authority().leaf(name)


def trust() -> quic.Trust:
    return quic.Trust(authority().pem)
