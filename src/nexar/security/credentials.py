"""What a node shows and whom it believes: plain values, PEM inside."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Credentials:
    """A node's certificate chain and private key. The key never leaves the process and never shows in a repr."""

    node: int
    cluster: str
    certificate_chain: bytes
    private_key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Trust:
    """Certificates signed by one of `authorities` (PEM) are believed. `allow_anonymous` lets joining candidates
    without a certificate in; their carriers are marked unverified."""

    authorities: bytes
    allow_anonymous: bool = False
