"""A signal handler of ours that stands before another one, and the question whether that may run now.

Each installation is an object of its own that knows whom it stands before. So a handler that a user puts before ours
may call ours, which goes on to the one before it, and ours may step before that user's again: the chain only ever
leads to older ones, and a user who puts an old handler back gets what stood there then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Final

Called = Callable[[int, FrameType | None], object]

_OURS: Final = ("nexar.links.", "nexar.group", "nexar.rpc.", "nexar.collectives.", "nexar.communicator.")
_BLOCKING: Final = "nexar.links.redial"  # waits for a thread of its own, for long, and leaves nothing half done


class Handler:
    """Stands before `before`, which `receive` hands the signal to at the right time."""

    __slots__ = ("_receive", "before", "number")

    def __init__(self, number: int, before: Called, receive: Callable[[Handler, FrameType], None]) -> None:
        self.number = number
        self.before = before
        self._receive = receive

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The interpreter calls a handler right from the frame that it interrupts. Any other caller is a handler that
        stands before us, and runs now because its time has come.
        """
        if frame is not None and frame is sys._getframe(1):
            self._receive(self, frame)
        else:
            self.hand_over(frame)

    def hand_over(self, frame: FrameType | None) -> None:
        """Now. May raise whatever the user's handler raises."""
        self.before(self.number, frame)


_HANDING_OVER: Final[CodeType] = Handler.hand_over.__code__


def is_inside(frame: FrameType | None) -> bool:
    """Is a thread that is here in the middle of something of ours?

    The innermost frame of ours says so. Transports do their work below a frame of ours, too; without one they dial,
    which blocks and may be interrupted. And below a user's handler that we call, it is the user's code that runs.

    A verb of a communicator is ours from its first line to its last: a collective that has its number, and is not run
    yet, is half done as well, and the other ranks would wait for it.
    """
    while frame is not None:
        module: str = frame.f_globals.get("__name__", "")
        if module.startswith(_OURS):
            return frame.f_code is not _HANDING_OVER and module != _BLOCKING
        frame = frame.f_back
    return False
