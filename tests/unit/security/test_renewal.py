from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.errors import UsageError
from nexar.security.authority import CLOCK_SKEW, Authority
from nexar.security.identity import NotOurs
from nexar.security.renewal import read_validity, renew_at

ISSUED = datetime(2030, 1, 1, tzinfo=UTC)
NOT_BEFORE = ISSUED - CLOCK_SKEW

lives = st.floats(1, 1e9).map(lambda seconds: timedelta(seconds=seconds))
shares = st.floats(0, 1)


def test_the_validity_of_a_certificate_is_what_the_authority_gave() -> None:
    chain = Authority.create("c").admit(1).certificate_chain
    not_before, not_after = read_validity(chain)
    assert not_after - not_before == timedelta(days=365) + CLOCK_SKEW
    assert not_before.tzinfo is UTC
    assert not_before < datetime.now(UTC) < not_after


@pytest.mark.parametrize("junk", [b"", b"junk", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_what_is_no_certificate_has_no_validity(junk: bytes) -> None:
    with pytest.raises(NotOurs):
        read_validity(junk)


def test_a_certificate_is_renewed_at_two_thirds_of_its_life() -> None:
    assert renew_at(NOT_BEFORE, ISSUED + timedelta(hours=3), ISSUED, 0.0) == ISSUED + timedelta(hours=2)


def test_the_spread_brings_it_forward_to_one_half_at_most() -> None:
    assert renew_at(NOT_BEFORE, ISSUED + timedelta(hours=3), ISSUED, 1.0) == ISSUED + timedelta(hours=1.5)


def test_a_life_shorter_than_the_clocks_may_differ_is_still_used() -> None:
    """Counted from the date that the authority set back, it would be due before it was issued."""
    assert renew_at(NOT_BEFORE, ISSUED + timedelta(seconds=60), ISSUED, 0.0) == ISSUED + timedelta(seconds=40)


@given(lives, shares, shares)
def test_renewal_comes_before_the_end_and_leaves_a_third_for_trying_again(
    life: timedelta, age: float, spread: float
) -> None:
    now = ISSUED + life * age
    moment = renew_at(NOT_BEFORE, ISSUED + life, now, spread)
    assert now < moment <= max(now + life / 20, ISSUED + life * 0.67)


@given(lives, st.floats(-100, 100), shares)
def test_whatever_the_clocks_say_renewing_is_no_busy_loop(life: timedelta, skew: float, spread: float) -> None:
    now = ISSUED + min(life, timedelta(days=365)) * skew
    assert renew_at(NOT_BEFORE, ISSUED + life, now, spread) - now >= min(life / 20, timedelta(minutes=1))


def test_an_expired_certificate_is_renewed_within_a_minute() -> None:
    late = ISSUED + timedelta(days=500)
    assert renew_at(NOT_BEFORE, ISSUED + timedelta(days=365), late, 0.5) == late + timedelta(minutes=1)


@pytest.mark.parametrize("spread", [-0.1, 1.1, float("nan")])
def test_a_spread_is_a_share(spread: float) -> None:
    with pytest.raises(UsageError, match="0 to 1"):
        renew_at(NOT_BEFORE, ISSUED, ISSUED, spread)
