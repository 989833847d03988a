"""Moving a message from one memory to another while its payload may still be arriving.

The carrier is asked to let the rest land in the new place and moves what it has; only if it says that everything has
landed in the old place already is there something for us to copy. Runs without the node's lock: it may take long.
"""

from __future__ import annotations

from nexar.arrays.view import allocate, copy
from nexar.links.message import Message, Receive
from nexar.transport.base import Redirected


def move(message: Message, into: memoryview) -> bool:
    """Let the message be in `into`. True: all of it is there; False: the rest will come, or never will.

    The message is in state moving, so nobody else touches its memory. `arrived` may be set meanwhile by the driving
    thread: then the carrier answers that all has landed, or it landed in the new place after the redirection.
    """
    old = message.data
    assert old is not None
    if not message.arrived:
        outcome = message.origin.redirect(message, into)
        if outcome is not Redirected.LANDED:
            return False
    copy(old, into)
    return True


def make_room(receive: Receive, message: Message) -> bool:
    """Memory for a receive that brought none. The size is the sender's claim, so it may be absurd: False, and the
    receive is done.
    """
    try:
        receive.into = allocate(message.frame.length)
    except (MemoryError, ValueError):
        receive.finish(no_memory(receive, message.frame.length))
        return False
    return True


def no_memory(receive: Receive, size: int) -> MemoryError:
    """What a receive raises that brought no memory, if there is none for its message."""
    return MemoryError(
        f"{receive.name}: a message of {size} bytes does not fit into memory; it is kept: free some memory"
    )
