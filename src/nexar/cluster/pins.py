"""Is the one at the other end of a connection a member? The transport has verified chain and name; the pin is ours."""

from __future__ import annotations

import hmac

from nexar.cluster.membership import Membership
from nexar.security.identity import NotOurs, certificate_fingerprint
from nexar.transport.base import Carrier
from nexar.types import NodeId, format_node

_WITHOUT_CERTIFICATES = frozenset({"shm", "memory"})
"""Schemes that prove who is there by other means: a secret that only this peer was told, or being in this process."""


def why_not(carrier: Carrier, membership: Membership) -> str | None:
    """Why this carrier's peer is not let in; None if it is who the membership says."""
    peer = carrier.peer
    pin = membership.pin(peer.node)
    if not peer.verified:
        return "it has not proven who it is"
    if pin is None:
        return f"node {format_node(peer.node)} is not in the membership of epoch {membership.epoch}"
    if membership.rank_of(peer.node) is None:
        return f"node {format_node(peer.node)} holds no rank, so it has no link"
    if peer.certificate is not None:
        return _compare(peer.certificate, pin, peer.node)
    return None if carrier.scheme in _WITHOUT_CERTIFICATES else "it showed no certificate"


def _compare(certificate: bytes, pin: bytes, node: NodeId) -> str | None:
    try:
        found = certificate_fingerprint(certificate)
    except NotOurs as error:
        return f"its certificate is not readable: {error}"
    same = hmac.compare_digest(found, pin)
    return None if same else f"node {format_node(node)} has another key than the membership pins"
