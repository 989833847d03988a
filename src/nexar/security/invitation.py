"""Invitations from tickets and tokens, and the text format of tickets. Pure.

A ticket carries the seed's addresses, a secret and the fingerprint of the seed's key. A token is chosen before a seed
exists: its holder needs the addresses separately, and only `proof` shows the seed's identity.

    nexar1_ … base32, lower case, without padding …
      │        size       2 bytes   of all this, itself and the checksum included
      │        addresses  1 byte count, then each: 1 byte length, characters
      │        key        32 bytes  fingerprint of the seed's public key
      │        secret     32 bytes
      │        checksum    4 bytes  CRC-32 of all before it
    format

A double click selects a whole ticket, and no shell interprets it. Each invitation has one text: any other is refused.
No error quotes the text: a mistyped ticket is still a secret.
"""

from __future__ import annotations

import base64
import re
import secrets
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from nexar.config.value_types import Token, ValueRefused
from nexar.errors import UsageError

SECRET_BYTES: Final = 32
FINGERPRINT_BYTES: Final = 32  # of a public key, SHA-256 (`certificates.fingerprint`)
MAX_ADDRESSES: Final = 16
MAX_ADDRESS_CHARACTERS: Final = 255

_ADDRESS: Final = re.compile(rf"[!-+\--~]{{1,{MAX_ADDRESS_CHARACTERS}}}")  # visible ASCII without the comma
_TOKEN_LABEL: Final = b"nexar cluster token, format 1"


@dataclass(frozen=True, slots=True)
class Invitation:
    """Checks the form, not whether the addresses work. The repr omits the secret."""

    addresses: tuple[str, ...]  # where the seed listens, the most promising first
    secret: bytes = field(repr=False)  # proven by both sides, sent by neither
    fingerprint: bytes | None = None  # of the seed's public key; None: unknown, only the proof identifies the seed

    def __post_init__(self) -> None:
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
    """Trim the token and derive the secret. Raise UsageError, without quoting it, if it cannot hold 128 bits."""
    try:
        accepted = Token().accept(token)
    except ValueRefused:
        accepted = None
    if accepted is None:
        raise UsageError(f"the cluster token is too weak to keep anybody out; take {Token().allowed}")
    return Invitation(tuple(addresses), _derive(accepted.encode()))


def _derive(token: bytes) -> bytes:
    # Extract and expand, without stretching: a token has 128 bits, and no affordable stretching would help a weaker
    # one. The label separates the secret from other uses of the token.
    return HKDF(SHA256(), SECRET_BYTES, salt=None, info=_TOKEN_LABEL).derive(token)


_FORMAT: Final = 1
_PREFIX: Final = f"nexar{_FORMAT}_"
_ANY_PREFIX: Final = re.compile(r"nexar([1-9][0-9]{0,2})_")
_FOREIGN: Final = re.compile(r"[^a-z2-7]")

_SIZE_BYTES: Final = 2
_SIZE_CHARACTERS: Final = 4  # enough to hold the size
_CHECKSUM_BYTES: Final = 4
_FIXED_BYTES: Final = _SIZE_BYTES + 1 + FINGERPRINT_BYTES + SECRET_BYTES + _CHECKSUM_BYTES
_MAX_BYTES: Final = _FIXED_BYTES + MAX_ADDRESSES * (1 + MAX_ADDRESS_CHARACTERS)


def make_secret() -> bytes:
    """Return random bytes from the operating system."""
    return secrets.token_bytes(SECRET_BYTES)


def format_ticket(invitation: Invitation) -> str:
    """Raise UsageError without the seed's fingerprint: a ticket pins the key."""
    if invitation.fingerprint is None:
        raise UsageError("a ticket needs the fingerprint of the seed's key; an invitation from a token has none")
    addresses = b"".join(bytes([len(address)]) + address.encode("ascii") for address in invitation.addresses)
    content = bytes([len(invitation.addresses)]) + addresses + invitation.fingerprint + invitation.secret
    size = _SIZE_BYTES + len(content) + _CHECKSUM_BYTES
    checked = size.to_bytes(_SIZE_BYTES, "big") + content
    return _PREFIX + _to_base32(checked + _checksum(checked))


