import base64
import re
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.errors import UsageError
from nexar.security.invitation import Invitation, format_ticket, invitation_from_token, make_secret, parse_ticket

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


ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
PLAIN = Invitation(("10.0.0.7:4000", "[fd00::7]:4000"), bytes(range(32)), bytes(range(100, 132)))
TICKET = format_ticket(PLAIN)

addresses = st.from_regex(r"[!-+\--~]{1,60}", fullmatch=True)
keys = st.binary(min_size=32, max_size=32)
invitations = st.builds(Invitation, st.lists(addresses, min_size=1, max_size=16).map(tuple), keys, keys)


def refusal(text: str) -> str:
    with pytest.raises(UsageError) as refused:
        parse_ticket(text)
    chained = [refused.value.__cause__, None if refused.value.__suppress_context__ else refused.value.__context__]
    for words in map(str, [refused.value, *chained]):
        assert len(text) < 12 or text not in words
        assert not set(_pieces(text)) & set(_pieces(words)), "a piece of the ticket is in the error"
    return str(refused.value)


def _pieces(text: str) -> Iterator[str]:
    return (text[at : at + 12] for at in range(7, len(text) - 12))


def make(content: bytes) -> str:
    """A ticket with any content, in good order otherwise."""
    checked = (len(content) + 6).to_bytes(2, "big") + content
    body = base64.b32encode(checked + zlib.crc32(checked).to_bytes(4, "little"))
    return "nexar1_" + body.decode().rstrip("=").lower()


@given(invitations)
def test_an_invitation_survives_being_written_and_read(invitation: Invitation) -> None:
    ticket = format_ticket(invitation)
    assert parse_ticket(ticket) == invitation
    assert format_ticket(parse_ticket(ticket)) == ticket


def test_a_ticket_is_one_token_for_shells_mail_programs_and_double_clicks() -> None:
    assert re.fullmatch(r"nexar1_[a-z2-7]+", TICKET)
    assert len(format_ticket(Invitation(("10.0.0.7:4000",), bytes(32), bytes(32)))) < 160


def test_the_form_of_a_ticket_stays_as_it_is() -> None:
    """Seeds and workers of different releases meet by it."""
    assert TICKET == (
        "nexar1_absaedjrgaxdalrqfy3tunbqgaya4w3gmqydaor2g5otunbqgaygizlgm5ugs2tlnrww433qofzhg5dvoz3"
        "xq6l2pn6h27t7qcayfayaaebagbafaydqqcikbmga2dqpcaireeyuculbogazdinryhi6d7mjkh4h"
    )


def test_white_space_around_a_ticket_does_not_matter() -> None:
    assert parse_ticket(f"\n  {TICKET}\t\r\n") == PLAIN


def test_two_secrets_are_never_the_same() -> None:
    drawn = {make_secret() for _ in range(100)}
    assert len(drawn) == 100
    assert {len(secret) for secret in drawn} == {32}


def test_every_single_wrong_character_is_detected() -> None:
    for at, right in enumerate(TICKET):
        for wrong in ALPHABET + "189_-A=":
            if wrong != right:
                refusal(TICKET[:at] + wrong + TICKET[at + 1 :])


def test_every_lost_doubled_or_added_character_is_detected() -> None:
    for at in range(len(TICKET)):
        refusal(TICKET[:at] + TICKET[at + 1 :])
        for added in ("a", "7", TICKET[at]):
            refusal(TICKET[:at] + added + TICKET[at:])


def test_every_swap_of_neighbours_is_detected() -> None:
    for at in range(len(TICKET) - 1):
        one, other = TICKET[at], TICKET[at + 1]
        if one != other:
            refusal(TICKET[:at] + other + one + TICKET[at + 2 :])


@given(invitations, st.data())
def test_wrong_and_swapped_characters_are_detected_in_any_ticket(invitation: Invitation, data: st.DataObject) -> None:
    ticket = format_ticket(invitation)
    at = data.draw(st.integers(7, len(ticket) - 2))
    wrong = data.draw(st.sampled_from(ALPHABET).filter(lambda letter: letter != ticket[at]))
    refusal(ticket[:at] + wrong + ticket[at + 1 :])
    refusal(ticket[:at] + ticket[at + 1 :])
    if ticket[at] != ticket[at + 1]:
        refusal(ticket[:at] + ticket[at + 1] + ticket[at] + ticket[at + 2 :])


