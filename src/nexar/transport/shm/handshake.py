"""How dialer and listener prove to each other who they are: the messages, and nothing that does I/O.

The listener draws a secret; the address it gives to node N contains key = HMAC(secret, N) and travels only over links
that are authenticated already. So whoever knows the key is N, or the listener itself.

    dialer → listener   HELLO      version, both node ids, the dialer's nonce
    listener → dialer   CHALLENGE  the listener's nonce, its proof
    dialer → listener   OFFER      a nonce that is also in the segment, the dialer's proof over it; the descriptor
    listener → dialer   ANSWER     a nonce that is also in the segment

A proof is an HMAC over the role of who proves, the whole HELLO and the listener's nonce: it holds for one connection,
one pair of nodes and one direction, so it can be neither replayed nor reflected. The listener proves itself first;
the descriptor goes to nobody who has not. A nonce found in the segment shows that both really have the same memory.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass
from typing import Final

from nexar.types import format_node

NONCE_BYTES: Final = 32
KEY_BYTES: Final = 32
_MAGIC: Final = b"nexarshm"
_VERSION: Final = 1
_HELLO: Final = struct.Struct("<8sQQQ32s")
_PAIR: Final = struct.Struct("<32s32s")

HELLO_BYTES: Final = _HELLO.size
CHALLENGE_BYTES: Final = _PAIR.size
OFFER_BYTES: Final = _PAIR.size
ANSWER_BYTES: Final = NONCE_BYTES

_AS_LISTENER: Final = b"listener"
_AS_DIALER: Final = b"dialer"


class Refused(Exception):
    """The other side is not who it should be, or does not speak this protocol."""


def new_nonce() -> bytes:
    """Unpredictable, used once."""
    return secrets.token_bytes(NONCE_BYTES)


def derive_key(secret: bytes, node: int) -> bytes:
    """The key that lets `node` dial the listener with this secret."""
    return hmac.digest(secret, node.to_bytes(8, "little"), "sha256")


def _proof(key: bytes, role: bytes, hello: bytes, challenge_nonce: bytes, more: bytes = b"") -> bytes:
    return hmac.digest(key, role + hello + challenge_nonce + more, "sha256")


def _verify(proof: bytes, expected: bytes, who: str) -> None:
    if not hmac.compare_digest(proof, expected):
        raise Refused(f"the {who} does not know the key of this address")


@dataclass(frozen=True, slots=True)
class DialerSide:
    """What the dialer remembers between its messages."""

    key: bytes
    hello: bytes

    @classmethod
    def start(cls, key: bytes, dialer: int, listener: int) -> DialerSide:
        """`hello` is to be sent."""
        return cls(key, _HELLO.pack(_MAGIC, _VERSION, dialer, listener, new_nonce()))

    def offer(self, challenge: bytes, segment_nonce: bytes) -> bytes:
        """The OFFER that answers the CHALLENGE. Refused if the listener did not prove itself."""
        nonce, proof = _PAIR.unpack(challenge)
        _verify(proof, _proof(self.key, _AS_LISTENER, self.hello, nonce), "listener")
        return _PAIR.pack(segment_nonce, _proof(self.key, _AS_DIALER, self.hello, nonce, segment_nonce))


@dataclass(frozen=True, slots=True)
class ListenerSide:
    """What the listener remembers between its messages; `dialer` is only claimed until `accept_offer` returned."""

    key: bytes
    hello: bytes
    nonce: bytes
    dialer: int

    @classmethod
    def start(cls, secret: bytes, listener: int, hello: bytes) -> ListenerSide:
        """From the HELLO that came. Refused if it is not one, or is meant for somebody else."""
        magic, version, dialer, wanted, _ = _HELLO.unpack(hello)
        if magic != _MAGIC or version != _VERSION:
            raise Refused(f"not version {_VERSION} of the shared-memory handshake")
        if wanted != listener:
            raise Refused(f"it asked for node {format_node(wanted)}")
        return cls(derive_key(secret, dialer), hello, new_nonce(), dialer)

    def challenge(self) -> bytes:
        """The CHALLENGE to send."""
        return _PAIR.pack(self.nonce, _proof(self.key, _AS_LISTENER, self.hello, self.nonce))

    def accept_offer(self, offer: bytes) -> bytes:
        """The nonce that the segment must hold. Refused if the dialer did not prove itself."""
        segment_nonce, proof = _PAIR.unpack(offer)
        _verify(proof, _proof(self.key, _AS_DIALER, self.hello, self.nonce, segment_nonce), "dialer")
        return bytes(segment_nonce)
