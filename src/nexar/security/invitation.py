"""What lets a node in: where the seed is, a secret, and, from a ticket, the seed's key. Pure.

There are two ways to an invitation. A ticket carries all of it. A token is a text that people made before there was a
seed; whoever has it must be told the seed's addresses, and learns the seed's key only from the proof (`proof`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from nexar.config.forms import Token
from nexar.config.kinds import Refused
from nexar.errors import UsageError

SECRET_BYTES: Final = 32
FINGERPRINT_BYTES: Final = 32
"""Of a public key, SHA-256 (`identity.fingerprint`)."""
MAX_ADDRESSES: Final = 16
MAX_ADDRESS_CHARACTERS: Final = 255

_ADDRESS: Final = re.compile(rf"[!-+\--~]{{1,{MAX_ADDRESS_CHARACTERS}}}")  # visible ASCII without the comma of lists
_TOKEN_LABEL: Final = b"nexar cluster token, format 1"


@dataclass(frozen=True, slots=True)
class Invitation:
    """Where to knock and what to prove. One that exists has a form that can be used; what its addresses mean is the
    transports' affair. The secret does not show in its repr."""

    addresses: tuple[str, ...]
    """Where the seed listens, the most promising first."""
    secret: bytes = field(repr=False)
    """Proven by both sides, sent by neither."""
    fingerprint: bytes | None = None
    """Of the seed's public key; None: not known beforehand, the proof alone shows who answers."""

    def __post_init__(self) -> None:
        """UsageError unless every part has its form."""
        if not 1 <= len(self.addresses) <= MAX_ADDRESSES:
            raise UsageError(
                f"an invitation needs 1 to {MAX_ADDRESSES} addresses of the seed, not {len(self.addresses)}"
            )
        for address in self.addresses:
            if not _ADDRESS.fullmatch(address):
                raise UsageError(f"{address!r} is not an address of a seed; write host:port or [address]:port")
        if len(self.secret) != SECRET_BYTES:
            raise UsageError(f"the secret of an invitation has {SECRET_BYTES} bytes, not {len(self.secret)}")
        if self.fingerprint is not None and len(self.fingerprint) != FINGERPRINT_BYTES:
            raise UsageError(f"the fingerprint of a key has {FINGERPRINT_BYTES} bytes, not {len(self.fingerprint)}")


def invitation_from_token(token: str, addresses: Sequence[str]) -> Invitation:
    """What a cluster token means together with the seed's addresses. The same text, trimmed, gives the same secret
    everywhere. UsageError for a token that cannot hold 128 bits; the token is not shown."""
    try:
        accepted = Token().accept(token)
    except Refused:
        accepted = None
    if accepted is None:
        raise UsageError(f"the cluster token is too weak to keep anybody out; take {Token().allowed}")
    return Invitation(tuple(addresses), _derive(accepted.encode()))


def _derive(token: bytes) -> bytes:
    """Extract and expand, not stretch: a token has 128 bits, and against one that has not no amount of stretching that
    a start-up can afford would help. The label keeps the secret apart from whatever else the token is used for."""
    return HKDF(SHA256(), SECRET_BYTES, salt=None, info=_TOKEN_LABEL).derive(token)
