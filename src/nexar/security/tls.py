"""TLS contexts for `ssl`: TLS 1.3 only, no resumption, certificates on both sides. Only `Trust.allow_anonymous` permits
clients without a certificate.

`ssl` loads private keys only from files, so the key is in a memfd or a private file during one call.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from nexar.security.certificates import Credentials, Trust


def server_context(credentials: Credentials, trust: Trust) -> ssl.SSLContext:
    """Return the context of the accepting side."""
    context = _begin(ssl.PROTOCOL_TLS_SERVER, credentials, trust)
    context.num_tickets = 0  # nothing is resumed, and a ticket would be an unexpected write
    context.verify_mode = ssl.CERT_OPTIONAL if trust.allow_anonymous else ssl.CERT_REQUIRED
    return context


def client_context(credentials: Credentials | None, trust: Trust, *, check_name: bool = True) -> ssl.SSLContext:
    """Return the context of the dialing side. Without authorities the caller must verify the peer."""
    context = _begin(ssl.PROTOCOL_TLS_CLIENT, credentials, trust)
    context.check_hostname = check_name and bool(trust.authorities)
    context.verify_mode = ssl.CERT_REQUIRED if trust.authorities else ssl.CERT_NONE
    return context


def _begin(protocol: int, credentials: Credentials | None, trust: Trust) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if trust.authorities:
        context.load_verify_locations(cadata=trust.authorities.decode("ascii"))
    if credentials is not None:
        _load_chain(context, credentials)
    return context


def _load_chain(context: ssl.SSLContext, credentials: Credentials) -> None:
    with _named_secret(credentials.private_key + b"\n" + credentials.certificate_chain) as path:
        context.load_cert_chain(path)


@contextmanager
def _named_secret(content: bytes) -> Iterator[str]:
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        descriptor = os.memfd_create("nexar-key", os.MFD_CLOEXEC)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            yield f"/proc/self/fd/{descriptor}"
        return
    with tempfile.TemporaryDirectory(prefix="nexar-") as directory:  # mode 0700
        path = os.path.join(directory, "key")
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        yield path
