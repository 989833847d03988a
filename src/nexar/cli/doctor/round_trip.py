"""Two nodes inside this process that really connect: a handshake with certificates, or a segment of memory."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from nexar.cli.doctor.consultation import DIAL_TIMEOUT, Consultation
from nexar.cli.doctor.conversation import Conversation
from nexar.cli.doctor.observations import Trip
from nexar.cluster.membership import Member, Membership
from nexar.cluster.node import Node
from nexar.cluster.transports import NETWORK
from nexar.config import Config
from nexar.errors import NexarError
from nexar.security.authority import Authority, make_credentials
from nexar.security.credentials import Trust
from nexar.security.identity import fingerprint
from nexar.transport.base import Carrier, CarrierLost, ConnectRefused
from nexar.transport.quic import available
from nexar.transport.shm.support import missing_support

_CLUSTER: Final = "doctor"
_LOOPBACK: Final = "127.0.0.1"


def try_trip(scheme: str, config: Config) -> Trip:
    """Over loopback, or through memory. What fails is told, never raised."""
    missing = available() if scheme == "quic" else missing_support() if scheme == "shm" else None
    if missing is not None:
        return Trip(scheme, problem=missing if scheme == "shm" else "")  # the versions tell of a missing package
    schemes = (scheme,) if scheme in NETWORK else (scheme, "tls")
    alone = replace(
        config, transports=schemes, bind=_LOOPBACK, port=0, port_range=None, iface=None, advertise=None, host_id=None
    )
    try:
        with ExitStack() as undo:
            near, far = (undo.enter_context(Node(alone)) for _ in range(2))
            return Trip(scheme, round_trip=_talk(near, far, scheme, undo))
    except (ConnectRefused, CarrierLost, OSError, NexarError) as error:
        return Trip(scheme, problem=getattr(error, "reason", None) or str(error))


def _talk(near: Node, far: Node, scheme: str, undo: ExitStack) -> float:
    membership = _certified(near, far)
    asking, answering = Consultation(near), Consultation(far)
    for node, consultation in ((near, asking), (far, answering)):
        node.listen(consultation)
        consultation.adopt(membership)
    undo.callback(answering.close)
    undo.callback(asking.close)
    deadline = time.monotonic() + DIAL_TIMEOUT
    if scheme in NETWORK:
        reach = next(reach for reach in asking.examine(0) if reach.scheme == scheme)
        if reach.round_trip is None:
            raise ConnectRefused(_LOOPBACK, reach.problem)
        return reach.round_trip
    carrier = near.connect_memory(far.memory_address_for(near.id), far.id, deadline)
    return _ask(carrier, deadline, undo)


def _ask(carrier: Carrier, deadline: float, undo: ExitStack) -> float:
    conversation = Conversation(carrier, lambda _conversation, _said: None)
    undo.callback(conversation.finish)
    return conversation.sound(deadline).round_trip


def _certified(*nodes: Node) -> Membership:
    """A cluster of these, made by hand."""
    authority = Authority.create(_CLUSTER)
    for node in nodes:
        certificate = authority.issue(node.id, node.key.public_key())
        node.certify(make_credentials(node.id, _CLUSTER, node.key, certificate), Trust(authority.certificate_pem))
    members = (Member(node.id, node.host, fingerprint(node.key.public_key()), node.addresses()) for node in nodes)
    return Membership(_CLUSTER, 1, tuple(members))
