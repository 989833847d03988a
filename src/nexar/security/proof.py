"""Proving to know the cluster's secret, to somebody who may not know it, over a line that may not end where it seems.

    proof = HMAC-SHA256(secret, label · role · candidate's nonce · seed's nonce · certificate)

where `certificate` is the one the seed's side shows on this very connection, as each side sees it. The seed proves
first; the other side answers only after it has checked that. What this is good for, if nobody can guess the secret:

- *Listening.* The secret is the key of the MAC and never travels. (Guessing offline is what remains: whoever knocks is
  given a seed's proof to try words on. That is why weak tokens are refused.)
- *Replay.* Each side draws its nonce anew for each connection and both are in every proof. A proof heard earlier was
  made for another nonce of the one who checks.
- *Relay.* Somebody in the middle ends the TLS connection of the candidate, so the candidate sees the certificate of the
  middle: it cannot be the seed's, because showing that one takes the seed's private key (the handshake signs with it).
  Passing on the seed's proof fails, because it was made for the seed's certificate. The candidate stops there and
  has said nothing that depends on the secret, so the middle has nothing to pass on in the other direction either.
  Once the seed's proof holds, the connection ends at the seed, and what follows goes to nobody else.
- *Reflection.* The role of the one who proves is in the proof: a seed's proof sent back is not a candidate's, and a
  launcher's or an onlooker's is neither. Nobody proves as a seed for a certificate that it does not hold the key of.
- *Mixing up.* Every part is preceded by its length and they come in one order, so two different sets of parts never
  give the same bytes; the label, which no other use of the secret has, keeps proofs apart from everything else.
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
    """A number for one connection, from the operating system's generator. Never used for a second one."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(secret: bytes, role: Role, candidate_nonce: bytes, seed_nonce: bytes, certificate: bytes) -> bytes:
    """What shows that `role` knows the secret, on the connection with these nonces and this certificate (DER, of the
    seed's side). UsageError for a part without its form: a nonce of another length, an unknown role, no certificate."""
    _check(secret, role, candidate_nonce, seed_nonce, certificate)
    parts = (_LABEL, role.encode("ascii"), candidate_nonce, seed_nonce, certificate)
    return hmac.digest(secret, b"".join(len(part).to_bytes(_LENGTH_BYTES, "big") + part for part in parts), "sha256")


def proves(  # noqa: PLR0917 - the proof, then what `prove` takes, in its order
    proof: bytes, secret: bytes, role: Role, candidate_nonce: bytes, seed_nonce: bytes, certificate: bytes
) -> bool:
    """Whether `proof` is what `prove` gives for the rest. Takes as long for a wrong one as for a right one, and any
    bytes of any length for a proof. UsageError as `prove`."""
    return hmac.compare_digest(proof, prove(secret, role, candidate_nonce, seed_nonce, certificate))


def _check(secret: bytes, role: str, candidate_nonce: bytes, seed_nonce: bytes, certificate: bytes) -> None:
    if len(secret) != SECRET_BYTES:
        raise UsageError(f"the secret of a proof has {SECRET_BYTES} bytes, not {len(secret)}")
    if role not in get_args(Role):
        raise UsageError(f"{role!r} cannot prove anything; the roles are {', '.join(get_args(Role))}")
    for whose, nonce in (("candidate", candidate_nonce), ("seed", seed_nonce)):
        if len(nonce) != NONCE_BYTES:
            raise UsageError(f"the {whose}'s nonce has {NONCE_BYTES} bytes, not {len(nonce)}; take make_nonce()")
    if not certificate:
        raise UsageError("a proof needs the certificate shown on this connection; without it anybody could relay it")
