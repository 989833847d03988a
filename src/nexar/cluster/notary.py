"""The seed's cryptography: it proves itself, checks who proves itself, and certifies keys. No I/O.

Law: for a stranger nothing is done that costs more than the hash of a few hundred bytes. A request for a certificate is
looked at, and signed, only after the proof beside it was right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from cryptography.hazmat.primitives.serialization import Encoding

from nexar.security.authority import Authority
from nexar.security.proof import Role, prove, proves
from nexar.security.request import RequestedKey
from nexar.types import NodeId
from nexar.wire.handshake import Hello
from nexar.wire.joining import Challenge


@dataclass(frozen=True, slots=True)
class Notary:
    """Knows the secret; it shows in no repr."""

    secret: bytes = field(repr=False)
    authority: Authority = field(repr=False)
    certificate: bytes = field(repr=False)
    """DER, of the leaf that the seed shows on every connection: proofs are good for that one alone."""
    lifetime: timedelta
    """Of the certificates it issues."""

    def challenge(self, hello: Hello, nonce: bytes) -> Challenge:
        """The answer to a hello, on the connection that has this nonce."""
        return Challenge(nonce, prove(self.secret, "seed", hello.nonce, nonce, self.certificate))

    def is_proven(self, proof: bytes, role: Role, hello: Hello, nonce: bytes) -> bool:
        """Whether who said `hello`, and was challenged with `nonce`, knows the secret."""
        return proves(proof, self.secret, role, hello.nonce, nonce, self.certificate)

    def certify(self, node: NodeId, key: RequestedKey) -> bytes:
        """A certificate, PEM. UsageError when the authority has expired."""
        return self.authority.issue(node, key, self.lifetime).public_bytes(Encoding.PEM)
