"""The state directory from which a restarted seed continues.

Each file is private and written atomically:

seed         node, key, authority, secret, port. Written before the ticket is shown.
membership   the newest committed one. Written before members are sent it.
vote         promises and acceptances. Written before they are sent, so that the seed never votes twice.

Without `membership` the formation starts again, with the same ticket.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_der_private_key,
)
from msgspec import Meta

from nexar.cluster.decisions.paxos import Vote
from nexar.cluster.membership import Membership, MembershipError, decode_membership, encode_membership
from nexar.errors import UsageError
from nexar.security.authority import Authority, make_key
from nexar.security.certificates import UNREADABLE, fingerprint
from nexar.security.invitation import SECRET_BYTES, make_secret
from nexar.security.storage import check_directory, read_secret_file, write_secret_file
from nexar.types import MAX_NODE, NodeId

_IDENTITY: Final = "seed"
_MEMBERSHIP: Final = "membership"
_VOTE: Final = "vote"
_FORMAT: Final = 1
_NAME_CHARACTERS: Final = "abcdefghijkmnpqrstuvwxyz23456789"  # without look-alikes
_NAME_LENGTH: Final = 10


@dataclass(frozen=True, slots=True)
class SeedIdentity:
    """The seed's identity. Its repr hides secrets."""

    node: NodeId
    key: ec.EllipticCurvePrivateKey = field(repr=False)
    authority: Authority = field(repr=False)
    secret: bytes = field(repr=False)
    port: int = 0  # UDP and TCP; 0: undecided

    @property
    def fingerprint(self) -> bytes:
        """Pinned by tickets."""
        return fingerprint(self.key.public_key())


def make_identity(secret: bytes | None = None) -> SeedIdentity:
    """A new cluster with a random name; `secret` comes from a token."""
    cluster = "".join(secrets.choice(_NAME_CHARACTERS) for _ in range(_NAME_LENGTH))
    node = secrets.randbelow(MAX_NODE) + 1
    return SeedIdentity(node, make_key(), Authority.create(cluster), secret or make_secret())


class _Stored(msgspec.Struct, frozen=True):
    format: int
    node: Annotated[int, Meta(ge=1)]
    key: bytes
    authority: bytes
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    port: Annotated[int, Meta(ge=1, le=65535)]


class SeedState:
    """Used by one seed at a time. Changes are durable when a method returns. Methods raise UsageError, with file and
    remedy, for a file that is unreadable, unwritable, readable by others, or invalid.
    """

    def __init__(self, directory: str | Path) -> None:
        """Touches no file. Raises UsageError for a directory writable by others."""
        self._directory = Path(directory)
        try:
            check_directory(self._directory)
        except OSError as error:
            raise UsageError(f"the seed's state {self._directory} cannot be read: {error.strerror}") from error

    def load_identity(self) -> SeedIdentity | None:
        content = self._read(_IDENTITY)
        return None if content is None else self._parse(content)

    def keep_identity(self, identity: SeedIdentity) -> None:
        key = identity.key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
        exported = identity.authority.export()
        stored = _Stored(_FORMAT, identity.node, key, exported, identity.secret, identity.port)
        self._write(_IDENTITY, msgspec.msgpack.encode(stored))

    def load_membership(self, cluster: str) -> Membership | None:
        content = self._read(_MEMBERSHIP)
        if content is None:
            return None
        try:
            membership = decode_membership(content)
        except MembershipError:
            raise self._damaged(_MEMBERSHIP) from None
        if membership.cluster != cluster:
            raise UsageError(
                f"{self._path(_MEMBERSHIP)} is of cluster {membership.cluster!r}, the seed beside it of {cluster!r}; "
                "put the right one back, or take an empty directory"
            )
        return membership

    def keep_membership(self, membership: Membership) -> None:
        self._write(_MEMBERSHIP, encode_membership(membership))

    def discard_membership(self) -> None:
        try:
            self._path(_MEMBERSHIP).unlink(missing_ok=True)
        except OSError as error:
            path = self._path(_MEMBERSHIP)
            raise UsageError(f"the seed's state {path} cannot be removed: {error.strerror}") from error

    def load_vote(self) -> Vote | None:
        content = self._read(_VOTE)
        try:
            return None if content is None else Vote.decode(content)
        except ValueError:
            raise self._damaged(_VOTE) from None

    def keep_vote(self, vote: Vote) -> None:
        self._write(_VOTE, vote.encode())

    def _parse(self, content: bytes) -> SeedIdentity:
        try:
            stored = msgspec.msgpack.decode(content, type=_Stored)
            key = load_der_private_key(stored.key, None)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, *UNREADABLE):
            raise self._damaged(_IDENTITY) from None
        if stored.format != _FORMAT or stored.node > MAX_NODE or not isinstance(key, ec.EllipticCurvePrivateKey):
            raise self._damaged(_IDENTITY)
        return SeedIdentity(stored.node, key, Authority.load(stored.authority), stored.secret, stored.port)

    def _read(self, name: str) -> bytes | None:
        try:
            return read_secret_file(self._path(name))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(f"the seed's state {self._path(name)} cannot be read: {error.strerror}") from error

    def _write(self, name: str, content: bytes) -> None:
        try:
            write_secret_file(self._path(name), content)
        except OSError as error:
            raise UsageError(f"the seed's state {self._path(name)} cannot be written: {error.strerror}") from error

    def _path(self, name: str) -> Path:
        return self._directory / name

    def _damaged(self, name: str) -> UsageError:
        return UsageError(
            f"{self._path(name)} is damaged, or not a file of this version of nexar; "
            "put a good copy back, or take an empty state directory, which makes a new cluster"
        )
