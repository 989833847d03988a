"""Transfer of the application's state to joiners.

    member                                          joiner
    StateOffer(communicator) ─────────────────────→ opens the communicator of these two
    the value, each large array as one message ───→
                                                  ← checksum of the received value

A joiner becomes a member only after it returned the right checksum. So no member waits for a joiner that died before.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from nexar.cluster.control_loop import CancelToken
from nexar.cluster.membership import Member, Membership
from nexar.cluster.mesh import Mesh
from nexar.cluster.node import Node
from nexar.cluster.peer_probe import PingTable, probe_peer
from nexar.communicator.multipart import Run, new_memory, receive_parts, send_parts, wait_or_undo
from nexar.communicator.point_to_point import run_to_end
from nexar.communicator.serialization import ObjectError, decode_object, encode_object
from nexar.errors import NexarError, UsageError
from nexar.group import Group, deadline_after
from nexar.links.link import Link
from nexar.links.messages import OBJECT, ObjectReceive
from nexar.links.sending import MessageHeader
from nexar.types import NodeId
from nexar.wire.control import Message, StateOffer
from nexar.wire.frame import Space

_log = logging.getLogger(__name__)

_MEMBER, _JOINER = range(2)  # ranks of the two
_AT_ONCE: Final = 4  # joiners served at the same time
_VALUE, _CHECK = range(2)  # tags
_SUM_BYTES: Final = 4
_attempts = itertools.count(1)  # numbers of transfers; next() is atomic
_LONGEST_DIAL: Final = 5.0
_PROBE_SECONDS: Final = 1.0  # seconds for the joiner's host to report an ended process


# -- the member -----------------------------------------------------------------------------------------------


def send_state(
    node: Node,
    mesh: Mesh,
    state: Any,
    joiners: Sequence[Member],
    timeout: float,
    *,
    cancel_token: CancelToken | None = None,
) -> tuple[NodeId, ...]:
    """Block; return the joiners that got the state in time, in order. `cancel_token` aborts the transfer. UsageError
    if the state cannot be sent.
    """
    parts = encode_object(state)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="nexar-state") as pool:
        task = partial(
            _send_state, node, mesh, parts, deadline_after(timeout), cancel_token=cancel_token or CancelToken()
        )
        sent = list(pool.map(task, joiners))
    return tuple(joiner.node for joiner, done in zip(joiners, sent, strict=True) if done)


def _send_state(
    node: Node, mesh: Mesh, parts: Sequence[memoryview], deadline: float, joiner: Member, *, cancel_token: CancelToken
) -> bool:
    membership = mesh.directory.membership
    me = membership.members[mesh.directory.rank]
    pair = Membership(membership.cluster, next(_attempts), (me, joiner))
    if cancel_token.is_cancelled:  # while other joiners were served
        return False
    cause = _reported_end(node, joiner, deadline)
    if cause is not None:
        _log.warning("a joiner is left out: %s", cause)
        return False
    try:
        with _pair_group(node, mesh, pair) as group, cancel_token.waking(group.close):
            mesh.link(joiner.node, min(deadline, time.monotonic() + _LONGEST_DIAL)).send_control(
                StateOffer(group.communicator, pair.epoch)
            )
            confirmed = run_to_end(group, _send_and_confirm(group, parts, deadline), deadline)
    except NexarError as error:
        _log.warning("a joiner did not take the state, and is left out: %s", error)
        return False
    return confirmed == checksum(parts)


def _reported_end(node: Node, joiner: Member, deadline: float) -> str | None:
    """Return the cause if the joiner's host reports that its process ended: a QUIC dial would take longer."""
    until = min(deadline, time.monotonic() + _PROBE_SECONDS)
    failure = probe_peer(node, joiner, None, PingTable(), until)
    return failure.cause if failure is not None and time.monotonic() < until else None


def _send_and_confirm(group: Group, parts: Sequence[memoryview], deadline: float) -> Run[int]:
    about = MessageHeader(space=Space.TAGGED, tag=_VALUE, dtype=OBJECT)
    answer = group.post_receive(_JOINER, None, space=Space.TAGGED, tag=_CHECK)
    yield from send_parts(group, _JOINER, parts, about, deadline)
    yield from wait_or_undo((answer,))
    return int.from_bytes(bytes(answer.into or b""), "little")


# -- the joiner -----------------------------------------------------------------------------------------------


class StateReceiver:
    """Receives the state for a joiner. Its tasks end with the node."""

    def __init__(self, node: Node, mesh: Mesh) -> None:
        self._node = node
        self._mesh = mesh
        # The last state received. Written before the checksum is sent, so before this node can be a member.
        self.state: Any = None

    def offered(self, link: Link, message: Message) -> None:
        """Called by the driver."""
        assert isinstance(message, StateOffer)
        self._node.background.submit(partial(self._receive, link.peer, message))

    def _receive(self, peer: NodeId, offer: StateOffer) -> None:
        directory, me = self._mesh.directory, self._me()
        member = directory.find(peer)
        if member is None or offer.generation < 1 or offer.communicator != _id_of(peer, self._node.id):
            return
        pair = Membership(directory.membership.cluster, offer.generation, (member, me))
        deadline = deadline_after(self._node.config.elastic_checkpoint_timeout)
        try:
            with _pair_group(self._node, self._mesh, pair) as group:
                run_to_end(group, self._receive_state(group, deadline), deadline)
        except (NexarError, ObjectError, MemoryError) as error:
            _log.warning("the state was not received completely: %s", error)

    def _receive_state(self, group: Group, deadline: float) -> Run[None]:
        first = group.post_receive(_MEMBER, None, space=Space.TAGGED, tag=_VALUE, dtype=OBJECT, ask=ObjectReceive)
        parts = yield from receive_parts(group, first, new_memory)
        total = checksum(parts)
        self.state = decode_object(parts)
        check = memoryview(total.to_bytes(_SUM_BYTES, "little"))
        about = MessageHeader(space=Space.TAGGED, tag=_CHECK)
        yield from wait_or_undo((group.post_send(_MEMBER, check, deadline, about=about),))

    def _me(self) -> Member:
        node = self._node
        return Member(node.id, node.host, bytes(32), node.addresses(), node.schemes)


# -- shared ---------------------------------------------------------------------------------------------------


@contextmanager
def _pair_group(node: Node, mesh: Mesh, pair: Membership) -> Iterator[Group]:
    member, joiner = (each.node for each in pair.members)
    group = Group(node, mesh, pair, _id_of(member, joiner), pair.epoch)
    try:
        yield group
    finally:
        group.close(UsageError("the state was handed over"))


def _id_of(member: NodeId, joiner: NodeId) -> int:
    """Collisions have a probability of 2**-63. Each attempt has its own generation: late messages do not match."""
    facts = b"".join(each.to_bytes(8, "little") for each in (member, joiner))
    return int.from_bytes(hashlib.sha256(b"state" + facts).digest()[:8], "little") >> 1


def checksum(parts: Sequence[memoryview]) -> int:
    """Return the checksum of all bytes and part boundaries."""
    total = 0
    for part in parts:
        total = zlib.crc32(part, zlib.crc32(len(part).to_bytes(8, "little"), total))
    return total
