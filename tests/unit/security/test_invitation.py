import pytest

from nexar.errors import UsageError
from nexar.security.invitation import Invitation, invitation_from_token

TOKEN = "3f9a1c0d7e5b2846a0c3f9d817e6b452"
SECRET = bytes(range(32))


def test_a_token_and_an_address_make_an_invitation_without_a_key() -> None:
    invitation = invitation_from_token(TOKEN, ["seed.example:4000", "[fe80::1%eth0]:4000"])
    assert invitation.addresses == ("seed.example:4000", "[fe80::1%eth0]:4000")
    assert len(invitation.secret) == 32
    assert invitation.fingerprint is None


def test_the_same_token_gives_the_same_secret_wherever_it_is_read() -> None:
    here, there = (invitation_from_token(text, ["seed:1"]).secret for text in (TOKEN, f"  {TOKEN}\n"))
    assert here == there
    assert (
        here.hex() == "92ada2603056c27d826eab18f71f80c3042b9af61da7e7923bde138055aa22b6"
    )  # by which processes of different releases meet


def test_another_token_gives_another_secret_and_neither_contains_the_token() -> None:
    one, other = (invitation_from_token(text, ["seed:1"]).secret for text in (TOKEN, TOKEN.upper()))
    assert one != other
    assert bytes.fromhex(TOKEN) not in one
    assert TOKEN.encode() not in one


@pytest.mark.parametrize("token", ["", "short", "a" * 64, TOKEN[:-1], "correct horse battery"])
def test_a_weak_token_is_refused_with_a_remedy_and_not_shown(token: str) -> None:
    with pytest.raises(UsageError, match="too weak") as refusal:
        invitation_from_token(token, ["seed:1"])
    assert "secrets.token_hex" in str(refusal.value)
    assert not token or token not in str(refusal.value).replace("secrets.token_hex", "")


def test_an_invitation_never_shows_its_secret() -> None:
    shown = repr(Invitation(("seed:1",), SECRET, bytes(32)))
    assert "seed:1" in shown
    assert repr(SECRET) not in shown
    assert "secret" not in shown


@pytest.mark.parametrize("address", ["", "two words", "a,b", "näher:1", "a\n:1", "x" * 256])
def test_an_address_that_cannot_be_passed_on_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="not an address"):
        Invitation((address,), SECRET)


@pytest.mark.parametrize("count", [0, 17])
def test_the_number_of_addresses_is_bounded(count: int) -> None:
    with pytest.raises(UsageError, match=f"not {count}"):
        Invitation(("seed:1",) * count, SECRET)


def test_secret_and_fingerprint_have_one_length() -> None:
    with pytest.raises(UsageError, match="32 bytes, not 16"):
        Invitation(("seed:1",), bytes(16))
    with pytest.raises(UsageError, match="32 bytes, not 20"):
        Invitation(("seed:1",), SECRET, bytes(20))
