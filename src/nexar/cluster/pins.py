"""Is the one at the other end of a connection who it says? The transport verifies chain and name; the pin is ours."""

from __future__ import annotations

import hmac

from nexar.cluster.circle import Circle
from nexar.security.identity import NotOurs, certificate_fingerprint
from nexar.transport.base import Carrier
from nexar.types import NodeId, format_node

_WITHOUT_CERTIFICATES = frozenset({"shm", "memory"})
"""Schemes that prove who is there by other means: a secret that only this peer was told, or being in this process."""


def why_not(carrier: Carrier, circle: Circle) -> str | None:
    """Why this carrier's peer is not let in; None if it is who the membership says, or was a member once: who that is
    will be told so, and nothing else.
    """
    peer, membership = carrier.peer, circle.membership
    member = circle.find(peer.node)
    if not peer.verified:
        return "it has not proven who it is"
    if member is None and peer.node in circle.former:
        return None
    if member is None and membership.pin(peer.node) is not None:
        return f"node {format_node(peer.node)} holds no rank, so it has no link"
    if member is None:
        return f"node {format_node(peer.node)} is not in the membership of epoch {membership.epoch}"
    if peer.certificate is not None:
        return _compare(peer.certificate, member.fingerprint, peer.node)
    return None if carrier.scheme in _WITHOUT_CERTIFICATES else "it showed no certificate"


def _compare(certificate: bytes, pin: bytes, node: NodeId) -> str | None:
    try:
        found = certificate_fingerprint(certificate)
    except NotOurs as error:
        return f"its certificate is not readable: {error}"
    same = hmac.compare_digest(found, pin)
    return None if same else f"node {format_node(node)} has another key than the membership pins"
