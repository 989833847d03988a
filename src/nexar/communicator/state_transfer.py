"""The application's state on its way to a joiner, before that is a member.

    member                                   joiner
    Offer(communicator) ───────────────────→  opens it too: a communicator of the two
    the value, large arrays each by itself ─→
          ←──────────────────────────────── the checksum of what has come

Only who sent back the right checksum may be voted in: who dies on the way was never a member, and nobody waits for it.
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

from nexar.cluster.control_threads import CancelToken
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

_MEMBER, _JOINER = range(2)  # ranks in the communicator of the two
_AT_ONCE: Final = 4  # joiners that are served at the same time
_VALUE, _CHECK = range(2)  # tags
_SUM_BYTES: Final = 4
_attempts = itertools.count(1)  # of this process to hand something over; next() is atomic
_LONGEST_DIAL: Final = 5.0
_GLANCE: Final = 1.0  # seconds in which a joiner's system has to say that nobody is there any more


# -- the member's side ---------------------------------------------------------------------------------------


def give(
    node: Node,
    mesh: Mesh,
    state: Any,
    joiners: Sequence[Member],
    timeout: float,
    *,
    cancel_token: CancelToken | None = None,
) -> tuple[NodeId, ...]:
    """Send the state to all of them; those that have it, in the order given. Who does not take it in time is left out.

    `recall` ends it: nobody would vote the joiners in any more. UsageError if it cannot be sent at all.
    """
    parts = encode_object(state)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="nexar-state") as pool:
        task = partial(_give, node, mesh, parts, deadline_after(timeout), cancel_token=cancel_token or CancelToken())
        given = list(pool.map(task, joiners))
    return tuple(joiner.node for joiner, fine in zip(joiners, given, strict=True) if fine)


def _give(
    node: Node, mesh: Mesh, parts: Sequence[memoryview], deadline: float, joiner: Member, *, cancel_token: CancelToken
) -> bool:
    membership = mesh.directory.membership
    me = membership.members[mesh.directory.rank]
    two = Membership(membership.cluster, next(_attempts), (me, joiner))
    if cancel_token.made:  # while others were served
        return False
    cause = _certain_end(node, joiner, deadline)
    if cause is not None:
        _log.warning("a joiner is left out: %s", cause)
        return False
    try:
        with _between(node, mesh, two) as group, cancel_token.waking(group.close):
            mesh.link(joiner.node, min(deadline, time.monotonic() + _LONGEST_DIAL)).send_control(
                StateOffer(group.communicator, two.epoch)
            )
            told = run_to_end(group, _sent(group, parts, deadline), deadline)
    except NexarError as error:
        _log.warning("a joiner did not take the state, and is left out: %s", error)
        return False
    return told == checksum(parts)


def _certain_end(node: Node, joiner: Member, deadline: float) -> str | None:
    """Why nobody is there any more, if its system says so: QUIC would dial for long. Its silence says nothing."""
    until = min(deadline, time.monotonic() + _GLANCE)
    cause = probe_peer(node, joiner, None, PingTable(), until)
    return cause if time.monotonic() < until else None


def _sent(group: Group, parts: Sequence[memoryview], deadline: float) -> Run[int]:
    about = MessageHeader(space=Space.TAGGED, tag=_VALUE, dtype=OBJECT)
    answer = group.post_receive(_JOINER, None, space=Space.TAGGED, tag=_CHECK)
    yield from send_parts(group, _JOINER, parts, about, deadline)
    yield from wait_or_undo((answer,))
    return int.from_bytes(bytes(answer.into or b""), "little")


# -- the joiner's side ---------------------------------------------------------------------------------------


class StateReceiver:
    """Takes the state for a node that waits to become a member. Its threads end with the node's dialer."""

    def __init__(self, node: Node, mesh: Mesh) -> None:
        self._node = node
        self._mesh = mesh
        self.state: Any = None
        """What came last. Written before its sender hears that it came, so before this node can be a member."""

    def offered(self, link: Link, message: Message) -> None:
        """A member has it. The driving thread."""
        assert isinstance(message, StateOffer)
        self._node.dialer.run_in_thread(partial(self._take, link.peer, message))

    def _take(self, peer: NodeId, offer: StateOffer) -> None:
        directory, me = self._mesh.directory, self._me()
        member = directory.find(peer)
        if member is None or offer.generation < 1 or offer.communicator != _id_of(peer, self._node.id):
            return
        two = Membership(directory.membership.cluster, offer.generation, (member, me))
        deadline = deadline_after(self._node.config.elastic_checkpoint_timeout)
        try:
            with _between(self._node, self._mesh, two) as group:
                run_to_end(group, self._taken(group, deadline), deadline)
        except (NexarError, ObjectError, MemoryError) as error:
            _log.warning("the state did not come whole: %s", error)

    def _taken(self, group: Group, deadline: float) -> Run[None]:
        first = group.post_receive(_MEMBER, None, space=Space.TAGGED, tag=_VALUE, dtype=OBJECT, ask=ObjectReceive)
        parts = yield from receive_parts(group, first, new_memory)
        total = checksum(parts)
        self.state = decode_object(parts)
        check = memoryview(total.to_bytes(_SUM_BYTES, "little"))
        about = MessageHeader(space=Space.TAGGED, tag=_CHECK)
        yield from wait_or_undo((group.post_send(_MEMBER, check, deadline, about=about),))

    def _me(self) -> Member:
        node = self._node
        return Member(node.id, node.host, bytes(32), node.addresses(), node.capabilities)


# -- what they share -----------------------------------------------------------------------------------------


@contextmanager
def _between(node: Node, mesh: Mesh, two: Membership) -> Iterator[Group]:
    member, joiner = (each.node for each in two.members)
    group = Group(node, mesh, two, _id_of(member, joiner), two.epoch)
    try:
        yield group
    finally:
        group.close(UsageError("the state was handed over"))


def _id_of(member: NodeId, joiner: NodeId) -> int:
    """Of the communicator of the two: no other has it, but for a chance of one in 2**63. Each attempt is a generation
    of it: what comes too late for one is not taken for the next.
    """
    facts = b"".join(each.to_bytes(8, "little") for each in (member, joiner))
    return int.from_bytes(hashlib.sha256(b"state" + facts).digest()[:8], "little") >> 1


def checksum(parts: Sequence[memoryview]) -> int:
    """Of all bytes, and of where one part ends and the next begins."""
    total = 0
    for part in parts:
        total = zlib.crc32(part, zlib.crc32(len(part).to_bytes(8, "little"), total))
    return total
