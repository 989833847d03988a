from typing import Any

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC
from hypothesis import given
from hypothesis import strategies as st

from nexar.errors import UsageError
from nexar.security import proof
from nexar.security.proof import NONCE_BYTES, PROOF_BYTES, make_nonce, prove, proves

SECRET, HERS, ITS, CERTIFICATE = b"s" * 32, b"c" * 32, b"n" * 32, b"certificate"

nonces = st.binary(min_size=32, max_size=32)
facts = st.tuples(
    nonces, st.sampled_from(["seed", "candidate", "launcher"]), nonces, nonces, st.binary(min_size=1, max_size=64)
)


@given(facts)
def test_what_is_proven_can_be_checked(parts: Any) -> None:
    assert proves(prove(*parts), *parts)
    assert len(prove(*parts)) == PROOF_BYTES


@given(facts, facts)
def test_a_proof_holds_for_nothing_else(one: Any, other: Any) -> None:
    assert proves(prove(*one), *other) == (one == other)


@pytest.mark.parametrize(
    "changed",
    [
        (b"t" * 32, "candidate", HERS, ITS, CERTIFICATE),
        (SECRET, "seed", HERS, ITS, CERTIFICATE),
        (SECRET, "launcher", HERS, ITS, CERTIFICATE),
        (SECRET, "candidate", ITS, HERS, CERTIFICATE),
        (SECRET, "candidate", b"d" + HERS[1:], ITS, CERTIFICATE),
        (SECRET, "candidate", HERS, b"d" + ITS[1:], CERTIFICATE),
        (SECRET, "candidate", HERS, ITS, b"Certificate"),
        (SECRET, "candidate", HERS, ITS, CERTIFICATE + b"\0"),
    ],
    ids=["secret", "reflected", "other-role", "nonces-swapped", "replayed", "replayed-back", "relayed", "longer"],
)
def test_each_part_is_bound(changed: Any) -> None:
    assert not proves(prove(SECRET, "candidate", HERS, ITS, CERTIFICATE), *changed)


def test_a_proof_is_the_hmac_of_all_parts_with_their_lengths() -> None:
    """Written out once, with another implementation: nodes of different releases meet by it."""
    mac = HMAC(SECRET, SHA256())
    for part in (b"nexar join proof, format 1", b"seed", HERS, ITS, CERTIFICATE):
        mac.update(len(part).to_bytes(4, "big") + part)
    assert prove(SECRET, "seed", HERS, ITS, CERTIFICATE) == mac.finalize()


@pytest.mark.parametrize("forged", [b"", b"x", bytes(PROOF_BYTES), bytes(PROOF_BYTES + 1), bytes(4096)])
def test_any_bytes_may_claim_to_be_a_proof(forged: bytes) -> None:
    assert not proves(forged, SECRET, "candidate", HERS, ITS, CERTIFICATE)


def test_a_proof_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, compare_digest = [], proof.hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare_digest(one, other)

    good = prove(SECRET, "seed", HERS, ITS, CERTIFICATE)
    monkeypatch.setattr(proof.hmac, "compare_digest", compare)
    assert proves(good, SECRET, "seed", HERS, ITS, CERTIFICATE)
    assert compared == [(good, good)]


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_nonce_has_one_length_and_the_error_says_whose_is_wrong(length: int) -> None:
    with pytest.raises(UsageError, match=f"candidate's nonce has 32 bytes, not {length}"):
        prove(SECRET, "seed", bytes(length), ITS, CERTIFICATE)
    with pytest.raises(UsageError, match=f"seed's nonce has 32 bytes, not {length}"):
        proves(b"", SECRET, "seed", HERS, bytes(length), CERTIFICATE)


def test_parts_that_would_prove_nothing_are_refused() -> None:
    role: Any = "member"
    with pytest.raises(UsageError, match="is not a role"):
        prove(SECRET, role, HERS, ITS, CERTIFICATE)
    with pytest.raises(UsageError, match="needs the certificate"):
        prove(SECRET, "seed", HERS, ITS, b"")
    with pytest.raises(UsageError, match="32 bytes, not 0") as refusal:
        prove(b"", "seed", HERS, ITS, CERTIFICATE)
    assert "s" * 8 not in str(refusal.value)


def test_a_nonce_is_new_each_time() -> None:
    drawn = {make_nonce() for _ in range(100)}
    assert len(drawn) == 100
    assert {len(nonce) for nonce in drawn} == {NONCE_BYTES}