@given(st.text() | st.text(ALPHABET).map("nexar1_".__add__))
def test_any_other_text_is_refused_and_never_breaks_the_reader(text: str) -> None:
    with pytest.raises(UsageError):
        parse_ticket(text)


@pytest.mark.parametrize(
    "text", ["", "   ", "hello", "nexar", "NEXAR1_abc", "nexar01_abc", "nexar0_abc", "10.0.0.7:4000"]
)
def test_what_is_no_ticket_at_all_is_reported(text: str) -> None:
    words = refusal(text)
    assert "does not begin with nexar1_" in words or "cut off" in words


@pytest.mark.parametrize("value", [None, b"nexar1_abc", 7])
def test_what_is_no_text_is_no_ticket(value: object) -> None:
    with pytest.raises(UsageError, match="not a "):
        parse_ticket(value)  # type: ignore[arg-type]


def test_a_ticket_of_a_newer_format_asks_for_an_upgrade() -> None:
    assert "format 2, this version of nexar reads format 1; upgrade" in refusal(TICKET.replace("nexar1_", "nexar2_"))


@pytest.mark.parametrize("kept", [1, 5, 7, 8, 10])
def test_a_ticket_of_which_nearly_nothing_is_left_was_cut_off(kept: int) -> None:
    assert "cut off, nearly all" in refusal(TICKET[:kept])


@pytest.mark.parametrize("lost", [1, 2, 40, 100])
def test_a_cut_ticket_reports_how_much_is_missing(lost: int) -> None:
    assert f"cut off, {lost} of its {len(TICKET)} characters are missing" in refusal(TICKET[:-lost])


def test_a_ticket_with_a_tail_reports_how_much_is_too_much() -> None:
    assert "3 characters more" in refusal(TICKET + "abc")


def test_a_strange_character_is_named_by_its_place() -> None:
    assert "character 21 cannot be in a ticket" in refusal(TICKET[:20] + "!" + TICKET[21:])
    assert "character 8 cannot be in a ticket" in refusal("nexar1_" + TICKET[7:].upper())


def test_a_ticket_broken_into_lines_is_reported_with_the_place() -> None:
    assert "broken by white space at character 51" in refusal(TICKET[:50] + "\n" + TICKET[50:])


def test_a_wrong_checksum_means_mistyped() -> None:
    wrong = "b" if TICKET[60] == "a" else "a"
    assert "checksum is wrong" in refusal(TICKET[:60] + wrong + TICKET[61:])


def test_an_impossible_beginning_is_reported() -> None:
    assert "beginning was mistyped" in refusal("nexar1_" + "7" * (len(TICKET) - 7))


def test_bits_to_spare_are_zero() -> None:
    """The other spellings of the last character decode to the same bytes, and are not the ticket."""
    spare = next(
        t for t in (format_ticket(Invitation(("a" * n,), bytes(32), bytes(32))) for n in (1, 2, 3)) if _spare(t)
    )
    other = ALPHABET[ALPHABET.index(spare[-1]) ^ 1]
    assert "last character is wrong" in refusal(spare[:-1] + other)


def _spare(ticket: str) -> bool:
    return len(ticket[7:]) % 8 != 0


@pytest.mark.parametrize(
    "content",
    [
        b"\x00" + bytes(64),
        b"\x01\x00" + bytes(64),
        b"\x01\x09a" + bytes(64),
        b"\x01\x01\xff" + bytes(64),
        b"\x01\x01a" + bytes(65),
        b"\x11" + b"\x01a" * 17 + bytes(64),
        b"\xff" + b"\x05aaaaa" * 40,
    ],
)
def test_content_that_nexar_does_not_write_is_refused(content: bytes) -> None:
    assert "not made by nexar" in refusal(make(content))


def test_a_well_made_ticket_passes_the_same_function() -> None:
    assert parse_ticket(make(b"\x01\x06seed:1" + bytes(64))) == Invitation(("seed:1",), bytes(32), bytes(32))


def test_an_invitation_without_a_key_has_no_ticket() -> None:
    with pytest.raises(UsageError, match="fingerprint"):
        format_ticket(invitation_from_token("3f9a1c0d7e5b2846a0c3f9d817e6b452", ["seed:1"]))
