"""Mutual proof of the cluster's secret over a connection whose peer is not yet authenticated.

    proof = HMAC-SHA256(secret, label · role · candidate's nonce · seed's nonce · certificate)

`certificate` is the seed side's on this connection, as each side sees it. The seed proves first; the other side checks
that before it answers. If the secret cannot be guessed, this prevents:

- *Eavesdropping.* The secret is never sent. Every client receives a seed's proof and can guess offline, so weak tokens
  are refused.
- *Replay.* Each side draws a new nonce per connection, and every proof covers both.
- *Relay.* A man in the middle must show its own certificate, so a forwarded proof, which covers the seed's, fails. The
  candidate has then sent nothing that depends on the secret.
- *Reflection.* The prover's role is in the proof.
- *Ambiguity.* Every part is preceded by its length. The label separates proofs from other uses of the secret.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Final, Literal, TypeAlias, get_args

from nexar.errors import UsageError
from nexar.security.invitation import SECRET_BYTES

Role: TypeAlias = Literal["seed", "candidate", "launcher", "onlooker"]

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32

_LABEL: Final = b"nexar join proof, format 1"
_LENGTH_BYTES: Final = 4


def make_nonce() -> bytes:
    """Return a nonce for one connection; never reuse it."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(secret: bytes, role: Role, candidate_nonce: bytes, seed_nonce: bytes, certificate: bytes) -> bytes:
    """`certificate`: the seed side's, DER. Raise UsageError for a malformed part."""
    _check(secret, role, candidate_nonce, seed_nonce, certificate)
    parts = (_LABEL, role.encode("ascii"), candidate_nonce, seed_nonce, certificate)
    return hmac.digest(secret, b"".join(len(part).to_bytes(_LENGTH_BYTES, "big") + part for part in parts), "sha256")


def proves(  # noqa: PLR0917 - the proof, then what `prove` takes, in its order
    proof: bytes, secret: bytes, role: Role, candidate_nonce: bytes, seed_nonce: bytes, certificate: bytes
) -> bool:
    """Whether `proof` (any bytes) equals `prove`, in constant time. Raise UsageError as `prove`."""
    return hmac.compare_digest(proof, prove(secret, role, candidate_nonce, seed_nonce, certificate))


def _check(secret: bytes, role: str, candidate_nonce: bytes, seed_nonce: bytes, certificate: bytes) -> None:
    if len(secret) != SECRET_BYTES:
        raise UsageError(f"the secret of a proof has {SECRET_BYTES} bytes, not {len(secret)}")
    if role not in get_args(Role):
        raise UsageError(f"{role!r} is not a role; the roles are {', '.join(get_args(Role))}")
    for whose, nonce in (("candidate", candidate_nonce), ("seed", seed_nonce)):
        if len(nonce) != NONCE_BYTES:
            raise UsageError(f"the {whose}'s nonce has {NONCE_BYTES} bytes, not {len(nonce)}; take make_nonce()")
    if not certificate:
        raise UsageError("a proof needs the certificate shown on this connection; without it anybody could relay it")