def parse_ticket(text: str) -> Invitation:
    """Ignore surrounding white space. Raise UsageError, without quoting the text."""
    if not isinstance(text, str):
        raise UsageError(f"a ticket is a text that begins with {_PREFIX}, not a {type(text).__name__}")
    ticket = text.strip()
    body = _from_base32(_check_size(_check_characters(_strip_prefix(ticket))))
    if _checksum(body[:-_CHECKSUM_BYTES]) != body[-_CHECKSUM_BYTES:]:
        raise _bad("its checksum is wrong: it was mistyped, or its parts do not belong together")
    invitation = _read(body[_SIZE_BYTES:-_CHECKSUM_BYTES])
    if format_ticket(invitation) != ticket:  # base32 has spare bits at its end; only zeros are valid
        raise _bad("its last character is wrong: it was mistyped")
    return invitation


def _bad(what: str) -> UsageError:
    return UsageError(f"the ticket cannot be used: {what}; copy it again, whole, from where the seed showed it")


def _strip_prefix(ticket: str) -> str:
    found = _ANY_PREFIX.match(ticket)
    if found is None:
        raise _cut_off() if ticket and _PREFIX.startswith(ticket) else _bad(f"it does not begin with {_PREFIX}")
    if int(found[1]) != _FORMAT:
        raise UsageError(
            f"the ticket is of format {found[1]}, this version of nexar reads format {_FORMAT}; "
            "upgrade nexar here to the version of the seed"
        )
    return ticket[found.end() :]


def _check_characters(body: str) -> str:
    foreign = _FOREIGN.search(body)
    if foreign is None:
        return body
    place = len(_PREFIX) + foreign.start() + 1
    if foreign[0].isspace():
        raise _bad(f"it is broken by white space at character {place}")
    raise _bad(f"character {place} cannot be in a ticket, which has only a to z, in lower case, and 2 to 7")


def _check_size(body: str) -> str:
    # `body` if its length matches its size field.
    if len(body) < _SIZE_CHARACTERS:
        raise _cut_off()
    size = int.from_bytes(_from_base32(body[:_SIZE_CHARACTERS])[:_SIZE_BYTES], "big")
    if not _FIXED_BYTES <= size <= _MAX_BYTES:
        raise _bad("its beginning was mistyped")
    missing = _base32_characters(size) - len(body)
    if missing > 0:
        raise _cut_off(f"{missing} of its {len(_PREFIX) + len(body) + missing} characters are missing")
    if missing < 0:
        raise _bad(f"it has {-missing} characters more than it should: something was added, or its beginning mistyped")
    return body


def _cut_off(how_much: str = "nearly all of it is missing") -> UsageError:
    return _bad(f"it was cut off, {how_much}")


def _read(content: bytes) -> Invitation:
    # The checksum was right: only another implementation's ticket is refused here.
    try:
        addresses, rest = _read_addresses(content)
        secret = rest[FINGERPRINT_BYTES:]
        return Invitation(addresses, secret, rest[:FINGERPRINT_BYTES])
    except (ValueError, IndexError, UsageError):
        raise _bad("it was not made by nexar") from None


def _read_addresses(content: bytes) -> tuple[tuple[str, ...], bytes]:
    count, rest = content[0], content[1:]
    addresses = []
    for _ in range(count):
        end = 1 + rest[0]
        addresses.append(rest[1:end].decode("ascii"))
        rest = rest[end:]
    return tuple(addresses), rest


def _checksum(content: bytes) -> bytes:
    # CRC-32 finds every error within 32 adjacent bits, so every wrong character (5 bits) and every swap of neighbours
    # (10 bits). The size finds a lost or added character. Against intent no checksum is needed: a forger does not know
    # the seed's secret. Low byte first: adjacent bits of the text stay adjacent for the polynomial.
    return zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "little")


def _to_base32(content: bytes) -> str:
    return base64.b32encode(content).decode("ascii").rstrip("=").lower()


def _from_base32(characters: str) -> bytes:
    # Requires a length that `_to_base32` produces.
    return base64.b32decode(characters.upper() + "=" * (-len(characters) % 8))


def _base32_characters(size: int) -> int:
    return -(-size * 8 // 5)
