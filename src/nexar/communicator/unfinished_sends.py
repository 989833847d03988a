"""Waits for messages whose sends were started and have not ended. For a node that is about to leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from nexar.errors import NexarError
from nexar.links.link import Link
from nexar.links.progress import Progress
from nexar.links.send import Send
from nexar.types import NodeId
from nexar.wire.frame import Space

_Message = tuple[NodeId, int, int, int]
"""Destination, communicator, and what tells messages of one communicator apart."""


def deliver_sends(
    links: Callable[[], Mapping[NodeId, Link]], progress: Progress, deadline: float
) -> Mapping[NodeId, int]:
    """Wait until every message is delivered, or the deadline (time.monotonic) is over.

    Returns how many messages each node did not take. Sends that are not done by then are left as they are. A message in
    parts posts one part after the other, so links are looked at again until none has an unfinished send.
    """
    failed: set[_Message] = set()
    while sends := [send for link in links().values() for send in link.unfinished_sends()]:
        late = False
        for send in sends:
            _wait(send, progress, deadline)
            late = late or not send.done
            if send.error is not None or not send.done:
                failed.add(_message_of(send))
        if late:
            break
    return Counter(node for node, *_ in failed)


def _wait(send: Send, progress: Progress, deadline: float) -> None:
    try:
        progress.wait((send,), deadline, keep=True)
    except NexarError:
        return  # the deadline, or the error of the send: the caller looks at the send


def _message_of(send: Send) -> _Message:
    """All parts of a message have the tag that its first part gave; other messages have a number each."""
    frame = send.frame
    number = frame.tag if frame.space == Space.PART else frame.message
    return frame.destination, frame.communicator, frame.space, number
