"""What to say when a certificate was refused, theirs or ours: a TLS alert alone helps nobody."""

from __future__ import annotations

from nexar.security.credentials import Credentials
from nexar.transport.base import Expected
from nexar.types import UNKNOWN_NODE, format_node


def advice(expected: Expected, ours: Credentials | None) -> str:
    """Whom the dial meant, what it showed, and what to do if the two sides do not believe each other; for brackets."""
    shown = None if expected.anonymous else ours
    return f"expected {_whom(expected, ours)}, showed {_what(shown)}; {_remedy(expected)}"


def _whom(expected: Expected, ours: Credentials | None) -> str:
    if expected.node == UNKNOWN_NODE:
        return "the seed with the key in the ticket" if expected.fingerprint else "a seed"
    cluster = "" if ours is None else f" of cluster {ours.cluster!r}"
    return f"node {format_node(expected.node)}{cluster}"


def _what(shown: Credentials | None) -> str:
    return "no certificate" if shown is None else f"node {format_node(shown.node)} of cluster {shown.cluster!r}"


def _remedy(expected: Expected) -> str:
    if expected.node == UNKNOWN_NODE:
        return "another seed may run at that address: use the ticket, or the token, of the one that runs now"
    return "both must belong to one cluster and be who the membership says: check what runs at that address"
